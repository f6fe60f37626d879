"""Suites that pytester runs: simulated hosts, and no variable of the outer run."""

from __future__ import annotations

import pytest

# pytester forgets modules that only an inner run imported. These must stay one and the same for all of them.
import pytest_cudaenv.decorators
import pytest_cudaenv.host.detect
import pytest_cudaenv.plan  # noqa: F401
from tests.inner_runs import forget_outer_run


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner runs neither see the outer run's settings nor shuffle their tests."""
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester")  # which forgets some of it, and sets its own
        forget_outer_run(monkeypatch)
