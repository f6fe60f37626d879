"""Device tests in device processes: which process runs a test, what comes back, and what a death means."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import selectors
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants import coverage_data
from pytest_cudaenv.grants.device_process import DeviceProcess
from pytest_cudaenv.grants.grant import INHERITED_VARIABLE, Grant, InProcess
from pytest_cudaenv.grants.lease import (
    Lease,
    LeaseError,
    LeaseTable,
    inherited,
    lease_directory,
)
from pytest_cudaenv.grants.process import end, fork_hazards
from pytest_cudaenv.grants.transport import Channel, Message
from pytest_cudaenv.grants.zygote import Forked, Zygote
from pytest_cudaenv.host.driver import is_cuda_initialised
from pytest_cudaenv.host.mask import write_mask
from pytest_cudaenv.requirements.requirement import Requirement, device_reasons
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

GRACE = 5.0
"""Seconds that a test gets past its deadline, before its process is killed from outside."""

INTERRUPTED = 30.0
"""Seconds that a device process gets to tear down after Ctrl-C."""

FAIR = 10.0
"""Seconds after which a process gives its devices to who waits for them, though its next test could use them."""


class Isolation:
    """Runs the device tests of one run; made right after collection, where there is one."""

    def __init__(self, session: CudaSession, pytest_session: pytest.Session, level: str) -> None:
        self.session = session
        self.pytest_session = pytest_session
        self.level = level
        self.index = {item: place for place, item in enumerate(pytest_session.items)}
        self.process: Forked | None = None
        self.grant: Grant | None = None
        self.lease: Lease | None = None
        self.budget: int | None = None
        """Bytes on each device, where the process shares its devices; None: it has them whole."""
        self.since = 0.0
        settings = session.settings
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{time.time_ns()}"
        folder = lease_directory(settings.lease_dir, os.environ)
        self.leases = LeaseTable(folder, run=run, inherited=inherited(os.environ))
        self.policy = InProcess(session.host, session.reading)
        self.last: pytest.Item | None = None
        """The test that the process ran last."""
        compat.make_basetemp(pytest_session.config)  # or each device process makes, and clears, one of its own
        self.zygote = Zygote.start(self._serve, self._prepare)

    # In the zygote and in device processes ---------------------------------------------------------------------

    def _prepare(self) -> None:
        for descriptor in compat.worker_descriptors(self.pytest_session.config):
            with contextlib.suppress(OSError):
                os.close(descriptor)  # a controller must see its worker's death, whatever the worker has forked

    def _serve(self, channel: Channel, order: Message) -> None:
        self.session.enter_device_process()
        end(0, before=lambda: DeviceProcess(self.pytest_session, channel).serve(order))

    # In the pytest process -------------------------------------------------------------------------------------

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a device test in a device process; False for a test that stays in the pytest process."""
        if not self.session.is_device_test(item):
            return False
        requirement = item.stash[PLAN].requirement
        if self.process is not None and not self._serves(item):
            self._close(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        exiting = None
        if self.process is not None or self._acquire(requirement, item):
            exiting = self._run_until_it_lives(item, nextitem)
        self._tear_down_here(item, nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._gives_back(nextitem):
            self._close(item)
        if exiting is not None:
            raise exiting
        return True

    def _acquire(self, requirement: Requirement, item: pytest.Item) -> bool:
        """Lease the devices of a test; False where they could not be had, which is the test's error, never a skip."""
        host, visible = self.session.host, self.session.reading.devices
        candidates = [d for d in visible if not device_reasons(requirement, d, host)]
        self.budget = None if requirement.exclusive else requirement.memory or None
        try:
            self.lease = self.leases.acquire(
                [d.uuid for d in candidates],
                requirement.device_count,
                timeout=self.session.settings.wait,
                memory=self.budget,
                total={d.uuid: d.total_memory for d in candidates if d.total_memory is not None},
                test=item.nodeid,
            )
        except LeaseError as error:
            self._fail(item, "setup", f"[device-busy] {error}", _Watch())
            return False
        self.since = time.monotonic()
        self.grant = Grant(tuple(d for d in visible if d.uuid in self.lease.uuids))
        return True

    def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = self.grant = None

    def _serves(self, item: pytest.Item) -> bool:
        """Whether the process that is there may run this test: its grant fits, and so does the level of isolation."""
        requirement = item.stash[PLAN].requirement
        if self.grant is None or not self.policy.fits(requirement, self.grant):
            return False
        if self.budget is not None and (requirement.exclusive or not 0 < requirement.memory <= self.budget):
            return False  # it shares its devices, and this test would take more of them
        return self._shares(item)

    def _gives_back(self, nextitem: pytest.Item | None) -> bool:
        """Whether the devices are wanted more elsewhere than here."""
        if self.process is None or self.lease is None:
            return False
        if nextitem is None:
            return True
        needed = self.session.is_device_test(nextitem) and self._serves(nextitem)
        if needed and time.monotonic() - self.since < FAIR:
            return False
        with contextlib.suppress(LeaseError):
            return self.leases.waited_for(self.lease.uuids)
        return False

    def _run_until_it_lives(self, item: pytest.Item, nextitem: pytest.Item | None) -> BaseException | None:
        """Run a test; again, in a new process, if it died and pytest-rerunfailures would run it again."""
        for left in range(reruns_of(item), -1, -1):
            if self.process is None:
                if self.lease is None and not self._acquire(item.stash[PLAN].requirement, item):
                    return None
                try:
                    self.process = self._start()
                except OSError as error:
                    self._release()
                    self._fail(item, "setup", f"[device-process-death] no device process: {error}", _Watch())
                    return None
            watch = _Watch(reruns_left=left)
            exiting = self._run(self.process, watch, item, nextitem)
            if exiting is not None or not watch.died:
                return exiting
        return None

    def _start(self) -> Forked:
        assert self.grant is not None
        host = self.session.host
        mask = write_mask(self.grant.devices, os.environ, host.devices, host.fastest_first)
        inner = ",".join(d.uuid for d in self.grant.devices)
        return self.zygote.fork({"environ": {**mask, INHERITED_VARIABLE: inner}})

    def _shares(self, item: pytest.Item) -> bool:
        """Whether the level of isolation lets this test run in the process of the last one."""
        if self.last is None:
            return True
        if any(test.stash[PLAN].requirement.isolated for test in (item, self.last)):
            return False
        if self.level == "session":
            return True
        return self.level == "module" and item.getparent(pytest.Module) is self.last.getparent(pytest.Module)

    def _run(
        self, process: Forked, watch: _Watch, item: pytest.Item, nextitem: pytest.Item | None
    ) -> BaseException | None:
        faulthandler.cancel_dump_traceback_later()
        self.last = item
        with contextlib.suppress(OSError):
            process.channel.send(
                {
                    "run": self.index[item],
                    "next": None if nextitem is None else self.index[nextitem],
                    "testsfailed": self.pytest_session.testsfailed,
                }
            )
        done = self._listen(process, watch, item)
        if done is None:
            self.process = None
            self._release()
            if watch.interrupted:
                return KeyboardInterrupt()
            watch.died = True
            self._report_death(process, watch, item)
            return None
        state = done["done"]
        self.pytest_session.shouldfail = self.pytest_session.shouldfail or state["shouldfail"]
        self.pytest_session.shouldstop = self.pytest_session.shouldstop or state["shouldstop"]
        if "sticky" in done:
            self._end_broken(process, done["sticky"], watch, item)
        if "internal" in done:
            self._fail(item, "call", f"the device process failed inside pytest:\n{done['internal']}", watch)
        if "exit" in done:
            return pytest.exit.Exception(done["exit"]["reason"], done["exit"]["returncode"])
        return KeyboardInterrupt() if "interrupted" in done or watch.interrupted else None

    def _listen(self, process: Forked, watch: _Watch, item: pytest.Item) -> Message | None:
        """Pass on what the process reports; its last word, or None where it died before that."""
        with selectors.DefaultSelector() as selector:
            selector.register(process.channel, selectors.EVENT_READ, "report")
            selector.register(self.zygote.channel, selectors.EVENT_READ, "death")
            while True:
                while (message := process.channel.pending()) is not None:
                    if "done" in message or "closed" in message:
                        return message
                    self._take(message, watch, item)
                # Death is what waitpid says, never the end of the stream: grandchildren may hold the other end.
                if process.status is not None and not _readable(process.channel):
                    return None
                try:
                    ready = selector.select(watch.remaining())
                except KeyboardInterrupt:
                    # The device process has it too, and is tearing down; who insists need not wait for that.
                    if watch.interrupted:
                        raise
                    watch.interrupted, watch.deadline = True, time.monotonic() + INTERRUPTED
                    continue
                if not ready:
                    watch.killed = True
                    process.kill(signal.SIGABRT)
                    if not self.zygote.wait(process, 2.0):
                        process.kill()
                        self.zygote.wait(process, 10.0)
                for key, _ in ready:
                    if key.data == "report" and not process.channel.fill():
                        selector.unregister(process.channel)
                    elif key.data == "death" and not self.zygote.note_deaths():
                        process.status = process.status or signal.SIGKILL
                        selector.unregister(self.zygote.channel)

    def _take(self, message: Message, watch: _Watch, item: pytest.Item) -> None:
        config = item.config
        if "phase" in message:
            watch.phase = message["phase"]
        elif "deadline" in message:
            watch.deadline = time.monotonic() + message["deadline"] + GRACE
        elif "report" in message:
            report = config.hook.pytest_report_from_serializable(config=config, data=message["report"])
            if message["late"] and report.nodeid != item.nodeid:
                # xdist takes reports of the running test only; the text says whose it is.
                report.longrepr = f"teardown of {report.nodeid}, at the end of its device process:\n{report.longrepr}"
                report.nodeid = item.nodeid
            watch.reported.append((report.when, report.outcome))
            item.ihook.pytest_runtest_logreport(report=report)
        elif "warning" in message:
            data = message["warning"]
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": _warning(data),
                    "when": message["when"],
                    "nodeid": message["nodeid"],
                    "location": tuple(message["location"]) if message["location"] else None,
                }
            )

    def _report_death(self, process: Forked, watch: _Watch, item: pytest.Item) -> None:
        how = (
            f"did not end within {GRACE:g} s of its deadline and was killed" if watch.killed else _death(process.status)
        )
        self._fail(
            item, watch.phase, f"[device-process-death] device process {process.pid} {how} during {watch.phase}", watch
        )

    def _end_broken(self, process: Forked, error: str, watch: _Watch, item: pytest.Item) -> None:
        """End a process whose CUDA context is broken: every later test in it would fail, and be innocent."""
        self.process = None
        process.kill()
        self.zygote.wait(process, 10.0)
        process.channel.close()
        self._release()
        if not any(outcome == "failed" for _, outcome in watch.reported):
            text = f"[cuda-sticky] this test left CUDA broken ({error}); its device process was ended"
            self._fail(item, "teardown", text, watch)

    def _fail(self, item: pytest.Item, when: str, text: str, watch: _Watch) -> None:
        out, err = compat.drain_capture(item.config)
        sections = [
            (f"Captured {name} {when}", content) for name, content in (("stdout", out), ("stderr", err)) if content
        ]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            # pytest-rerunfailures counts what it sees under this name, and fails no run for it.
            outcome="rerun" if watch.died and watch.reruns_left else "failed",  # type: ignore[arg-type]
            longrepr=text,
            when=when,  # type: ignore[arg-type]
            sections=sections,
            duration=time.monotonic() - watch.started,
        )
        self.session.describe(item, report)
        item.ihook.pytest_runtest_logreport(report=report)

    def _tear_down_here(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End what CPU tests before this one left set up here and the next test does not need."""
        try:
            compat.tear_down_to(self.pytest_session, nextitem)
        except Exception as error:
            item.ihook.pytest_runtest_logreport(report=compat.teardown_report(item, error))

    def _close(self, item: pytest.Item | None) -> None:
        """End the process, reporting what its teardown reports, under the running test where there is one."""
        process, self.process = self.process, None
        if process is None:
            return
        owner = item or self.last
        with contextlib.suppress(OSError):
            process.channel.send({"close": True})
        if owner is not None:
            watch = _Watch()
            watch.deadline = time.monotonic() + 60
            last = self._listen(process, watch, owner)
            if last is not None and last.get("coverage"):
                coverage_data.add(last["coverage"])
        if not self.zygote.wait(process, 10.0):
            process.kill()
            self.zygote.wait(process, 10.0)
        process.channel.close()
        self._release()

    def end(self) -> None:
        """End the last process and the zygote."""
        self._close(None)
        self.zygote.close()


class _Watch:
    """What is known of a running test from outside."""

    def __init__(self, reruns_left: int = 0) -> None:
        self.reruns_left = reruns_left
        self.died = False
        self.started = time.monotonic()
        self.phase = "setup"
        self.deadline: float | None = None
        self.killed = False
        self.interrupted = False
        self.reported: list[tuple[str | None, str]] = []

    def remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


def _readable(channel: Channel) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(0)) and channel.fill()


def _death(status: int | None) -> str:
    if status is None:
        return "vanished"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
        return f"was killed by signal {number}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def _warning(data: dict[str, Any]) -> warnings.WarningMessage:
    category: type[Warning] = UserWarning
    with contextlib.suppress(Exception):
        found: Any = importlib.import_module(data["module"])
        for name in data["category"].split("."):
            found = getattr(found, name)
        category = found
    try:
        message = category(data["text"])
    except Exception:
        message = UserWarning(data["text"])
    return warnings.WarningMessage(message, category, data["filename"], data["lineno"])


def reruns_of(item: pytest.Item) -> int:
    """How often pytest-rerunfailures would run this test again; 0 without it.

    https://pytest-rerunfailures.readthedocs.io
    """
    plugin = item.config.pluginmanager.get_plugin("rerunfailures")
    count = getattr(plugin, "get_reruns_count", None)
    return int(count(item) or 0) if count is not None else 0


def why_not_forked() -> str | None:
    """Why this process cannot be forked safely any more; None where it can."""
    if is_cuda_initialised():
        return "CUDA was initialised while collecting"
    if hazards := fork_hazards():
        return f"thread pools were started while collecting ({', '.join(hazards)})"
    return None
