"""Kernels are downloaded once for a run, before its first test; then the Hub is not needed any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("kernels")
pytest.importorskip("xdist")

from tests.hub_kernels.stub_hub import StubHub
from tests.hub_kernels.tiny import ROOT, TINY
from tests.inner_runs import ADDOPTS

SUITE = """
import pytest, torch
from kernels import use_kernel_forward_from_hub
from pytest_cudaenv import hub_kernels as uses_kernels

@use_kernel_forward_from_hub("SiLU")
class SiLU(torch.nn.Module):
    def forward(self, input): return torch.nn.functional.silu(input)

@pytest.mark.parametrize("n", range(8))
@uses_kernels({"SiLU": "org/tiny:SiLU@v1"})
def test_silu(hub_kernels, n):
    model, x = SiLU(), torch.ones(2)
    with hub_kernels.on(model, device="cpu") as report:
        model(x)
    assert report.replaced[0].revision == "v1"
"""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_of_kernels.py").write_text(SUITE)

    def start(endpoint: str, *args: str, code: int = 0) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDAENV_", "PYTEST_", "HF_"))}
        environ = kept | {
            "PYTEST_ADDOPTS": ADDOPTS,
            "HF_ENDPOINT": endpoint,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *args]
        ran = subprocess.run(command, cwd=suite, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stdout[-4000:] + ran.stderr[-2000:]
        return ran.stdout

    return start


FILES = {
    f"org/tiny/{path.relative_to(TINY)}" for path in (TINY / "build").rglob("*") if path.suffix in {".py", ".json"}
}


@pytest.mark.parametrize("workers", [4, 0])
def test_each_file_is_fetched_once_and_then_none(run: Run, workers: int, tmp_path: Path) -> None:
    args = ("-n", str(workers)) if workers else ("-p", "no:xdist")
    with StubHub({"org/tiny": {1: TINY}}, trusted={"org"}) as hub:
        assert "8 passed" in run(hub.url, *args)
        assert hub.fetched == dict.fromkeys(FILES, 1)
        # The trust of the publisher is asked for by whoever asks the Hub: one process did.
        assert hub.asked["organization"] == 1
    assert list((tmp_path / "cache").glob("kernels--org--tiny/refs/v1"))
    # The network is gone; nobody has said so. Two workers tell no less of that than four.
    assert "8 passed" in run(hub.url, *(("-n", "2") if workers else args))


def test_a_publisher_whom_nobody_trusts_is_told(run: Run) -> None:
    with StubHub({"org/tiny": {1: TINY}}) as hub:
        out = run(hub.url, "-p", "no:xdist", code=1)
    assert "[kernels-download] org/tiny could not be downloaded: [kernels-untrusted]" in out
    assert "[kernels-untrusted] SiLU" in out
    assert not hub.fetched


def test_no_network_and_nothing_cached_is_a_skip(run: Run) -> None:
    with StubHub({}) as hub:
        pass
    assert "8 skipped" in run(hub.url, "-p", "no:xdist")
