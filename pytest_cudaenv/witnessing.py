"""Witnessing: which attention backends the tests of cells ran, and a forced sdpa kernel with its proof."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.importing import Announcer
from pytest_cudaenv.observers import Observer
from pytest_cudaenv.verdict.finding import Finding

if TYPE_CHECKING:
    from pytest_cudaenv.cells import CellParameters
    from pytest_cudaenv.grants.grant import Grant
    from pytest_cudaenv.plan import Plan
    from pytest_cudaenv.verdict.attention_taps import Taps
    from pytest_cudaenv.verdict.cell_witness import CellRecorder
    from pytest_cudaenv.verdict.seen import Seen

KERNEL = "witness-kernel"


class WitnessObserver(Observer):
    """Watches each test of a cell with an attention backend, and each with a forced kernel."""

    def __init__(self) -> None:
        self._taps: tuple[CellRecorder, Taps] | None = None
        self._plan: Plan | None = None
        self._announcer: Announcer | None = None
        self._forced: ExitStack | None = None
        self._seen: Seen | None = None
        self._earlier: dict[tuple[str, str | None], _Counts] = {}
        """(module, cell) -> what was seen while fixtures were set up: those of a module may have run the model."""
        self._before_body: dict[str, int] = {}
        self._in_body = False
        self._has_part_failed = False
        """Of a test that goes through its cells itself: whether a subtest of the one that it is at has failed."""
        self._of_parts: list[Finding] = []
        self._told: dict[str, dict[str, int]] = {}
        """Cell -> the calls of each backend, of such a test."""

    def unwatched(self) -> None:
        if self._taps is not None:
            self._taps[1].remove()

    def begin(self, item: pytest.Item, plan: Plan, grant: Grant) -> None:  # noqa: ARG002
        self._plan = plan
        self._of_parts, self._told = [], {}
        if plan.cell.attn_backend is not None:
            self._watch(plan.cell)
        else:
            self.unwatched()

    def _watch(self, cell: CellParameters) -> None:
        recorder, taps = self._recorder()
        recorder.start(cell.backends, cell.parts)
        taps.begin()
        if self._announcer is not None:
            return
        late = [name for name in _watched_modules() if name not in sys.modules]
        if late:
            self._announcer = Announcer(late, lambda _module: taps.install())
            self._announcer.install()

    def _recorder(self) -> tuple[CellRecorder, Taps]:
        if self._taps is None:
            from pytest_cudaenv.verdict.attention_taps import Taps
            from pytest_cudaenv.verdict.cell_witness import CellRecorder

            recorder = CellRecorder()
            self._taps = recorder, Taps(recorder)
        return self._taps

    def call(self, item: pytest.Item) -> None:
        plan = self._plan
        if plan is None:
            return
        self._in_body = True
        if plan.cell.attn_backend is not None:
            recorder, taps = self._recorder()
            self._before_body = dict(recorder.counts)
            self._earlier.setdefault(_place(item, plan), _Counts()).add(recorder)
            taps.install()
        if plan.sdpa_kernels:
            self._force(plan.sdpa_kernels)

    def _force(self, kernels: tuple[str, ...]) -> None:
        """Let sdpa choose these kernels alone, in this order, and see which it runs."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from pytest_cudaenv.verdict.witness import watch

        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }
        self._forced = ExitStack()
        self._forced.enter_context(sdpa_kernel([backends[kernel] for kernel in kernels], set_priority=True))
        self._seen = self._forced.enter_context(watch())

    def note(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        record: dict[str, Any],
        call: pytest.CallInfo[None],  # noqa: ARG002
    ) -> Iterable[Finding]:
        plan = self._plan
        if plan is None or report.when != "call":
            return ()
        if self._in_body:  # a subtest's
            self._has_part_failed |= not compat.has_passed(report)
            return ()
        has_passed = compat.has_passed(report)
        found: list[Finding] = []
        if self._forced is not None and self._seen is not None:
            self._forced.close()
            found += self._of_forced(plan, self._seen, record) if has_passed else []
            self._forced = self._seen = None
        if plan.cell.attn_backend is not None:
            found += self._of_cell(item, plan, record) if has_passed else []
        if self._told:
            record.setdefault("witness", {})["cells"] = self._told
        return found + (self._of_parts if has_passed else [])

    def body_ends(self, item: pytest.Item) -> None:  # noqa: ARG002
        self._in_body = False

    def cell_begins(self, item: pytest.Item, cell: CellParameters) -> None:  # noqa: ARG002
        if cell.attn_backend is not None:
            self._has_part_failed = False
            self._watch(cell)

    def cell_ends(self, item: pytest.Item, cell: CellParameters, *, is_over: bool) -> None:  # noqa: ARG002
        if self._taps is None or cell.attn_backend is None:
            return
        recorder, taps = self._taps
        taps.pause()
        if "torch" in sys.modules and self._plan is not None and is_over and not self._has_part_failed:
            counts = dict(recorder.counts)
            self._told[str(cell.id)] = counts
            for finding in self._judged(self._plan, cell, counts, recorder.parts, counts):
                self._of_parts.append(replace(finding, text=f"{finding.text} ({cell.id})"))
        recorder.start(())

    def _judged(
        self,
        plan: Plan,
        cell: CellParameters,
        counts: dict[str, int],
        parts: dict[str, dict[str, int]],
        of_body: dict[str, int],
    ) -> list[Finding]:
        from pytest_cudaenv.verdict.cell_witness import judge, judge_idle, judge_parts
        from pytest_cudaenv.verdict.witness import compiled_frames

        if not plan.runs_attention:
            return judge_idle(of_body)
        has_compiled = compiled_frames() > 0
        found = judge(cell.backends, counts, self._recorder()[0].others, has_compiled=has_compiled)
        # Of a backend that was not called at all it has been said.
        return found or judge_parts(cell.parts, parts, has_compiled=has_compiled)

    def _of_cell(self, item: pytest.Item, plan: Plan, record: dict[str, Any]) -> list[Finding]:
        if "torch" not in sys.modules:
            return []
        from pytest_cudaenv.verdict.witness import compiled_frames

        recorder, _ = self._recorder()
        earlier = self._earlier.get(_place(item, plan), _Counts())
        counts = {**earlier.backends, **recorder.counts}
        parts = {sub: {**earlier.parts.get(sub, {}), **recorder.parts.get(sub, {})} for sub in plan.cell.parts}
        told = record.setdefault("witness", {})
        told["backends"] = dict(counts)
        if compiled_frames() > 0:
            told["compiled"] = True
        of_body = {
            backend: count - self._before_body.get(backend, 0)
            for backend, count in recorder.counts.items()
            if count > self._before_body.get(backend, 0)
        }
        return self._judged(plan, plan.cell, counts, parts, of_body)

    def _of_forced(self, plan: Plan, seen: Seen, record: dict[str, Any]) -> list[Finding]:
        calls = [call for call in seen.calls if call.backend == "sdpa"]
        record.setdefault("witness", {})["kernels"] = seen.counts()
        need = " or ".join(plan.sdpa_kernels)
        wrong = {f"{call.kernel} in {call.module}" for call in calls if call.kernel not in plan.sdpa_kernels}
        if calls and not wrong:
            return []
        have = ", ".join(sorted(wrong)[:4]) or "no call of sdpa"
        remedy = "Let the body's attention be sdpa under no other sdpa_kernel, or take @attn_sdpa_kernel away"
        return [Finding(KERNEL, f"needs sdpa to run {need}; have {have}", remedy, is_failure=True)]

    def end(self, item: pytest.Item) -> None:  # noqa: ARG002
        if self._forced is not None:
            self._forced.close()
            self._forced = self._seen = None
        if self._announcer is not None:
            self._announcer.remove()
            self._announcer = None
        if self._taps is not None:
            self._taps[1].pause()
            self._taps[0].start(())
        self._plan = None
        self._in_body = self._has_part_failed = False


@dataclass
class _Counts:
    """Calls that were seen: by backend, and by sub-config and backend."""

    backends: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, recorder: CellRecorder) -> None:
        """Add what a recorder has seen."""
        for into, counts in (
            (self.backends, recorder.counts),
            *((self.parts.setdefault(sub, {}), counts) for sub, counts in recorder.parts.items()),
        ):
            for backend, count in counts.items():
                into[backend] = into.get(backend, 0) + count


def _place(item: pytest.Item, plan: Plan) -> tuple[str, str | None]:
    return item.nodeid.partition("::")[0], plan.cell.id


def _watched_modules() -> tuple[str, ...]:
    """The modules whose import, in a test, is news for its taps."""
    from pytest_cudaenv.verdict.attention_ops import entry_points
    from pytest_cudaenv.verdict.attention_taps import FLASH_UTILS, MODELING

    if "torch" not in sys.modules:
        return ("torch", MODELING, FLASH_UTILS)  # its submodules come before it is complete
    return (MODELING, FLASH_UTILS, *dict.fromkeys(module for module, _, _ in entry_points()))
