"""Suites that pytester runs, the same on every machine: fabricated hosts, and no variable of the outer run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# pytester forgets modules that only an inner run imported. These must stay one and the same for all of them.
import pytest_cudaenv.decorators
import pytest_cudaenv.host.detect
import pytest_cudaenv.plan  # noqa: F401
from pytest_cudaenv.grants.process import fork_hazards
from pytest_cudaenv.host.devices import Host
from tests.inner_runs import forget_outer_run


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner runs neither see the outer run's settings nor shuffle their tests."""
    forget_outer_run(monkeypatch)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], None]:
    """Makes every run in this process find this host.

    Fresh interpreters would not: thread pools that other tests have left idle in this process are no hazard here.
    """
    there = set(fork_hazards())
    monkeypatch.setattr(
        "pytest_cudaenv.poison.fork_hazards", lambda: [name for name in fork_hazards() if name not in there]
    )

    def fabricate(host: Host) -> None:
        monkeypatch.setattr("pytest_cudaenv.host.detect.detect_host", lambda *_, **__: host)
        monkeypatch.setattr("pytest_cudaenv.cli.detect_host", lambda *_, **__: host)

    return fabricate
