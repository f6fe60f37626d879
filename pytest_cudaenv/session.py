"""One pytest run's state: what it was told, what is here, what each test needs and was given.

The hooks in `plugin` delegate to it; it is kept in the config's stash.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.fixtures.cells import DEFAULT_BACKENDS, DEFAULT_DTYPES, CellLists
from pytest_cudaenv.names import FIXTURES, MARKERS
from pytest_cudaenv.options import any_given

if TYPE_CHECKING:
    from pytest_cudaenv.grants.grant import Grant, Granter
    from pytest_cudaenv.host.devices import Host
    from pytest_cudaenv.host.mask import MaskReading
    from pytest_cudaenv.ledger.summary import Summary
    from pytest_cudaenv.plan import Plan
    from pytest_cudaenv.questions import TorchQuestions
    from pytest_cudaenv.requirements.reason import Reason
    from pytest_cudaenv.requirements.requirement import Requirement
    from pytest_cudaenv.settings import Settings

SESSION = pytest.StashKey["CudaSession"]()

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes `torch.cuda.is_available` ask NVML: https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"""

CHECK_INHERITED = "cudaenv_nvml_check_inherited"
"""Tells a worker that the NVML check in its environment is the controller's, and not the user's."""

APPLIED = "CUDAENV_VISIBLE_APPLIED"
"""Tells workers and nested runs which mask `--cuda-visible` has made already; theirs to keep."""


