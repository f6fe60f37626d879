"""What a run of pytest inside a test is to know of the run around it: nothing, and no plugin that it does not use."""

from __future__ import annotations

import os

import pytest

OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTEST_XDIST_AUTO_NUM_WORKERS")

OF_CI = ("CI", "BUILD_NUMBER", "TF_BUILD", "GITHUB_ACTIONS")
"""By which pytest shows whole messages, and hypothesis takes other settings."""

UNUSED = ("randomly", "html", "metadata", "syrupy", "anyio", "hypothesispytest", "platformdirs")
"""Plugins that take two thirds of the time of a start, of which there are hundreds. `-p` brings one back."""

ADDOPTS = " ".join(f"-p no:{name}" for name in UNUSED)


def forget_outer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the environment says of the outer run."""
    for name in [n for n in os.environ if n in (*OURS, *OF_CI) or n.startswith("CUDAENV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", ADDOPTS)
    # Each start would compile the package again.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
