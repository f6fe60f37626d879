"""One pytest run's state: what it was told, what is here, and who plans, runs and prints.

The hooks in `plugin` delegate to it; it is kept in the config's stash. Every start of pytest makes one, so what costs
anything is imported and computed when it is first asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.adopted import ADOPTED
from pytest_cudaenv.environment import Environment
from pytest_cudaenv.fixtures.cells import DEFAULT_BACKENDS, DEFAULT_DTYPES, CellLists
from pytest_cudaenv.names import FIXTURES, MARKERS
from pytest_cudaenv.options import ADOPT_MARKERS, any_given

if TYPE_CHECKING:
    from pytest_cudaenv.adoption import Adoption
    from pytest_cudaenv.bookkeeping import Bookkeeping
    from pytest_cudaenv.grants.grant import Granter
    from pytest_cudaenv.host.devices import CudaDevice, Host
    from pytest_cudaenv.host.mask import MaskReading
    from pytest_cudaenv.isolation import Isolation
    from pytest_cudaenv.ledger.contract import Contract, Promise
    from pytest_cudaenv.plan import Plan
    from pytest_cudaenv.planner import Planner
    from pytest_cudaenv.poison import Poison
    from pytest_cudaenv.questions import TorchQuestions
    from pytest_cudaenv.reporting import Reporting
    from pytest_cudaenv.reproduce import Reproducer
    from pytest_cudaenv.requirements.reason import Reason
    from pytest_cudaenv.requirements.requirement import Requirement
    from pytest_cudaenv.runner import Runner
    from pytest_cudaenv.settings import Settings
    from pytest_cudaenv.unmarked import Unmarked

SESSION = pytest.StashKey["CudaSession"]()

PLAN = pytest.StashKey["Plan"]()
"""What a test needs; absent from the tests that do not use the plugin, which pay for nothing."""

PLANNED_MARKS = pytest.StashKey[int]()
"""How many marks of ours the plan knows of."""

WRONG = pytest.StashKey[str]()
"""Why a test's marks cannot be read, where that may not end the run."""

REASONS = pytest.StashKey["Sequence[Reason]"]()
"""Why a test did not run."""

BREACH = pytest.StashKey[str]()
"""The promise that a test would have broken by being skipped."""

RAN_ON = pytest.StashKey[str]()
"""The kind of device that a test was granted."""

