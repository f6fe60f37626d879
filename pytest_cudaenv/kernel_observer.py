"""Puts on a test's report what Hub kernels replaced in it, and fails it for what it left open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.fixtures.hub_kernels import ENGINE
from pytest_cudaenv.names import HUB_KERNELS
from pytest_cudaenv.observers import Observer
from pytest_cudaenv.verdict.finding import Finding


class KernelObserver(Observer):
    """Reads the kernel reports of tests with the fixture `hub_kernels`; of others it knows nothing."""

    def note(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        record: dict[str, Any],
        call: pytest.CallInfo[None],  # noqa: ARG002
    ) -> Iterable[Finding]:
        engine = item.stash.get(ENGINE, None)
        if engine is None or report.when != "call":
            return ()
        open_ends = engine.unproven() if compat.has_passed(report) else []
        data = engine.as_data()
        if data is not None:
            record["kernels"] = data
            told = (HUB_KERNELS, json.dumps(data, separators=(",", ":")))
            item.user_properties.append(told)
            report.user_properties.append(told)
        return [Finding(e.code, _text(e), "See docs/hub_kernels.md.", is_failure=True) for e in open_ends]

    def explain(self, item: pytest.Item, report: pytest.TestReport) -> None:
        engine = item.stash.get(ENGINE, None)
        if engine is not None and report.when == "call":
            for one in engine.reports:
                compat.add_section(report, one.title, one.table())


def _text(error: Exception) -> str:
    return str(error).partition("] ")[2]
