"""No variable of the outer run in inner ones."""

from __future__ import annotations

import pytest

from tests.inner_runs import forget_outer_run


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_outer_run(monkeypatch)
