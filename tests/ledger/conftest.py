"""Suites that pytester runs: no variable of the outer run, and a collector of what became of each test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from tests.inner_runs import forget_outer_run

# Machines of all speeds run this, and examples that fail belong into the tests.
settings.register_profile("ledger", deadline=None, database=None)
settings.load_profile("ledger")

COLLECTOR = """
import json, os

FOUND = {}

def pytest_load_initial_conftests():
    if os.environ.get("FABRICATED") == "cpu":
        from pytest_cudaenv.host import detect
        from pytest_cudaenv.host.devices import Host
        from pytest_cudaenv.host.software import installed_software
        detect.detect_host = lambda *_, **__: Host(software=installed_software())

def pytest_runtest_logreport(report):
    found = FOUND.setdefault(report.nodeid, {"outcome": "passed", "codes": [], "ran_on": None, "skip": None})
    record = getattr(report, "cudaenv", None) or {}
    if report.outcome != "passed":
        found["outcome"] = report.outcome
        found["codes"] = sorted({reason["code"] for reason in record.get("reasons", ())})
        found["skip"] = record.get("skip")
    found["ran_on"] = record.get("ran_on") or found["ran_on"]

def pytest_sessionfinish():
    with open("outcomes.json", "w") as file:
        json.dump(FOUND, file)
"""

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[pytest.RunResult, Outcomes]]:
    """Runs the suite that stands there with these arguments: the result, and what became of each test."""
    forget_outer_run(monkeypatch)
    for name in [n for n in os.environ if n.startswith(("RUN_", "PYTEST_XDIST"))]:
        monkeypatch.delenv(name)
    pytester.makepyfile(outcome_collector=COLLECTOR)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)

    def started(*arguments: str) -> tuple[pytest.RunResult, Outcomes]:
        result = pytester.runpytest_subprocess("-p", "outcome_collector", *arguments)
        return result, json.loads((pytester.path / "outcomes.json").read_text())

    return started
