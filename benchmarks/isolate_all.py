"""A pytest plugin: every test needs a device, and so runs in a device process; outcomes are written to $OUTCOMES."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

HERE = os.getpid()

_outcomes: list[tuple[str, str | None, str]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.requires_cuda)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = f"x{report.outcome}" if hasattr(report, "wasxfail") else report.outcome
    _outcomes.append((report.nodeid, report.when, outcome))


def pytest_sessionfinish() -> None:
    if os.getpid() == HERE:
        Path(os.environ["OUTCOMES"]).write_text(json.dumps(_outcomes))
