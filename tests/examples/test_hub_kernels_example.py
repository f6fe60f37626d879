"""examples/hub_kernels runs as its README says, here and with no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inner_runs import ADDOPTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("option", "passed"), [("auto", 9), ("off", 2)])
def test_the_example(option: str, passed: int) -> None:
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CUDAENV_", "PYTEST_"))}
    environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "-1", "PYTEST_ADDOPTS": ADDOPTS}
    command = [sys.executable, "-m", "pytest", "examples/hub_kernels", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, f"--cuda-hub-kernels={option}"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert f"{passed} passed" in run.stdout