class CudaSession:
    """The state of one run. Everything that costs time is computed when it is first asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.collecting = True
        self.planned = False
        """Whether some collected test uses the plugin."""
        self.held: Grant | None = None
        """The grant that session-scoped device fixtures were built with."""
        self._root: tuple[Any, pytest.FixtureRequest] | None = None
        self._undo: list[tuple[str, str | None]] = []
        self._imports: dict[str, str | None] = {}
        self._unmet: dict[tuple[Requirement, bool], tuple[Reason, ...]] = {}
        self._questions: TorchQuestions | None = None

    # What the run was told -------------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> Settings:
        """The run's settings. Raises pytest.UsageError that names the choices."""
        from pytest_cudaenv.settings import resolve

        return resolve(self.config)

    def configure(self) -> None:
        """Once every conftest of the rootdir is known: usage errors, before anything is collected."""
        self._add_project_backends()
        if any_given(self.config) and (self.settings.simulate is not None or self.settings.assume):
            _ = self.host

    @property
    def cell_lists(self) -> CellLists:
        """The backends and dtypes of tests that name none; ini alone changes them, as they make ids."""
        if not any_given(self.config):
            return CellLists(DEFAULT_BACKENDS, DEFAULT_DTYPES)
        settings = self.settings
        return CellLists(settings.attn_backends or DEFAULT_BACKENDS, settings.dtypes or DEFAULT_DTYPES)

    @property
    def has_summary(self) -> bool:
        """Whether some test of the run used the plugin."""
        return "summary" in self.__dict__

    # What is here ----------------------------------------------------------------------------------------------

    @cached_property
    def host(self) -> Host:
        """The facts about this machine, or the simulated one, with what `--cuda-assume` adds."""
        from pytest_cudaenv.settings import host_of

        return host_of(self.settings)

    @cached_property
    def reading(self) -> MaskReading:
        """What a CUDA process sees of the host under the run's mask."""
        from pytest_cudaenv.host.mask import read_environment

        return read_environment(os.environ, self.host.devices, self.host.fastest_first)

    @cached_property
    def granter(self) -> Granter:
        """Hands out devices."""
        from pytest_cudaenv.grants.grant import InProcess

        return InProcess(self.host, self.reading)

    def _add_project_backends(self) -> None:
        """Take in the attention backends that the project's conftests add."""
        found = self.config.hook.pytest_cudaenv_attn_backends(config=self.config)
        added = [backend for backends in found for backend in backends or ()]
        if added or "pytest_cudaenv.requirements.attention" in sys.modules:
            from pytest_cudaenv.requirements.attention import with_backends

            with_backends({backend.name: backend for backend in added})

    # What the run prints ---------------------------------------------------------------------------------------

    @cached_property
    def summary(self) -> Summary:
        """Counts over the reports of the run."""
        from pytest_cudaenv.ledger.summary import Summary

        return Summary()

    def header(self) -> list[str]:
        """The header's lines; none under `-q`, whose output others read."""
        if self.config.get_verbosity() < 0:
            return []
        from pytest_cudaenv.host.driver import is_cuda_initialised
        from pytest_cudaenv.ledger.header import header_lines

        warnings = []
        if self.host.simulated is None and self.host.devices and is_cuda_initialised():
            warnings.append("CUDA was initialised while collecting; masks set from now on have no effect")
        lines = header_lines(self.host, self.reading, self.settings.provenance, os.environ, warnings)
        if self.config.get_verbosity() > 0 and self._questions is not None:
            lines += [f"cudaenv: {asked}" for asked in self._questions.log]
        return lines

    @cached_property
    def mailbox(self) -> str:
        """Where local workers leave word for the controller; the first who has something to say makes it."""
        import tempfile

        return str(Path(tempfile.gettempdir()) / f"cudaenv-{os.getpid()}-{os.urandom(8).hex()}")

    def tell_controller(self, mailbox: str) -> None:
        """In a worker: the suite uses the plugin."""
        with contextlib.suppress(OSError):  # another host, or a full disk: the header is not worth a failed run
            os.mkdir(mailbox, 0o700)

    def hear_worker(self) -> None:
        """In the controller: print the header once a worker has said that the suite uses the plugin."""
        if self.planned or not os.path.isdir(self.mailbox):
            return
        self.planned = True
        os.rmdir(self.mailbox)
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            for line in self.header():
                reporter.ensure_newline()
                reporter.write_line(line)

    # Environment -----------------------------------------------------------------------------------------------

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable until `restore_environment`."""
        self._undo.append((name, os.environ.get(name)))
        os.environ[name] = value

    def restore_environment(self, *names: str) -> None:
        """Give these variables (all that were set, if none is named) exactly the value that they had."""
        kept: list[tuple[str, str | None]] = []
        for name, value in reversed(self._undo):
            if names and name not in names:
                kept.insert(0, (name, value))
            elif value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._undo = kept

    @property
    def lends_nvml_check(self) -> bool:
        """Whether processes that are started now inherit an NVML check that is this run's own."""
        return any(name == NVML_CHECK for name, _ in self._undo)

    def apply_visible(self) -> None:
        """Narrow the run's mask to `--cuda-visible`, whose indices count what the run could see before."""
        from pytest_cudaenv.host.mask import VISIBLE_DEVICES, read_environment, read_mask, write_mask

        wanted = self.settings.visible
        if wanted is None or os.environ.get(APPLIED) == f"{wanted}={os.environ.get(VISIBLE_DEVICES)}":
            return
        outer = read_environment(os.environ, self.host.devices, self.host.fastest_first)
        chosen = read_mask(wanted, None, outer.devices)
        if outer.devices and (chosen.notes or (chosen.cu_init and not chosen.deliberate)):
            choices = ", ".join(f"{d.index} {d.name} {d.uuid}" for d in outer.devices)
            why = chosen.notes[0].replace(VISIBLE_DEVICES, "the mask") if chosen.notes else "no such device"
            raise pytest.UsageError(f"--cuda-visible {wanted}: {why}; choose from: {choices}")
        mask = write_mask(chosen.devices, os.environ, self.host.devices, self.host.fastest_first)
        for name, value in mask.items():
            self.set_variable(name, value)
        self.set_variable(APPLIED, f"{wanted}={os.environ.get(VISIBLE_DEVICES)}")
        self.__dict__.pop("reading", None)

    # Collection ------------------------------------------------------------------------------------------------

    @property
    def questions(self) -> TorchQuestions:
        """What answers torch.cuda's questions while collecting."""
        if self._questions is None:
            from pytest_cudaenv.questions import TorchQuestions

            self._questions = TorchQuestions(lambda: (self.host, self.reading))
        return self._questions

    def begin(self) -> None:
        """Before the first conftest: the mask, the NVML check, and torch's questions if the run was told anything."""
        if NVML_CHECK not in os.environ:
            self.set_variable(NVML_CHECK, "1")
        if any_given(self.config):
            self.apply_visible()
            self.answer_questions()

    def answer_questions(self) -> None:
        """Answer torch.cuda's questions until the end of collection; called once the suite uses the plugin."""
        if self.collecting:
            self.questions.install()

    def end_collection(self) -> None:
        """Give torch and the environment back, before the first test."""
        self.collecting = False
        if self._questions is not None:
            self._questions.remove()
        self.restore_environment(NVML_CHECK)
        if getattr(self.config, "workerinput", {}).get(CHECK_INHERITED):
            os.environ.pop(NVML_CHECK, None)

    def end(self) -> None:
        """Undo everything, however the run ended."""
        self.end_collection()
        if "mailbox" in self.__dict__:
            with contextlib.suppress(OSError):
                os.rmdir(self.mailbox)
        self.restore_environment()

    def notice_conftest(self, module: object) -> None:
        """A conftest that imports the package uses the plugin, even if it has asked for no name yet."""
        if any(value is sys.modules.get("pytest_cudaenv") for value in vars(module).values()):
            self.answer_questions()

    def notice_module(self, path: Path) -> None:
        """Before a test module is imported: one that mentions the package uses the plugin, from its first line."""
        if self._questions is not None and self._questions.active:
            return
        try:
            mentioned = b"pytest_cudaenv" in path.read_bytes()
        except OSError:
            return  # the import that follows says what is wrong
        if mentioned:
            self.answer_questions()

    def check_collected(self, report: pytest.CollectReport) -> None:
        """Drop impossible cells from what a file or class holds; make wrong marks a collection error there."""
        if report.outcome != "passed" or not any(
            isinstance(node, pytest.Item) and may_use_plugin(node) for node in report.result
        ):
            return
        from pytest_cudaenv.cells import without_impossible
        from pytest_cudaenv.plan import plan_of

        try:
            report.result = without_impossible(report.result)
            for node in report.result:
                if isinstance(node, pytest.Item):
                    plan_of(node)
        except pytest.Collector.CollectError as error:
            report.outcome, report.longrepr, report.result = "failed", str(error), []

    def plan_items(self, items: list[pytest.Item]) -> None:
        """Work out what each test needs, mark those that need devices, deselect what was not asked for."""
        if not any(may_use_plugin(item) for item in items):
            return
        kept: list[pytest.Item] = []
        deselected: list[pytest.Item] = []
        for item in items:
            plan = self._plan(item)
            (kept if plan is None or self._is_selected(plan) else deselected).append(item)
        if deselected:
            self.config.hook.pytest_deselected(items=deselected)
            items[:] = kept

    def plan_late(self, items: list[pytest.Item]) -> None:
        """Once all hooks have run: marks that one added after `plan_items` (a conftest's `trylast`) count as well."""
        for item in items:
            if _count_marks(item) != item.stash.get(PLANNED_MARKS, 0):
                self._plan(item)

    def forecast(self, items: list[pytest.Item]) -> None:
        """Count what would run where, for a run that only collects."""
        for item in items:
            if (plan := item.stash.get(PLAN, None)) is None:
                continue
            if reasons := self.unmet(plan.requirement):
                outcome = "failed" if any(reason.is_error for reason in reasons) else "skipped"
                self.summary.add(item.nodeid, "setup", outcome, _record(plan, None, reasons))
            else:
                ran_on = self.granter.grant(plan.requirement, None).ran_on
                self.summary.add(item.nodeid, "call", "passed", _record(plan, ran_on, ()))

    def print_summary(self, reporter: pytest.TerminalReporter) -> None:
        """After the run: what passed on which kind of device, and what did not run, by reason."""
        if not self.has_summary or self.config.get_verbosity() < (0 if self.only_collects else -1):
            return
        if lines := self.summary.lines("would run" if self.only_collects else "passed"):
            reporter.ensure_newline()
            reporter.section(f"cudaenv: what {'would run' if self.only_collects else 'ran'} where")
            for line in lines:
                reporter.write_line(line)

    @property
    def only_collects(self) -> bool:
        """Whether no test is going to run."""
        return bool(self.config.getoption("collectonly"))

    def _plan(self, item: pytest.Item) -> Plan | None:
        from pytest_cudaenv.plan import plan_of

        try:
            plan = plan_of(item)
        except pytest.Collector.CollectError as error:
            # Only marks that a conftest's hook adds are still unchecked here. A worker must not raise: xdist would
            # take it for a crash; there the test itself is the error.
            if not hasattr(self.config, "workerinput"):
                raise pytest.UsageError(str(error)) from None
            item.stash[WRONG] = str(error)
            return None
        if plan is None:
            return None
        self.planned = True
        item.stash[PLAN], item.stash[PLANNED_MARKS] = plan, _count_marks(item)
        if plan.requirement.asks_for_device:
            item.add_marker("cuda")
        if plan.requirement.devices > 1:
            item.add_marker("multi_gpu")
        return plan

    def _is_selected(self, plan: Plan) -> bool:
        settings = self.settings
        cell = plan.cell
        if settings.only_attn_backends and cell.backends and not set(cell.backends) <= set(settings.only_attn_backends):
            return False
        if settings.only_dtypes and cell.dtype is not None and cell.dtype not in settings.only_dtypes:
            return False
        if settings.unmet != "deselect":
            return True
        reasons = self.unmet(plan.requirement)
        # A device that is here and cannot be used is an error, whatever becomes of needs that are not met.
        return not reasons or any(reason.is_error for reason in reasons)

    # Running ---------------------------------------------------------------------------------------------------

    def unmet(self, requirement: Requirement, *, trying: bool = False) -> Sequence[Reason]:
        """The needs of a requirement that this host does not meet; `trying` imports packages to know."""
        # Many tests need the same, and neither the host nor what can be imported changes while a run lasts.
        if (requirement, trying) not in self._unmet:
            from pytest_cudaenv.requirements.requirement import unmet

            imports = self.import_error if trying else None
            self._unmet[requirement, trying] = unmet(requirement, self.host, self.reading, imports)
        return self._unmet[requirement, trying]

    def import_error(self, module: str) -> str | None:
        """Import `module`, or `module:attribute`, in this process; the first line of the error, or None."""
        if module not in self._imports:
            from pytest_cudaenv.requirements.packages import try_import

            self._imports[module] = try_import(module)
        return self._imports[module]

    def set_up(self, item: pytest.Item) -> None:
        """Before a test's fixtures: skip it with its reasons, or give it its grant and seed."""
        if (wrong := item.stash.get(WRONG, None)) is not None:
            pytest.fail(wrong, pytrace=False)
        plan = item.stash.get(PLAN, None)
        if plan is None:
            return
        import datetime

        from pytest_cudaenv.grants.current import Current, enter
        from pytest_cudaenv.plan import expect_failure, matching_bad_cell

        reasons = self.unmet(plan.requirement, trying=True)
        if reasons:
            item.stash[REASONS] = tuple(reasons)
            self._refuse(reasons)
        grant = self._grant(plan.requirement)
        if (known := matching_bad_cell(plan, grant.devices[0] if grant.devices else None)) is not None:
            expect_failure(item, known, datetime.date.today())
        item.stash[RAN_ON] = grant.ran_on
        if plan.is_seeded:
            self.seed(item)
        if plan.requirement.asks_for_device:
            enter(Current(item.nodeid, grant, seed_of(item, self._session_seed)))

    def _grant(self, requirement: Requirement) -> Grant:
        """The test's devices; what was built on others is ended, as at the end of a device process."""
        from pytest_cudaenv.grants.grant import Grant

        if not requirement.asks_for_device:
            return Grant()
        grant = self.granter.grant(requirement, self.held)
        if self.held is not None and grant != self.held:
            self._end_held()
        self.held = grant
        return grant

    def note_fixture(self, definition: Any, request: pytest.FixtureRequest) -> None:
        """The fixture that all device fixtures are built on is being set up."""
        self._root = (definition, request)

    def _end_held(self) -> None:
        from pytest_cudaenv import compat

        if self._root is not None:
            definition, request = self._root
            self._root = None
            compat.finish_fixture(definition, request)

    def _refuse(self, reasons: Sequence[Reason]) -> None:
        """End the test as unmet: an error where a device is present and unusable, else as `--cuda-unmet` says."""
        from pytest_cudaenv import compat

        message = " | ".join(str(reason) for reason in reasons)
        if any(reason.is_error for reason in reasons):
            pytest.fail(f"{message}\n{reasons[0].remedy}", pytrace=False)
        if self.settings.unmet == "fail":
            pytest.fail(f"{message} (--cuda-unmet=fail)\n{reasons[0].remedy}", pytrace=False)
        compat.skip_at_test(message)

    def seed(self, item: pytest.Item) -> None:
        """Seed `random`, and NumPy and torch where they are imported, from the test's id."""
        plan = item.stash.get(PLAN, None)
        if plan is None or not plan.is_seeded:
            return
        import random

        seed = seed_of(item, self._session_seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(seed)

    @property
    def _session_seed(self) -> int:
        """pytest-randomly's seed, so that its `-p randomly -p …` reproduces ours too; 0 without it."""
        value = self.config.getoption("randomly_seed", None)
        return value if isinstance(value, int) else 0

    def tear_down(self, item: pytest.Item) -> None:
        """After a test's fixtures: it holds no grant any more."""
        if item.stash.get(PLAN, None) is not None:
            from pytest_cudaenv.grants.current import leave

            leave(item.nodeid)

    def describe(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Put on a report what summaries need: where it ran, or why it did not. Travels from xdist's workers."""
        plan = item.stash.get(PLAN, None)
        if plan is None:
            return
        record = _record(plan, item.stash.get(RAN_ON, None), item.stash.get(REASONS, ()))
        report.cudaenv = record  # type: ignore[attr-defined]


def _count_marks(item: pytest.Item) -> int:
    return sum(mark.name in MARKERS for mark in item.iter_markers())


def may_use_plugin(item: pytest.Item) -> bool:
    """Whether a test carries a name of ours, on a mark or in its fixture closure. Cheap: asked of every test."""
    return not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) or any(
        mark.name in MARKERS for mark in item.iter_markers()
    )


PLAN = pytest.StashKey["Plan"]()
"""What a test needs; absent from the tests that do not use the plugin, which pay for nothing."""

PLANNED_MARKS = pytest.StashKey[int]()
"""How many marks of ours the plan knows of."""

WRONG = pytest.StashKey[str]()
"""Why a test's marks cannot be read, where that may not end the run."""

REASONS = pytest.StashKey["Sequence[Reason]"]()
RAN_ON = pytest.StashKey[str]()


def _record(plan: Plan, ran_on: str | None, reasons: Sequence[Reason]) -> dict[str, Any]:
    """What summaries read of a test, as plain data."""
    record: dict[str, Any] = {"cell": plan.cell.id, "ran_on": ran_on}
    if reasons:
        record["reasons"] = [
            {"code": r.code, "need": r.need, "have": r.have, "remedy": r.remedy, "rank": int(r.rank)} for r in reasons
        ]
    return record


def seed_of(item: pytest.Item, session_seed: int) -> int:
    """The seed of a test, 32 bits: the same on every host, worker and order."""
    import hashlib

    digest = hashlib.sha256(f"{session_seed}:{item.nodeid}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
