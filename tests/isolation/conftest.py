"""Inner runs see neither the outer run's settings nor its order, and leases of their own folder."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import _only_what_a_test_sets, on_host

__all__ = ["_only_what_a_test_sets", "on_host"]


@pytest.fixture(autouse=True)
def _own_leases(
    _only_what_a_test_sets: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAENV_LEASE_DIR", str(tmp_path_factory.mktemp("leases")))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # by which syrupy and pytest-html know a worker
