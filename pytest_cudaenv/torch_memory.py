"""The memory of each device test as an observer: its peak, what it keeps and who holds that, and running out of it."""

from __future__ import annotations

import gc
import unittest
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.fixtures.verdict import METER
from pytest_cudaenv.observers import Observer
from pytest_cudaenv.requirements.markers import MemoryLimit
from pytest_cudaenv.verdict.finding import Finding
from pytest_cudaenv.verdict.memory import (
    KEPT,
    OOM,
    THRESHOLD,
    Allocator,
    Known,
    Meter,
    TorchAllocator,
    forget_failures,
    kept_finding,
    leak_text,
    oom_finding,
    oom_in,
    peak_finding,
    skipped_oom,
)

if TYPE_CHECKING:
    from pytest_cudaenv.grants.grant import Grant
    from pytest_cudaenv.plan import Plan


class MemoryObserver(Observer):
    """Watches torch's allocator on the granted devices. Costs two questions while nothing is kept."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self.allocator = allocator or TorchAllocator()
        self.known = Known()
        self._meter: Meter | None = None
        self._limit = MemoryLimit()
        self._paused: list[dict[int, int]] = []
        self._errors: list[BaseException] = []
        """Of the running test, whose tracebacks keep what its frames hold."""
        self._kept: Finding | None = None
        self._module: object = None
        self._count = 1
        """Devices of the last grant."""
        self._by_fixture: dict[str, dict[int, int]] = {}
        """Bytes that each fixture of a wider scope has allocated while it was set up."""
        self._ended: dict[str, int] = {}
        """Those of them that were torn down after the running test, and what they had allocated in all."""

    def begin(self, item: pytest.Item, plan: Plan, grant: Grant) -> None:
        self._errors, self._kept, self._meter, self._ended = [], None, None, {}
        if not grant.devices:
            return
        self._limit, self._count = plan.memory, len(grant.devices)
        if self.allocator.is_used():
            self._enter_module(item.getparent(pytest.Module))
            self._note_known()
        self._meter = item.stash[METER] = Meter(self.allocator, range(len(grant.devices)))

    def _enter_module(self, module: object) -> None:
        """Between modules of a process: what nobody holds is given back to the devices, so that others can have it."""
        if self._module is not None and module is not self._module:
            gc.collect()
            self.allocator.empty_cache()
        self._module = module

    def _allocated(self) -> int:
        return sum(self.allocator.allocated(index) for index in range(self._count)) if self.allocator.is_used() else 0

    def _note_known(self) -> None:
        """Whatever is alive before a test is not its leak. Looked for only where more is in use than was known of."""
        allocated = self._allocated()
        if allocated != self.known.counted:
            self.known.counted = allocated
            self.known.note(self.allocator.held() if allocated else ())

    def wider_begins(self) -> None:
        self._paused.append(self._in_use() if self._meter is None else self._meter.pause())

    def _in_use(self) -> dict[int, int]:
        used = self.allocator.is_used()
        return {index: self.allocator.allocated(index) if used else 0 for index in range(self._count)}

    def wider_ends(self, fixture: str, *, is_over: bool) -> None:
        if not self._paused:
            return
        before = self._paused.pop()
        now = self._in_use()
        grown = {index: now.get(index, 0) - count for index, count in before.items()}
        if not is_over and sum(grown.values()) > 0:
            self._by_fixture[fixture] = grown
            self.known.add(self.known.new(self.allocator.held()))
        had = self._by_fixture.pop(fixture, None) if is_over else None
        if self._meter is None or self._paused:  # an outer block counts it
            return
        if had is None:
            self._meter.resume(before, grown)
        else:
            # Its value is gone once pytest has forgotten it, a moment later.
            self._meter.resume(before, {index: -count for index, count in had.items()})
            self._ended[fixture] = sum(had.values())

    def note(
        self, item: pytest.Item, report: pytest.TestReport, record: dict[str, Any], call: pytest.CallInfo[None]
    ) -> Iterable[Finding]:
        error = None if call.excinfo is None else call.excinfo.value
        if error is not None:
            if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
                if self._meter is not None and (skipped := skipped_oom(error)) is not None:
                    yield skipped
            else:
                self._errors.append(error)
                if (oom := oom_in(error)) is not None:
                    compat.add_section(report, f"[{OOM}] the allocator", self.allocator.summary())
                    yield oom_finding(oom)
        if report.when == "teardown":
            self._errors.clear()
        if self._meter is None:
            return
        if record.get("memory") is not None:
            record["memory"] = max(record["memory"], self._meter.in_process)
        if (
            report.when == "call"
            and (over := peak_finding(self._meter.highest, self._limit, self._meter.before)) is not None
        ):
            yield over
        if report.when == "teardown":
            if self._kept is not None:
                yield self._kept
            self._meter = None

    def end(self, item: pytest.Item) -> None:
        errors, self._errors = self._errors, []
        meter = self._meter
        self._paused.clear()
        if meter is None or (meter.total_growth <= self._allowed and not self._ended):
            return
        # Dear, and done only for a test after which something is left.
        _forget_arguments(item)
        forget_failures(errors)
        del errors
        kept = meter.total_growth
        if kept > self._allowed:
            gc.collect()
            self.allocator.drop_workspaces()
            kept = meter.total_growth
        if kept > self._allowed:
            gc.unfreeze()  # a device process was forked with frozen objects, which are left out of any search
            self._kept = self._finding(kept)

    def _finding(self, kept: int) -> Finding | None:
        fresh = self.known.new(self.allocator.held())
        if kept > sum(self._ended.values()):
            return kept_finding(kept, self._limit, fresh)
        if kept < THRESHOLD:
            return None
        ended = ", ".join(self._ended)
        return Finding(KEPT, leak_text(kept, 0, fresh), f"Drop what holds it when the test or the {ended} ends.")

    @property
    def _allowed(self) -> int:
        return THRESHOLD - 1 if self._limit.leak is None else self._limit.leak


def _forget_arguments(item: pytest.Item) -> None:
    """pytest keeps the values of a test's fixtures until its teardown has been reported."""
    arguments: dict[str, Any] = getattr(item, "funcargs", None) or {}
    for name in arguments:
        arguments[name] = None