REPRODUCED = pytest.StashKey[bool]()
"""Whether a failure of the test has its line already."""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes `torch.cuda.is_available` ask NVML: https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"""

CHECK_INHERITED = "cudaenv_nvml_check_inherited"
"""Tells a worker that the NVML check in its environment is the controller's, and not the user's."""

INTERPRETER = "cudaenv-interpreter"
"""Under which the plugin of a fresh interpreter is registered."""

APPLIED = "CUDAENV_VISIBLE_APPLIED"
"""Tells workers and nested runs which mask `--cuda-visible` has made already; theirs to keep."""


class CudaSession:
    """The state of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.monotonic()
        self.collecting = True
        self.planned = False
        """Whether some collected test uses the plugin."""
        self.environment = Environment()
        self.isolation: Isolation | None = None
        """Device processes, where there are any."""
        self.unmarked: Unmarked | None = None
        """Watches tests that declare no device, where there is one that they could use."""
        self.is_device_process = False
        self.interpreter: Any = config.pluginmanager.get_plugin(INTERPRETER)
        """Set in a fresh interpreter that is a device process itself."""
        self._view: Mapping[str, str] = os.environ if self.interpreter is None else self.interpreter.outer
        self._unmet: dict[tuple[Requirement, bool], tuple[Reason, ...]] = {}
        self._imports: dict[str, str | None] = {}

    # Who does what ---------------------------------------------------------------------------------------------

    @cached_property
    def planner(self) -> Planner:
        """Works out what each test needs."""
        from pytest_cudaenv.planner import Planner

        return Planner(self)

    @cached_property
    def runner(self) -> Runner:
        """Gives each test its grant and seed."""
        from pytest_cudaenv.runner import Runner

        return Runner(self)

    @cached_property
    def reporting(self) -> Reporting:
        """Prints header and summary."""
        from pytest_cudaenv.reporting import Reporting

        return Reporting(self)

    @cached_property
    def questions(self) -> TorchQuestions:
        """Answers torch.cuda's questions while collecting."""
        from pytest_cudaenv.questions import TorchQuestions

        return TorchQuestions(lambda: (self.host, self.reading))

    @cached_property
    def reproducer(self) -> Reproducer:
        """Writes the lines that reproduce failures."""
        from pytest_cudaenv.reproduce import Reproducer

        return Reproducer(self)

    @cached_property
    def adoption(self) -> Adoption | None:
        """Reads tests that were written without this plugin, where the run was told to; their skips, for a ledger or
        a contract."""
        if not any_given(self.config):
            return None
        settings = self.settings
        if not (settings.adopt or settings.ledger or self.judges_skips or self.config.getini(ADOPT_MARKERS)):
            return None
        from pytest_cudaenv.adoption import Adoption

        return Adoption(self)

    @property
    def has_questions(self) -> bool:
        """Whether torch's questions were ever answered."""
        return "questions" in self.__dict__

    @cached_property
    def granter(self) -> Granter:
        """Hands out devices."""
        from pytest_cudaenv.grants.grant import InProcess

        return InProcess(self.host, self.reading)

    # What the run was told, and what is here -------------------------------------------------------------------

    @cached_property
    def settings(self) -> Settings:
        """The run's settings. Raises pytest.UsageError that names the choices."""
        from pytest_cudaenv.settings import resolve

        return resolve(self.config)

    @property
    def shows_header(self) -> bool:
        """Whether the suite uses the plugin: by a marker or fixture, or because the run was told something."""
        return self.planned or any_given(self.config)

    @property
    def only_collects(self) -> bool:
        """Whether no test is going to run."""
        return bool(self.config.getoption("collectonly"))

    @property
    def cell_lists(self) -> CellLists:
        """The backends and dtypes of tests that name none; ini alone changes them, as they make ids."""
        if not any_given(self.config):
            return CellLists(DEFAULT_BACKENDS, DEFAULT_DTYPES)
        settings = self.settings
        return CellLists(settings.attn_backends or DEFAULT_BACKENDS, settings.dtypes or DEFAULT_DTYPES)

    @cached_property
    def host(self) -> Host:
        """The facts about this machine, or the simulated one, with what `--cuda-assume` adds."""
        from pytest_cudaenv.settings import host_of

        return host_of(self.settings)

    @cached_property
    def reading(self) -> MaskReading:
        """What a CUDA process sees of the host under the run's mask."""
        from pytest_cudaenv.host.mask import read_environment

        return read_environment(self._view, self.host.devices, self.host.fastest_first)

    def unmet(self, requirement: Requirement, *, trying: bool = False) -> Sequence[Reason]:
        """The needs of a requirement that this host does not meet; `trying` imports packages to know."""
        # Many tests need the same, and neither the host nor what can be imported changes while a run lasts.
        if (requirement, trying) not in self._unmet:
            from pytest_cudaenv.requirements.requirement import unmet

            imports = self._import_error if trying else None
            self._unmet[requirement, trying] = unmet(requirement, self.host, self.reading, imports)
        return self._unmet[requirement, trying]

    def unmet_on(self, devices: Sequence[CudaDevice], requirement: Requirement) -> Sequence[Reason]:
        """The needs that these devices (none: the CPU) do not meet, and the packages here; tries imports."""
        from dataclasses import replace

        from pytest_cudaenv.requirements.requirement import unmet

        return unmet(requirement, self.host, replace(self.reading, devices=tuple(devices)), self._import_error)

    def _import_error(self, module: str) -> str | None:
        """Import `module`, or `module:attribute`, in this process; the first line of the error, or None."""
        if module not in self._imports:
            from pytest_cudaenv.requirements.packages import try_import

            self._imports[module] = try_import(module)
        return self._imports[module]

    def start_isolation(self, session: pytest.Session) -> None:
        """Right before the first test: fork the zygote, where device tests are to run in device processes."""
        if self.interpreter is not None or not self.planned or self.only_collects or self.settings.isolation == "off":
            return
        if not any(self.is_device_test(item) for item in session.items):
            return
        from pytest_cudaenv.isolation import Isolation

        self.isolation = Isolation(self, session, self.settings.isolation)

    def provide_kernels(self, items: Sequence[pytest.Item]) -> None:
        """Right before the first test, where no xdist leads the run: download the Hub kernels that tests declare."""
        if self.interpreter is not None or not self.planned or self.only_collects:
            return
        if hasattr(self.config, "workerinput") or not self._declare_kernels(items):
            return
        from pytest_cudaenv.kernel_download import provide

        provide(self, items)

    def tell_kernels(self, folder: str, items: Sequence[pytest.Item]) -> None:
        """In a worker: tell the controller which Hub kernels tests declare."""
        if self._declare_kernels(items):
            from pytest_cudaenv.kernel_download import tell

            tell(Path(folder), self, items)

    def hear_kernels(self) -> None:
        """In the controller, when a worker has collected."""
        if os.path.isdir(f"{self.reporting.mailbox}-kernels"):
            from pytest_cudaenv.kernel_download import hear

            hear(self)

    def _declare_kernels(self, items: Sequence[pytest.Item]) -> bool:
        plans = (item.stash.get(PLAN, None) for item in items)
        return any(plan is not None and plan.requirement.hub_kernels for plan in plans)

    def start_unmarked(self, session: pytest.Session) -> None:
        """Once device processes can be forked: hide the devices from the tests of this process, or watch these."""
        if self.interpreter is not None or self.only_collects or not self.shows_header or not self.reading.devices:
            return
        wanted = self.settings.unmarked
        if wanted == "hide" and self._hides_devices(session):
            return
        if wanted == "grant" and self.settings.isolation == "off":
            self.warn("[cuda-unmarked] --cuda-unmarked=grant has no effect with --cuda-isolation=off")
        from pytest_cudaenv.unmarked import Unmarked

        self.unmarked = Unmarked(self)

    def _hides_devices(self, session: pytest.Session) -> bool:
        """Show this process no device any more; False, with a warning, where that is impossible."""
        from pytest_cudaenv.host.driver import is_cuda_initialised
        from pytest_cudaenv.host.mask import VISIBLE_DEVICES

        why = None
        if self.isolation is None and any(self.is_device_test(item) for item in session.items):
            why = "device tests run in the same process (--cuda-isolation=off)"
        elif is_cuda_initialised():
            why = "CUDA was initialised while collecting"
        if why is not None:
            self.warn(f"[cuda-unmarked] --cuda-unmarked=hide has no effect: {why}")
            return False
        self.environment.set(VISIBLE_DEVICES, "-1")
        return True

    def warn(self, text: str) -> None:
        """Put a warning into the summary, without raising it: an exception of ours must not end the run."""
        found = warnings.WarningMessage(pytest.PytestWarning(text), pytest.PytestWarning, __file__, 0)
        hook = self.config.hook.pytest_warning_recorded
        hook.call_historic(kwargs={"warning_message": found, "when": "runtest", "nodeid": "", "location": None})

    def enter_device_process(self) -> None:
        """In a device process: what it sees is what it was granted, and nothing of the pytest process's grants."""
        self.isolation = self.unmarked = None
        self.is_device_process = True
        self._look_at(os.environ)
        self.__dict__.pop("runner", None)

    @contextlib.contextmanager
    def collecting_again(self, outer: Mapping[str, str]) -> Iterator[None]:
        """In a fresh interpreter, a block that collects one more file, as the pytest process did: with its view."""
        self._look_at(outer)
        self.collecting = True
        self.answer_questions()
        try:
            yield
        finally:
            self.collecting = False
            self.questions.remove()
            self._look_at(os.environ)

    def _look_at(self, environ: Mapping[str, str]) -> None:
        """From now on, see of the host what a CUDA process with this environment sees."""
        self._view = environ
        self._unmet.clear()
        for computed in ("reading", "granter"):
            self.__dict__.pop(computed, None)

    def learn_architectures(self) -> None:
        """Once CUDA is in use in this process: what the torch here has code for, if it was not known."""
        torch, build = sys.modules.get("torch"), self.host.software.torch
        if build is None or build.arch_list is not None or self.host.simulated is not None:
            return
        if torch is None or not torch.cuda.is_initialized():
            return
        from dataclasses import replace

        from pytest_cudaenv.host.software import imported_arch_list

        software = replace(self.host.software, torch=replace(build, arch_list=imported_arch_list() or ()))
        self.host = replace(self.host, software=software)
        self._unmet.clear()
        self.__dict__.pop("granter", None)

    @property
    def has_promises(self) -> bool:
        """Whether the run's runner promises anything."""
        return bool(self.settings.require or self.settings.runner)

    @property
    def allows_no_skip(self) -> bool:
        """Whether no test may be skipped for what this host lacks."""
        return self.settings.unmet == "fail"

    @property
    def judges_skips(self) -> bool:
        """Whether a skip of the suite's own may be a failure."""
        return self.has_promises or self.allows_no_skip

    def breach(self, reasons: Sequence[Reason]) -> Promise | None:
        """The promise of the runner that a skip for these reasons breaks."""
        if not self.has_promises:
            return None
        return self.contract.breach(reasons, lambda requirement: self.unmet(requirement, trying=True))

    def denied(self, claims: Sequence[Requirement]) -> str | None:
        """The promises that a skip of the suite's own denies, whose every claim is about something promised."""
        from pytest_cudaenv.requirements.requirement import Requirement

        if not claims:
            return None
        if self.allows_no_skip and any(claim != Requirement() for claim in claims):
            return NO_SKIP
        denied = [self.contract.denied(claim, lambda need: self.unmet(need, trying=True)) for claim in claims]
        told = [text for text in denied if text is not None]
        return " and ".join(dict.fromkeys(told)) if len(told) == len(denied) else None

    def is_device_test(self, item: pytest.Item) -> bool:
        """Whether a test asks for a device which this host can grant."""
        plan = item.stash.get(PLAN, None)
        if plan is None or not plan.requirement.asks_for_device or not self.reading.devices:
            return False
        return not self.unmet(plan.requirement)

    def runs_elsewhere(self, item: pytest.Item) -> bool:
        """Whether a device process runs this test, and this is not it."""
        return self.isolation is not None and self.is_device_test(item)

    # From the first conftest to the last test ------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first conftest: the mask, the NVML check, and torch's questions if the run was told anything."""
        if NVML_CHECK not in os.environ:
            self.environment.set(NVML_CHECK, "1")
        if any_given(self.config) or self.interpreter is not None:
            if self.interpreter is None:
                self._apply_visible()
            self.answer_questions()
            if self.adoption is not None:
                self.adoption.install()

    def _apply_visible(self) -> None:
        """Narrow the run's mask to `--cuda-visible`, whose indices count what the run could see before."""
        from pytest_cudaenv.host.mask import VISIBLE_DEVICES, read_mask, write_mask

        wanted = self.settings.visible
        if wanted is None or os.environ.get(APPLIED) == f"{wanted}={os.environ.get(VISIBLE_DEVICES)}":
            return
        outer = self.reading
        chosen = read_mask(wanted, None, outer.devices)
        if outer.devices and (chosen.notes or (chosen.cu_init and not chosen.deliberate)):
            choices = ", ".join(f"{d.index} {d.name} {d.uuid}" for d in outer.devices)
            why = chosen.notes[0].replace(VISIBLE_DEVICES, "the mask") if chosen.notes else "no such device"
            raise pytest.UsageError(f"--cuda-visible {wanted}: {why}; choose from: {choices}")
        mask = write_mask(chosen.devices, os.environ, self.host.devices, self.host.fastest_first)
        for name, value in mask.items():
            self.environment.set(name, value)
        self.environment.set(APPLIED, f"{wanted}={os.environ.get(VISIBLE_DEVICES)}")
        del self.reading

    def configure(self) -> None:
        """Once every conftest of the rootdir is known: usage errors, before anything is collected."""
        self._add_project_backends()
        if any_given(self.config):
            from pytest_cudaenv.settings import with_canonical_names

            self.settings = with_canonical_names(self.settings)
            if self.settings.update_expectations and self.settings.simulate is not None:
                raise pytest.UsageError("--cuda-update-expectations: what a simulated host computes is not that host's")
            if self.settings.simulate is not None or self.settings.assume:
                _ = self.host
            _ = self.contract
            if self.keeps_books:
                self.bookkeeping.check()
            if self.settings.plan is not None:
                self._write_suite(self.settings.plan)

    def _write_suite(self, plan: str) -> None:
        """Once it is collected, and in this process alone."""
        if self.interpreter is not None or hasattr(self.config, "workerinput"):
            return
        if not self.only_collects:
            raise pytest.UsageError("--cuda-plan goes with --collect-only; what a run did is told by --cuda-ledger")
        from pytest_cudaenv.collected import SuiteWriter

        path = self.config.invocation_params.dir / os.path.expanduser(plan)
        self.config.pluginmanager.register(SuiteWriter(self, path), "cudaenv-suite")

    def _add_project_backends(self) -> None:
        """Take in the attention backends that the project's conftests add."""
        added: list[Any] = []
        for returned in self.config.hook.pytest_cudaenv_attn_backends(config=self.config):
            added += [returned] if isinstance(returned, (str, Mapping)) else list(returned or ())
        for backend in added:
            if not hasattr(backend, "runs_on_cpu"):
                text = "pytest_cudaenv_attn_backends: return AttnBackend objects (from pytest_cudaenv), not"
                raise pytest.UsageError(f"{text} {type(backend).__name__} {backend!r}")
        if added or "pytest_cudaenv.requirements.attention" in sys.modules:
            from pytest_cudaenv.requirements.attention import with_backends

            with_backends({backend.name: backend for backend in added})

    def answer_questions(self) -> None:
        """Answer torch.cuda's questions until the end of collection; called once the suite uses the plugin."""
        if self.collecting:
            self.questions.install()

    def notice_conftest(self, module: object) -> None:
        """A conftest that imports the package uses the plugin, even if it has asked for no name yet."""
        if any(value is sys.modules.get("pytest_cudaenv") for value in vars(module).values()):
            self.answer_questions()

    def notice_module(self, path: Path) -> None:
        """Before a test module is imported: one that mentions the package uses the plugin, from its first line."""
        if self.has_questions and self.questions.active:
            return
        try:
            mentioned = b"pytest_cudaenv" in path.read_bytes()
        except OSError:
            return  # the import that follows says what is wrong
        if mentioned:
            self.answer_questions()

    @cached_property
    def contract(self) -> Contract:
        """What the runner promises. Raises pytest.UsageError, with the grammar."""
        from pytest_cudaenv.bookkeeping import contract_of

        return contract_of(self)

    @cached_property
    def bookkeeping(self) -> Bookkeeping:
        """Keeps the ledger, and holds the run to its contract."""
        from pytest_cudaenv.bookkeeping import Bookkeeping

        return Bookkeeping(self)

    @cached_property
    def keeps_books(self) -> bool:
        """Whether this process accounts for the run: not a worker, and not a device process."""
        if self.interpreter is not None or hasattr(self.config, "workerinput") or self.only_collects:
            return False
        if not any_given(self.config):
            return False
        settings = self.settings
        return bool(settings.ledger or self.judges_skips or settings.min_ran is not None)

    @cached_property
    def poison(self) -> Poison:
        """What makes this process unsafe to fork."""
        from pytest_cudaenv.poison import Poison

        return Poison()

    def check_collected(self, report: pytest.CollectReport) -> None:
        """What a file or class was found to hold: impossible cells are dropped, wrong marks are errors there."""
        if self.has_questions and self.questions.active and "::" not in report.nodeid:
            self.poison.look(report.nodeid)
        nodes = report.result if report.outcome == "passed" else ()
        if self.adoption is not None:
            self.describe_skipped(report)
            for node in nodes:
                if isinstance(node, pytest.Item):
                    self.adoption.read(node)
        if any(isinstance(node, pytest.Item) and may_use_plugin(node) for node in nodes):
            self.planner.check_collected(report)

    def plan_items(self, items: list[pytest.Item]) -> None:
        """Work out what each test needs, mark those that need devices, deselect what was not asked for."""
        if self.adoption is not None:
            for item in items:
                self.adoption.read(item)  # again: a conftest's hook may have added a marker of the project's
        if any(may_use_plugin(item) for item in items) or (
            any_given(self.config) and self.settings.unmarked == "grant"
        ):
            self.planner.plan_items(items)

    def plan_late(self, items: list[pytest.Item]) -> None:
        """Once all hooks have run: marks that one added after `plan_items` (a conftest's `trylast`) count as well."""
        for item in items:
            changed = self.adoption is not None and self.adoption.read(item)
            if changed or count_marks(item) != item.stash.get(PLANNED_MARKS, 0):
                self.planner.plan(item)
        if self.only_collects and self.planned:
            self.planner.forecast(items)

    def end_collection(self) -> None:
        """Give torch and the environment back, before the first test."""
        self.collecting = False
        if self.has_questions:
            self.questions.remove()
        self.environment.restore(NVML_CHECK)
        if getattr(self.config, "workerinput", {}).get(CHECK_INHERITED):
            os.environ.pop(NVML_CHECK, None)

    def start_watching(self) -> None:
        """Before the first test of this process: what the suite has set until now is known, and is its own."""
        if self.planned and not self.only_collects:
            _ = self.runner

    def before(self, item: pytest.Item) -> None:
        """Before a test that runs in this process, and before any hook of it."""
        if (plan := item.stash.get(PLAN, None)) is not None:
            self.runner.before(plan, item)
        elif "runner" in self.__dict__:
            self.runner.observers.unwatched()

    def set_up(self, item: pytest.Item) -> None:
        """Before a test's fixtures: skip it with its reasons, or give it its grant and seed."""
        if (wrong := item.stash.get(WRONG, None)) is not None:
            pytest.fail(wrong, pytrace=False)
        if (plan := item.stash.get(PLAN, None)) is not None:
            self.runner.set_up(item, plan)

    def call(self, item: pytest.Item) -> None:
        """Before a test's body."""
        if (plan := item.stash.get(PLAN, None)) is not None:
            self.runner.call(item, plan)

    def body_ends(self, item: pytest.Item) -> None:
        """After a test's body, however it ended."""
        if PLAN in item.stash:
            self.runner.body_ends(item)

    def tear_down(self, item: pytest.Item) -> None:
        """After a test's fixtures."""
        if PLAN in item.stash:
            self.runner.tear_down(item)

    def describe(self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None] | None = None) -> None:
        """Put on a report what summaries need: where it ran, or why it did not. Travels from xdist's workers.

        Without `call` it is a report that no phase in this process has ended with.
        """
        if (plan := item.stash.get(PLAN, None)) is not None:
            record = record_of(plan, item.stash.get(RAN_ON, None), item.stash.get(REASONS, ()))
            if (breach := item.stash.get(BREACH, None)) is not None:
                record["breach"] = breach
            report.cudaenv = record  # type: ignore[attr-defined]
            if call is not None:
                self.runner.observe(item, plan, report, record, call)
        if self.adoption is not None and report.skipped and not hasattr(report, "wasxfail"):
            self._explain(item, report)
        if self.unmarked is not None:
            self.unmarked.judge(item, report)

    def _explain(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Put on the report of a skip why it skipped, and the suite's own words."""
        from pytest_cudaenv.adoption import asked_for, original_text, text_of_skip
        from pytest_cudaenv.compat import fail

        assert self.adoption is not None
        record: dict[str, Any] = getattr(report, "cudaenv", None) or {"cell": None, "ran_on": None}
        if record.get("reasons"):  # this plugin skipped it before the suite could
            text = original_text(item)
            record["reasons"] += as_data(asked_for(text))
        else:
            text = text_of_skip(report)
            record["reasons"] = as_data(self.adoption.why(item, text))
            promise = self.denied(self.adoption.claims(item, text)) if self.judges_skips else None
            if promise is not None:
                record["breach"] = promise
                fail(report, promised_and_skipped(promise, text, record["reasons"]))
        if text:
            record["skip"] = text
        report.cudaenv = record  # type: ignore[attr-defined]

    def describe_skipped(self, report: pytest.CollectReport) -> None:
        """Put on the report of a module that skipped itself why it did."""
        if not report.skipped:
            return
        from pytest_cudaenv.adoption import text_of_skip
        from pytest_cudaenv.ledger.skips import skip_reasons

        text = text_of_skip(report)
        reasons = as_data(skip_reasons(text, self.unmet))
        record = {"cell": None, "ran_on": None, "reasons": reasons, "skip": text}
        if self.judges_skips:
            from pytest_cudaenv.ledger.claims import claimed

            if (claim := claimed(text)) is not None and (promise := self.denied([claim])) is not None:
                record["breach"] = promise
        report.cudaenv = record  # type: ignore[attr-defined]

    def add_waiting(self, nodeid: str, record: dict[str, Any]) -> None:
        """Put on a test's first report how long it waited for its devices; known to the process that leases them."""
        waited = self.isolation.leasing.waited.pop(nodeid, None) if self.isolation is not None else None
        if waited is not None and waited.seconds >= 0.1:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "")
            record["waited"] = {"seconds": waited.seconds, "whole": waited.whole, "worker": worker}

    def note_failure(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """End the first failure of a device test of this process with the line that reproduces it."""
        if report.when == "setup":
            item.stash[REPRODUCED] = False
        if report.outcome != "failed" or self.is_device_process or item.stash.get(REPRODUCED, False):
            return
        if self.is_device_test(item):
            item.stash[REPRODUCED] = True
            self.add_line(item, report, self.runner.mask(item))

    def lead_with_code(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Where one line is shown of a failure of this plugin's own, it begins with the code, as all its lines do."""
        error = None if call.excinfo is None else call.excinfo.value
        if report.outcome != "failed" or not isinstance(code := getattr(error, "code", None), str):
            return
        if (text := str(error)).startswith(f"[{code}] "):
            from pytest_cudaenv.compat import set_one_line

            set_one_line(report, text.partition("\n")[0])

    def add_line(self, item: pytest.Item, report: pytest.TestReport, mask: Mapping[str, str]) -> None:
        """End a failure with the line that runs its test again, under this mask."""
        from pytest_cudaenv.compat import add_section

        with contextlib.suppress(Exception):  # what goes wrong here must not hide the failure itself
            add_section(report, self.reproducer.title(item), self.reproducer.line(item, mask))

    def print_summary(self, reporter: pytest.TerminalReporter) -> None:
        """After the run, where some test of it used the plugin, or it was told something."""
        if "reporting" in self.__dict__ or any_given(self.config):
            self.reporting.print_summary(reporter)

    def end_isolation(self) -> None:
        """After the last test: end what device processes are left."""
        isolation, self.isolation = self.isolation, None
        if isolation is not None:
            isolation.end()
        unmarked, self.unmarked = self.unmarked, None
        if unmarked is not None:
            unmarked.end()

    def end(self) -> None:
        """Undo everything, however the run ended."""
        if "runner" in self.__dict__:
            self.runner.observers.unwatched()
        self.end_isolation()
        self.end_collection()
        if self.__dict__.get("adoption") is not None:
            self.__dict__["adoption"].remove()
        if "reporting" in self.__dict__:
            self.reporting.end()
        self.environment.restore()


def asks_for_device(item: pytest.Item) -> bool:
    """Whether a test declares that it takes a device, if only where there is one."""
    plan = item.stash.get(PLAN, None)
    return plan is not None and plan.requirement.asks_for_device


def may_use_plugin(item: pytest.Item) -> bool:
    """Whether a test carries a name of ours, on a mark or in its fixture closure. Cheap: asked of every test."""
    if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) or count_marks(item) > 0:
        return True
    adopted = item.stash.get(ADOPTED, None)
    return adopted is not None and bool(adopted.sources or adopted.error)


def count_marks(item: pytest.Item) -> int:
    """How many marks of ours a test carries."""
    return sum(mark.name in MARKERS for mark in item.iter_markers())


def record_of(plan: Plan, ran_on: str | None, reasons: Sequence[Reason]) -> dict[str, Any]:
    """What summaries read of a test, as plain data."""
    record: dict[str, Any] = {"cell": plan.cell.id, "ran_on": ran_on}
    if reasons:
        record["reasons"] = as_data(reasons)
    return record


def as_data(reasons: Sequence[Reason]) -> list[dict[str, Any]]:
    """Reasons as reports carry them."""
    return [{"code": r.code, "need": r.need, "have": r.have, "remedy": r.remedy, "rank": int(r.rank)} for r in reasons]


NO_SKIP = "--cuda-unmet=fail"
"""Stands for a promise: that nothing is skipped for what the host lacks."""


def promised_and_skipped(promise: str, text: str, reasons: Sequence[Mapping[str, Any]]) -> str:
    """The failure of a test, or of a module, that skipped itself for something promised; on one line, and a remedy."""
    from pytest_cudaenv.ledger.contract import CODE

    why = " | ".join(f"[{r['code']}] {r['need']}; have {r['have']}" for r in reasons)
    if promise == NO_SKIP:
        remedy = "Run it where what it needs is there, or leave it out with -m or -k."
        return f'[{CODE}] {NO_SKIP} allows no skip for what is lacking, and the suite skips: "{text}": {why}\n{remedy}'
    remedy = "Mend what the suite asks, declare the need with a marker of this plugin, or promise less."
    return f'[{CODE}] {promise} is promised, and the suite skips: "{text}": {why}\n{remedy}'
