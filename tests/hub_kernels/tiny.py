"""A tiny model, kernel repositories for its layers, and a cache that they are laid into without any download."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_cudaenv.requirements.reason import Reason

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "hub_kernels" / "kernels" / "tiny-layers"
KERNELS = Path(__file__).parent / "kernels"
ODD = KERNELS / "odd-layers"
FULL = {"RMSNorm": f"{TINY}:RMSNorm", "SiLU": f"{TINY}:SiLU", "rotary_pos_emb": f"{TINY}:Rotary"}


class Refused(Exception):
    """The engine ended the test as one whose needs are not met."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(" | ".join(map(str, reasons)))
        self.reasons = tuple(reasons)
        self.codes = [reason.code for reason in reasons]


def refuse(reasons: Sequence[Reason]) -> Any:
    raise Refused(reasons)


def tiny_llama(**config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    made = LlamaForCausalLM(LlamaConfig(**{**sizes, "attn_implementation": "eager", **config})).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def seed(cache: Path, repo: str, folder: Path, *, versions: Sequence[int] = (1,), with_refs: bool = True) -> str:
    """Lay a kernel repository into a cache as `repo`; its commit. Without refs as downloading version=1 leaves it."""
    digest = hashlib.sha1()
    for path in sorted((folder / "build").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    commit = digest.hexdigest()
    root = cache / f"kernels--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    for name in [*(f"v{version}" for version in versions), "main"] if with_refs else []:
        (root / "refs" / name).write_text(commit)
    target = root / "snapshots" / commit / "build"
    shutil.copytree(folder / "build", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return commit
