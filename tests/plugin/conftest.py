"""Suites that pytester runs, the same on every machine: fabricated hosts, and no variable of the outer run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

# pytester forgets modules that only an inner run imported. These must stay one and the same for all of them.
import pytest_cudaenv.decorators
import pytest_cudaenv.host.detect
import pytest_cudaenv.plan  # noqa: F401
from pytest_cudaenv.host.devices import Host

OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTEST_XDIST_AUTO_NUM_WORKERS")

OF_CI = ("CI", "BUILD_NUMBER", "TF_BUILD", "GITHUB_ACTIONS")
"""By which pytest shows whole messages, and hypothesis takes other settings: what is tested is seen without."""


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner runs neither see the outer run's settings nor shuffle their tests."""
    for name in [n for n in os.environ if n in (*OURS, *OF_CI) or n.startswith("CUDAENV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:html -p no:metadata -p no:syrupy")
    # Hundreds of starts: each would compile the package again.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], None]:
    """Makes every run in this process find this host."""

    def fabricate(host: Host) -> None:
        monkeypatch.setattr("pytest_cudaenv.host.detect.detect_host", lambda *_, **__: host)
        monkeypatch.setattr("pytest_cudaenv.cli.detect_host", lambda *_, **__: host)

    return fabricate
