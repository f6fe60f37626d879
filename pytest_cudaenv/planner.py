"""Collection: what each test needs, which tests are selected, and what would run where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.cells import CellParameters, without_impossible
from pytest_cudaenv.plan import Plan, plan_of
from pytest_cudaenv.requirements.requirement import Requirement
from pytest_cudaenv.session import PLAN, PLANNED_MARKS, WRONG, count_marks, record_of

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession


class Planner:
    """Plans the tests of one run; made once a collected test may use the plugin."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session

    def check_collected(self, report: pytest.CollectReport) -> None:
        """Drop impossible cells from what a file or class holds; make wrong marks a collection error there."""
        try:
            report.result = without_impossible(report.result)
            for node in report.result:
                if isinstance(node, pytest.Item):
                    plan_of(node)
        except pytest.Collector.CollectError as error:
            report.outcome, report.longrepr, report.result = "failed", str(error), []

    def plan_items(self, items: list[pytest.Item]) -> None:
        """Work out what each test needs, mark those that need devices, deselect what was not asked for."""
        kept: list[pytest.Item] = []
        deselected: list[pytest.Item] = []
        for item in items:
            plan = self.plan(item)
            selected = plan is None or self._is_selected(item, plan)
            (kept if selected else deselected).append(item)
        if deselected:
            self.session.config.hook.pytest_deselected(items=deselected)
            items[:] = kept

    def forecast(self, items: list[pytest.Item]) -> None:
        """Count what would run where, for a run that only collects."""
        summary = self.session.reporting.summary
        for item in items:
            if (plan := item.stash.get(PLAN, None)) is None or compat.own_skip(item) is not None:
                continue
            if reasons := self.session.unmet(plan.requirement):
                outcome = "failed" if any(reason.is_error for reason in reasons) else "skipped"
                summary.add(item.nodeid, "setup", outcome, record_of(plan, None, reasons))
            else:
                asks = plan.requirement.asks_for_device
                ran_on = self.session.granter.grant(plan.requirement, None).ran_on if asks else None
                summary.add(item.nodeid, "call", "passed", record_of(plan, ran_on, ()))

    def plan(self, item: pytest.Item) -> Plan | None:
        """Work out and keep what one test needs; None for one that does not use the plugin."""
        try:
            plan = plan_of(item)
        except pytest.Collector.CollectError as error:
            # Only marks that a conftest's hook adds are still unchecked here. A worker must not raise: xdist would
            # take it for a crash; there the test itself is the error.
            if not hasattr(self.session.config, "workerinput"):
                raise pytest.UsageError(str(error)) from None
            item.stash[WRONG] = str(error)
            return None
        declared = plan
        if self.session.settings.unmarked == "grant":
            plan = self._granted(plan)
        if plan is None:
            return None
        self.session.planned = True
        item.stash[PLAN], item.stash[PLANNED_MARKS] = plan, count_marks(item)
        if declared is None:
            return plan  # its marks stay its own: `-m cuda` selects by declared need
        if declared.requirement.asks_for_device:
            item.add_marker("cuda")
        if declared.requirement.devices > 1:
            item.add_marker("multi_gpu")
        return plan

    def _granted(self, plan: Plan | None) -> Plan | None:
        """The plan of a test that declares no device, with one where this host can grant it."""
        granted = plan or Plan(Requirement(), CellParameters())
        if granted.requirement.asks_for_device or not self.session.reading.devices:
            return plan
        requirement = replace(granted.requirement, device_if_any=True)
        return plan if self.session.unmet(requirement) else replace(granted, requirement=requirement)

    def _is_selected(self, item: pytest.Item, plan: Plan) -> bool:
        settings = self.session.settings
        cell = plan.cell
        if settings.only_attn_backends and cell.backends and not set(cell.backends) <= set(settings.only_attn_backends):
            return False
        if settings.only_dtypes and cell.dtype is not None and cell.dtype not in settings.only_dtypes:
            return False
        if settings.hub_kernels in {"on", "off"} and plan.hub_kernels not in {None, settings.hub_kernels}:
            return False
        if settings.unmet != "deselect" or settings.plan is not None:
            return True  # what a suite needs is the same on every host, and told whole
        reasons = self.session.unmet(plan.requirement)
        # A device that is here and cannot be used is an error, whatever becomes of needs that are not met.
        if not reasons or any(reason.is_error for reason in reasons) or self.session.breach(reasons) is not None:
            return True
        # Not selected is not unsaid: the summary tells what was left out, and why.
        record = record_of(plan, None, reasons)
        self.session.reporting.summary.add(item.nodeid, "setup", "deselected", record)
        if self.session.keeps_books:
            self.session.bookkeeping.deselect(item.nodeid, record)
        return False
