"""Snapshots that tests assert in device processes, for syrupy's report: it calls the others unused, and removes them.

syrupy has no public interface for that, only for xdist's workers. What is used of it, the same since its version 4:
https://github.com/syrupy-project/syrupy/blob/v5.0.0/src/syrupy/session.py and report.py
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

RESULT = ("snapshot_location", "snapshot_name", "created", "updated", "success")


def asserted(config: pytest.Config) -> list[dict[str, Any]] | None:
    """Write what is to be written, and tell what was asserted in this process; None without syrupy."""
    session = getattr(config, "_syrupy", None)
    if session is None:
        return None
    session.flush_snapshot_write_queue()
    return [_told(assertion) for assertion in session._assertions]


def _told(assertion: Any) -> dict[str, Any]:
    extension, item = type(assertion.extension), assertion.test_location.item
    results = [{name: getattr(result, name) for name in RESULT} for result in assertion.executions.values()]
    module = importlib.import_module("syrupy.report")
    outcome = item.stash.get(getattr(module, "xfailed_key", None), None)
    return {
        "extension": [extension.__module__, extension.__qualname__],
        "test": item.nodeid,
        "results": results,
        "is_known_bad": bool(outcome and outcome.run),
    }


def add(config: pytest.Config, told: list[dict[str, Any]]) -> None:
    """Add what another process `asserted` to the assertions of this one."""
    session: Any = config._syrupy  # type: ignore[attr-defined]
    location = importlib.import_module("syrupy.location").PyTestLocation
    key = getattr(importlib.import_module("syrupy.report"), "xfailed_key", None)
    for assertion in told:
        module, name = assertion["extension"]
        extension: Any = importlib.import_module(module)
        for part in name.split("."):
            extension = getattr(extension, part)
        place = location(session._collected_items[assertion["test"]])
        stash = {key: SimpleNamespace(run=True)} if assertion["is_known_bad"] else {}
        test = SimpleNamespace(item=SimpleNamespace(stash=stash))
        results = [SimpleNamespace(**result, final_data=None, test_location=test) for result in assertion["results"]]
        session.register_request(
            SimpleNamespace(
                extension=extension(), test_location=place, session=session, executions=dict(enumerate(results))
            )
        )


def miss(config: pytest.Config) -> None:
    """What a process asserted is lost: no snapshot may be called unused any more, or be removed for it."""
    if hasattr(config, "_syrupy"):
        config.option.disable_unused_snapshots = config.option.warn_unused_snapshots = True
        config.option.no_cleanup = True
