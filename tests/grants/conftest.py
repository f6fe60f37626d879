"""Leases of a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_cudaenv.grants.lease_table import LeaseTable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def table(folder: Path) -> LeaseTable:
    return LeaseTable(folder)
