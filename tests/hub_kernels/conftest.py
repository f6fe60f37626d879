"""Hub kernels without a Hub: kernel repositories of ours, a cache that they are laid into, and no network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hub_kernels.tiny import ROOT, refuse, seed, tiny_llama
from tests.inner_runs import forget_outer_run


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, and a cache of the test's own; nothing of the outer run."""
    constants = pytest.importorskip("huggingface_hub.constants")
    forget_outer_run(monkeypatch)
    cache = tmp_path / "hub-cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for name in ("LOCAL_KERNELS", "KERNELS_CACHE", "USE_HUB_KERNELS", "DISABLE_KERNEL_MAPPING"):
        monkeypatch.delenv(name, raising=False)
    return cache


@pytest.fixture
def seeded(offline: Path) -> Callable[..., str]:
    """Lays a kernel repository into the cache, as downloading it would: `seeded("org/name", folder)`."""
    return lambda repo, folder, **kwargs: seed(offline, repo, folder, **kwargs)


@pytest.fixture
def engine() -> Iterator[Any]:
    """The fixture's object, with a refusal that is an exception of its own."""
    pytest.importorskip("transformers")
    from pytest_cudaenv.verdict.hub_engine import HubKernels

    hub_kernels = HubKernels(refuse, root=ROOT)
    hub_kernels.begin()
    yield hub_kernels
    hub_kernels.end()


@pytest.fixture
def model() -> Any:
    """A tiny Llama whose norms have weights that no identity passes for: 5 RMSNorm, 2 SiLU, one rotary function."""
    return tiny_llama()


@pytest.fixture
def ids() -> Any:
    import torch

    return torch.arange(16).view(2, 8) % 64


@pytest.fixture
def patched(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a kernel repository with changes: `patched(TINY, variant=…, text=(file, old, new), metadata={…})`."""

    def copy(
        source: Path,
        *,
        name: str = "patched",
        variant: str = "torch-universal",
        text: tuple[str, str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        drop: Sequence[str] = (),
    ) -> Path:
        target = tmp_path / name
        folder = target / "build" / variant
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / "build" / "torch-universal", folder, ignore=ignored)
        if text is not None:
            file, old, new = text
            content = (folder / file).read_text()
            assert old in content
            (folder / file).write_text(content.replace(old, new))
        data = json.loads((folder / "metadata.json").read_text()) | (metadata or {})
        (folder / "metadata.json").write_text(json.dumps({k: v for k, v in data.items() if k not in drop}))
        return target

    return copy
