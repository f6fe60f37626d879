"""Running: each test's grant and seed, or the reasons why it has none."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants.current import Current, enter, leave
from pytest_cudaenv.grants.grant import Grant
from pytest_cudaenv.kernel_observer import KernelObserver
from pytest_cudaenv.ledger.record import needs
from pytest_cudaenv.observers import Observers
from pytest_cudaenv.offers import OFFERS, Offers
from pytest_cudaenv.parity_observer import ParityObserver
from pytest_cudaenv.plan import Plan, expect_failure, matching_bad_cell
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement
from pytest_cudaenv.session import BREACH, PLAN, RAN_ON, REASONS
from pytest_cudaenv.torch_memory import MemoryObserver
from pytest_cudaenv.torch_state import StateObserver
from pytest_cudaenv.unmarked import Use, use_of_cuda
from pytest_cudaenv.wider_fixtures import watch_wider_fixtures
from pytest_cudaenv.witnessing import WitnessObserver

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession


HELD = pytest.StashKey["tuple[Grant, Use]"]()
"""A test's grant, and what its process had done with CUDA before it."""


class Runner:
    """Runs the tests of one run that use the plugin; made for the first of them."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self.held: Grant | None = None
        """The grant that session-scoped device fixtures were built with."""
        self._needs: dict[tuple[Requirement, tuple[tuple[str, Requirement], ...]], dict[str, Any]] = {}
        self._root: tuple[Any, pytest.FixtureRequest] | None = None
        observers = (StateObserver(), MemoryObserver(), WitnessObserver(), ParityObserver(), KernelObserver())
        self.observers = Observers(observers, strict=session.settings.strict)
        watch_wider_fixtures(session.config, self.observers)
        self.settled: set[tuple[Path, str, Hashable]] = set()
        """Golden values that this process has measured, while they are updated."""

    def before(self, plan: Plan, item: pytest.Item) -> None:
        """Before a test of this process, and before any hook of it."""
        if plan.is_watched:
            self.observers.before(item)
        else:
            self.observers.unwatched()

    def set_up(self, item: pytest.Item, plan: Plan) -> None:
        """Before a test's fixtures: skip it with its reasons, or give it its grant and seed."""
        self.session.learn_architectures()
        if reasons := self.session.unmet(plan.requirement, trying=True):
            self._refuse(item, reasons)
        grant = self._grant(plan.requirement)
        if grant.devices:
            item.stash[HELD] = (grant, self._begin_watching(grant))
        if (known := matching_bad_cell(plan, grant.devices[0] if grant.devices else None)) is not None:
            expect_failure(item, known, datetime.date.today())
        if plan.requirement.asks_for_device:
            item.stash[RAN_ON] = grant.ran_on
        refuse = functools.partial(self._refuse, item)
        offers = item.stash[OFFERS] = Offers(self, item, plan, grant)
        seed = seed_of(item, self.session_seed)
        enter(Current(item.nodeid, grant, seed, refuse, offers, plan.requirement.asks_for_device))
        if plan.is_watched:
            self.observers.begin(item, plan, grant)
        self.seed(item, plan)

    def call(self, item: pytest.Item, plan: Plan) -> None:
        """Before a test's body: fixtures that only the first test of a module sets up have used the numbers since."""
        self.seed(item, plan)
        self.observers.call(item)

    def body_ends(self, item: pytest.Item) -> None:
        """After a test's body, before its report."""
        self.observers.body_ends(item)

    def seed(self, item: pytest.Item, plan: Plan) -> None:
        """Seed `random`, and NumPy and torch where they are imported, from the id of a device or cell test."""
        if not plan.is_seeded:
            return
        seed = seed_of(item, self.session_seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        if (torch := sys.modules.get("torch")) is not None:
            with _no_traceback():
                torch.manual_seed(seed)

    def _begin_watching(self, grant: Grant) -> Use:
        """What this process has done with CUDA before a test; the peak of its memory begins anew."""
        if self.session.settings.ledger is not None:
            with contextlib.suppress(Exception):  # another torch, or a broken context
                if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                    for index in range(len(grant.devices)):
                        torch.cuda.reset_peak_memory_stats(index)
        return use_of_cuda()

    def observe(
        self,
        item: pytest.Item,
        plan: Plan,
        report: pytest.TestReport,
        record: dict[str, Any],
        call: pytest.CallInfo[None],
    ) -> None:
        """Put on a report what a ledger tells of the test, and what was found of it."""
        self._tell(item, plan, report, record)
        if report.when == "call" and OFFERS in item.stash:
            record.update(item.stash[OFFERS].facts)
        self.observers.note(item, report, record, call)

    def _tell(self, item: pytest.Item, plan: Plan, report: pytest.TestReport, record: dict[str, Any]) -> None:
        """The same, and whether it only seemed to use its device."""
        if self.session.settings.ledger is not None and report.when == "setup":
            record.update(self._told(plan))
        held = item.stash.get(HELD, None)
        if held is None or report.when == "teardown":
            return
        grant, before = held
        if self.session.settings.ledger is not None:
            record["devices"] = [device.uuid for device in grant.devices]
            if self.session.is_device_process:
                record["process"] = os.getpid()
            record["memory"] = _peak_memory(len(grant.devices))
        if report.when != "call" or not compat.has_passed(report):
            return
        if self.session.host.simulated is None and is_idle(before, use_of_cuda()):
            record["idle"] = True
            if self.session.settings.strict:
                compat.fail(
                    report,
                    f"[{IDLE}] needs to use CUDA, as it asks for a device; have neither an allocation nor a context. "
                    "Let the test compute on its device, or take away its requirement (--cuda-strict)",
                )

    def _told(self, plan: Plan) -> dict[str, Any]:
        """What a test needs and who said so, as plain data; many tests need the same."""
        key = (plan.requirement, plan.sources)
        if key not in self._needs:
            sources = [{"where": where, "needs": needs(part)} for where, part in plan.sources]
            self._needs[key] = {"needs": needs(plan.requirement), "sources": sources}
        return self._needs[key]

    def tear_down(self, item: pytest.Item) -> None:
        """After a test's fixtures: it holds no grant any more."""
        self.observers.end(item)
        leave(item.nodeid)

    def _grant(self, requirement: Requirement) -> Grant:
        """The test's devices; what was built on others is ended, as at the end of a device process."""
        if not requirement.asks_for_device:
            return Grant()
        grant = self.session.granter.grant(requirement, self.held)
        if self.held is not None and grant != self.held:
            self._end_held()
        self.held = grant
        return grant

    def mask(self, item: pytest.Item) -> dict[str, str]:
        """The mask under which a test that runs in this process is granted, alone, what it has been granted."""
        from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES, write_mask

        host = self.session.host
        alone = self.session.granter.grant(item.stash[PLAN].requirement, None)
        if self.held is not None and self.held != alone:
            return write_mask(self.held.devices, os.environ, host.devices, host.fastest_first)
        return {name: os.environ[name] for name in (VISIBLE_DEVICES, DEVICE_ORDER) if name in os.environ}

    def note_fixture(self, definition: Any, request: pytest.FixtureRequest) -> None:
        """The fixture that all device fixtures are built on is being set up."""
        self._root = (definition, request)

    def _end_held(self) -> None:
        if self._root is not None:
            definition, request = self._root
            self._root = None
            compat.finish_fixture(definition, request)

    def _refuse(self, item: pytest.Item, reasons: Sequence[Reason]) -> NoReturn:
        """End the test as unmet: an error where a device is present and unusable, else as `--cuda-unmet` says."""
        item.stash[REASONS] = reasons
        message = " | ".join(str(reason) for reason in reasons)
        if (promise := self.session.breach(reasons)) is not None:
            from pytest_cudaenv.ledger.contract import CODE

            item.stash[BREACH] = promise.text
            pytest.fail(f"[{CODE}] {promise.text} is promised: {message}\n{reasons[0].remedy}", pytrace=False)
        if any(reason.is_error for reason in reasons):
            pytest.fail(f"{message}\n{reasons[0].remedy}", pytrace=False)
        if self.session.settings.unmet == "fail":
            pytest.fail(f"{message} (--cuda-unmet=fail)\n{reasons[0].remedy}", pytrace=False)
        compat.skip_at_test(message)

    def forget_refusal(self, item: pytest.Item) -> None:
        """What was refused was a part of the test, and has been reported: the rest goes on."""
        if REASONS in item.stash:
            del item.stash[REASONS]
        if BREACH in item.stash:
            del item.stash[BREACH]

    @property
    def session_seed(self) -> int:
        """pytest-randomly's seed, so that its `-p randomly -p …` reproduces ours too; 0 without it."""
        value = self.session.config.getoption("randomly_seed", None)
        return value if isinstance(value, int) else 0


@contextlib.contextmanager
def _no_traceback() -> Iterator[None]:
    """A block in which nothing formats the stack: torch does for each seed that CUDA is to have once it is in use.

    Under pytest that is most of what an empty test costs.
    """
    missing = object()
    limit = getattr(sys, "tracebacklimit", missing)
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is missing:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit  # type: ignore[assignment]


IDLE = "cuda-idle"


def is_idle(before: Use, now: Use) -> bool:
    """Whether nothing between two looks at a process has used CUDA, as far as CUDA itself and torch tell.

    A process that uses CUDA without torch tells nothing, and is not called idle.
    """
    if not now[0]:
        return True
    return bool(now[1]) and now == before


def _peak_memory(count: int) -> int | None:
    """Bytes that torch has allocated at most on one of the first `count` devices; None where it has used none."""
    with contextlib.suppress(Exception):  # another torch, or a broken context
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            return max(int(torch.cuda.max_memory_allocated(index)) for index in range(count))
    return None


def seed_of(item: pytest.Item, session_seed: int) -> int:
    """The seed of a test, 32 bits: the same on every host, worker and order."""
    digest = hashlib.sha256(f"{session_seed}:{item.nodeid}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
