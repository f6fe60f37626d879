"""A build of FlashAttention-3 in a folder, made into a kernel repository, and the suite that its cells have to pass.

Nothing is installed: the build is reached through LOCAL_KERNELS, as the kernel that transformers takes where the
package is missing. One suite for a device and the real build, and for the CPU and a fake of the same shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

REPO = "kernels-community/vllm-flash-attn3"
IDENTITY = "_fa3_of_a_build"
INTERFACE, LIBRARY = "flash_attn_interface.py", "flash_attn_3/_C.abi3.so"

INIT = '''
"""FlashAttention-3's own interface, as a kernel. It imports a package flash_attn_3, which nobody has installed: the
library is loaded here, and for as long as the interface is imported there is such a package, with nothing in it."""

import sys
from pathlib import Path
from types import ModuleType

import torch

torch.ops.load_library(str(Path(__file__).parent / "flash_attn_3" / "_C.abi3.so"))
names = ("flash_attn_3", "flash_attn_3._C")
before = {name: sys.modules.get(name) for name in names}
for name in names:
    sys.modules[name] = ModuleType(name)
sys.modules["flash_attn_3"].__path__ = []
try:
    from .flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
finally:
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''


def missing_from(build: Path) -> list[str]:
    """What a build lacks of what it is to have."""
    return [name for name in (INTERFACE, LIBRARY) if not (build / name).is_file()]


def lay_out(build: Path, target: Path, variant: str) -> Path:
    """A kernel repository whose one build is this one, by links: its library is large."""
    folder = target / "build" / variant
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(INIT.lstrip())
    metadata = {
        "name": "vllm-flash-attn3",
        "id": IDENTITY,
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ["9.0a"]},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    for name in (INTERFACE, "flash_attn_3"):
        (folder / name).symlink_to((build / name).resolve())
    return target


def environment(repository: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a run finds the build as a kernel, and in no other way."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    without = [path for path in paths if path and not (Path(path) / INTERFACE).is_file()]
    return {
        "LOCAL_KERNELS": f"{REPO}={repository}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(without),
    }


SUITE = '''
import os
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes

REPO, IDENTITY = @REPO@, @IDENTITY@
CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, initializer_range=0.1,
)

pytestmark = [attn_backends("flash_attention_3"), dtypes("fp16", "bf16")]


@pytest.fixture
def here(cell):
    """The cell; on the CPU where the device is simulated."""
    return replace(cell, device=torch.device("cpu")) if os.environ.get("FA3_ON_CPU") else cell


def inputs(device, is_padded=False):
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, :17] = 0 if is_padded else 1
    ids = torch.arange(128).reshape(2, 64) % 128
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_each_layer_runs_the_kernel(here, attn_witness, is_padded):
    model = here.build(LlamaForCausalLM, CONFIG)
    assert model.config._attn_implementation == REPO
    with attn_witness(model) as seen, torch.no_grad():
        model(**inputs(here.device, is_padded))
    seen.assert_ran("flash_attention_3", causal=True)
    assert len({call.module for call in seen.calls}) == 2
    function = "flash_attn_varlen_func" if is_padded else "flash_attn_func"
    assert {call.function for call in seen.calls} == {f"{IDENTITY}.flash_attn_interface.{function}"}


def test_a_window_reaches_the_kernel(here, attn_witness):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**{**CONFIG.to_dict(), "model_type": "mistral", "sliding_window": 16, "head_dim": 64})
    model = here.build(MistralForCausalLM, config)
    with attn_witness(model) as seen, torch.no_grad():
        model(**inputs(here.device))
    seen.assert_ran("flash_attention_3", window=16, causal=True)


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_its_numbers_are_right(here, assert_parity, is_padded):
    assert_parity.cell = here
    assert_parity(here.build(LlamaForCausalLM, CONFIG), **inputs(here.device, is_padded))


def test_the_report_names_repository_and_file(here, hub_kernels):
    with hub_kernels.watch() as report, torch.no_grad():
        here.build(LlamaForCausalLM, CONFIG)(**inputs(here.device))
    report.assert_replaced("attention")
    [row] = report.rows
    assert (row.repository, row.calls) == (REPO, 2)
    assert row.file.startswith(os.environ["LOCAL_KERNELS"].partition("=")[2])


def test_nothing_is_installed_by_that_name(here):
    here.build(LlamaForCausalLM, CONFIG)(**inputs(here.device))
    assert not {"flash_attn_3", "flash_attn_interface"} & set(sys.modules)
    assert IDENTITY in sys.modules
'''.replace("@REPO@", repr(REPO)).replace("@IDENTITY@", repr(IDENTITY))

TESTS = 2 * (2 + 1 + 2 + 1 + 1)
"""Tests in it, in both dtypes."""
