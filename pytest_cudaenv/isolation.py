"""Device tests in device processes: which process runs a test, and what becomes of it afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import select
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.attempt import DEATH, Attempt, death
from pytest_cudaenv.grants.demand import Demand
from pytest_cudaenv.grants.device_process import DeviceProcess
from pytest_cudaenv.grants.family import below, end_all
from pytest_cudaenv.grants.grant import INHERITED_VARIABLE, TAG, Grant, InProcess
from pytest_cudaenv.grants.handover import take
from pytest_cudaenv.grants.interpreter import Interpreters
from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.lease_table import LeaseTable, inherited
from pytest_cudaenv.grants.leasing import Demanded, Leasing
from pytest_cudaenv.grants.lock_folder import LeaseError, lease_directory
from pytest_cudaenv.grants.own_process import worker_id
from pytest_cudaenv.grants.process import end
from pytest_cudaenv.grants.remains import Remains
from pytest_cudaenv.grants.source import Child, Source
from pytest_cudaenv.grants.transport import Channel, Message
from pytest_cudaenv.grants.zygote import Zygote
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES, write_mask
from pytest_cudaenv.host.nvml import XidWatch, read_usage
from pytest_cudaenv.interpreter import ELSEWHERE, order
from pytest_cudaenv.requirements.requirement import Requirement, device_reasons
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.host.devices import CudaDevice
    from pytest_cudaenv.session import CudaSession

FAIR = 10.0
"""Seconds after which a process gives its devices to who waits for them, though its next test could use them."""

CLOSING = 60.0
"""Seconds that a device process gets to tear down at its end."""

XID_LAG = 100
"""Milliseconds by which the driver may tell of an error later than the process that died of it."""

LOOKING_AGAIN = 120.0
"""Seconds that a test which broke CUDA gets to show where it did; with its own deadline, if that is sooner."""


class Isolation:
    """Runs the device tests of one run; made right after collection, where there is one."""

    def __init__(self, session: CudaSession, pytest_session: pytest.Session, level: str) -> None:
        self.session = session
        self.pytest_session = pytest_session
        self.level = level
        self.index = {item: place for place, item in enumerate(pytest_session.items)}
        self.child: Child | None = None
        """The device process that is there."""
        self.grant: Grant | None = None
        self.lease: Lease | None = None
        self.budget: int | None = None
        """Bytes on each device, where the process shares its devices; None: it has them whole."""
        self.since = 0.0
        self.environ = dict(os.environ)
        """With the run's mask, whatever the pytest process shows its own tests."""
        settings = session.settings
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{time.time_ns()}"
        folder = lease_directory(settings.lease_dir)
        self.leases = LeaseTable(folder, run=run, inherited=inherited(os.environ))
        usage = read_usage if session.host.simulated is None else None
        self.leasing = Leasing(self.leases, settings.wait, usage, session.warn)
        self.tag = f"{run}-{os.getpid()}"
        """Begins the tags of all that comes from this pytest process."""
        self.policy = InProcess(session.host, session.reading)
        self.last: pytest.Item | None = None
        """The test that the process ran last."""
        self.started = 0
        """How many device processes were started."""
        self.scheduled = "cudaenv_requests" in getattr(pytest_session.config, "workerinput", {})
        """Whether xdist's controller gives tests to workers by what they lease."""
        compat.make_basetemp(pytest_session.config)  # or each device process makes, and clears, one of its own
        self.is_fresh = False
        """Device processes are fresh interpreters: this process cannot be forked, or its zygote has died."""
        self.source = self._source()
        self.xids = self._watch_xids()

    def _watch_xids(self) -> XidWatch | None:
        """Once the zygote is there, which must not inherit NVML; None on a simulated host."""
        if self.session.host.simulated is not None:
            return None
        return XidWatch.start(self.session.reading.devices)

    def _quote_xids(self, attempt: Attempt) -> None:
        """Add to a failure what the driver has reported of its devices."""
        if self.xids is None or attempt.failure is None or self.grant is None:
            return
        lines = [
            f"Xid {xid.code} on {device.uuid} ({device.name}) since the run began"
            for xid in self.xids.seen(wait_ms=XID_LAG)
            for device in self.grant.devices
            if xid.concerns(device)
        ]
        if lines:
            compat.add_section(attempt.failure, "CUDA driver", "\n".join(lines))

    def _source(self) -> Source:
        if (why := self.session.poison.why_not_forked()) is None:
            return Zygote.fork(self._serve, self._prepare)
        text = f"[no-fork] {why}: device processes are fresh interpreters, which import everything again"
        self.session.warn(text)
        return self._interpreters()

    def _interpreters(self) -> Interpreters:
        self.is_fresh = True
        return Interpreters(self.environ, str(self.pytest_session.config.invocation_params.dir))

    def _replace_source(self) -> None:
        """Once the zygote, or the keeper, has died: device processes are fresh interpreters from now on.

        Not forks of another zygote: this process has run tests since, and what they have set up is not to be torn down
        once in each fork.
        """
        text = f"the {self.source.name} {death(self.source.close())}, and its device process with it"
        if self.is_fresh:
            text += ": another one takes its place"
        else:
            text += ": device processes are fresh interpreters from now on, which import everything again"
        self.source = self._interpreters()
        self.session.warn(f"[no-fork] {text}")

    # In the zygote and in device processes ---------------------------------------------------------------------

    def _prepare(self) -> None:
        # Once, and not in each device process: what is done for the first test of a process, whose numbers are seeded.
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")
        _ = self.session.runner
        for descriptor in compat.worker_descriptors(self.pytest_session.config):
            with contextlib.suppress(OSError):
                os.close(descriptor)  # a controller must see its worker's death, whatever the worker has forked

    def _serve(self, channel: Channel, order: Message, fds: Sequence[int]) -> None:
        self.session.enter_device_process()
        order["zygote"] = os.getppid()
        remains, fds = Remains.adopt(fds)
        lease = Lease.adopt(fds, order["devices"])
        process = DeviceProcess(
            self.pytest_session, channel, remains, lease, lambda index: self.pytest_session.items[index]
        )
        end(0, before=lambda: process.serve(order))

    # In the pytest process -------------------------------------------------------------------------------------

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a device test in a device process; False for a test that stays in the pytest process."""
        if not self.session.is_device_test(item):
            return False
        requirement = item.stash[PLAN].requirement
        died = self._died_idle()
        if self.child is not None and not self._serves(item):
            self._close(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if died is not None:
            self._report_idle(died, item)
        exiting = None
        if self.child is not None or self._acquire(requirement, item):
            exiting = self._run_until_it_lives(item, nextitem)
        self._tear_down_here(item, nextitem)
        if exiting is None:
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._gives_back(nextitem):
            self._close(item)
        if exiting is not None:
            raise exiting
        return True

    def _died_idle(self) -> Child | None:
        """The process, where it has died since its last test: no test that follows may be blamed."""
        child = self.child
        if child is None:
            return None
        poll = select.poll()
        poll.register(self.source, select.POLLIN)
        while child.status is None and poll.poll(0):
            self.source.note_deaths()
        if child.status is None:
            return None
        self.child = None
        self._release()
        return child

    def _report_idle(self, child: Child, item: pytest.Item) -> None:
        """Report a process that has died since its last test; no error where the zygote did, which is told once."""
        attempt = Attempt(self.session, item)
        self._take(None, attempt)
        if child.is_lost:
            attempt.flush()
            self._forget(child)
        else:
            self._report_end(child, attempt, "between tests")

    def _report_end(self, child: Child, attempt: Attempt, when: str) -> None:
        """Report a process that died while no test ran in it, under the running test, which the text tells from it."""
        attempt.take_remains(child)
        attempt.fail_dead(child, f"{when}, after {self.last.nodeid}" if self.last is not None else when)
        attempt.flush()
        self._forget(child)

    def _acquire(self, requirement: Requirement, item: pytest.Item) -> bool:
        """Lease the devices of a test; False where they could not be had, which is the test's error, never a skip."""
        visible = self.session.reading.devices
        candidates = candidates_of(requirement, self.session)
        self.budget = budget_of(requirement, self.session)
        count, memory = requirement.device_count, requirement.memory or self.budget or 0
        try:
            self.lease = self.leasing.acquire(Demanded(candidates, count, self.budget, memory, item.nodeid))
        except LeaseError as error:
            self._error(item, f"[{error.code}] {error}")
            return False
        self.since = time.monotonic()
        self.grant = Grant(tuple(d for d in visible if d.uuid in self.lease.uuids))
        return True

    def _release(self) -> None:
        if self.lease is not None:
            self.leasing.release(self.lease, self.grant.devices if self.grant is not None else ())
        self.lease = self.grant = None

    def _serves(self, item: pytest.Item) -> bool:
        """Whether the process that is there may run this test: its grant fits, and so does the level of isolation."""
        requirement = item.stash[PLAN].requirement
        if self.grant is None or not self.policy.fits(requirement, self.grant):
            return False
        budget = budget_of(requirement, self.session)
        if self.budget is not None and (budget is None or budget > self.budget):
            return False  # it shares its devices, and this test would take more of them
        return self._shares(item)

    def _gives_back(self, nextitem: pytest.Item | None) -> bool:
        """Whether the devices are wanted more elsewhere than here."""
        if self.child is None or self.lease is None:
            return False
        if nextitem is None:
            return True
        needed = self.session.is_device_test(nextitem) and self._serves(nextitem)
        if self.scheduled and not self._keeps(nextitem, needed):
            return True
        if needed and time.monotonic() - self.since < FAIR:
            return False
        with contextlib.suppress(LeaseError):
            return self.leases.waited_for(self.lease.uuids)
        return False

    def _keeps(self, nextitem: pytest.Item, needed: bool) -> bool:
        """Whether `--dist cuda` counts on the devices being held on: for the same request, or within an xdist group."""
        from pytest_cudaenv.mailbox import group_of

        if needed:
            budget = budget_of(nextitem.stash[PLAN].requirement, self.session)
            return self.budget is not None or budget is None
        group = group_of(nextitem)
        return group.together and self.last is not None and group == group_of(self.last)

    def _run_until_it_lives(self, item: pytest.Item, nextitem: pytest.Item | None) -> BaseException | None:
        """Run a test; in a new process again, if CUDA or its process died and pytest-rerunfailures would run it again.

        Returns what ends the run.
        """
        left = reruns_of(item)
        while True:
            if self.child is None:
                if self.lease is None and not self._acquire(item.stash[PLAN].requirement, item):
                    return None
                try:
                    self.child = self._start(item)
                except OSError as error:
                    self._release()
                    self._error(item, f"[{DEATH}] no device process: {error}")
                    return None
            attempt = Attempt(self.session, item, reruns_left=left, mask=self._mask())
            exiting, again = self._run(self.child, attempt, item, nextitem)
            attempt.flush()
            left -= attempt.reruns
            if exiting is not None or not again:
                return exiting

    def _mask(self) -> dict[str, str]:
        """The variables under which CUDA shows the grant and nothing else."""
        assert self.grant is not None
        host = self.session.host
        return write_mask(self.grant.devices, self.environ, host.devices, host.fastest_first)

    def _start(self, item: pytest.Item, **environ: str) -> Child:
        """A device process with the grant, and a copy of the lease. Raises OSError where there is none."""
        assert self.grant is not None
        uuids = [d.uuid for d in self.grant.devices]
        self.started += 1
        tag = f"{self.tag}:{self.started}"
        environ = {**self._mask(), INHERITED_VARIABLE: ",".join(uuids), TAG: f"{tag}:", **environ}
        own = f"{worker_id(self.pytest_session.config)}-{self.started}"
        child = self._start_with({"environ": environ, "devices": uuids, "tag": tag, "id": own}, item)
        child.tag = tag
        return child

    def _start_with(self, message: Message, item: pytest.Item) -> Child:
        """Raises OSError where no process can be started, once what has died is replaced."""
        assert self.lease is not None
        if not self.source.has_died:
            try:
                return self._start_from_source(message, item, self.lease)
            except OSError:
                if not self.source.has_died:
                    raise
        self._replace_source()
        return self._start_from_source(message, item, self.lease)

    def _start_from_source(self, message: Message, item: pytest.Item, lease: Lease) -> Child:
        if not self.is_fresh:
            return self.source.start(message, lease.filenos())
        config = self.pytest_session.config
        message = {**message, **order(config, self.started), "path": str(item.path)}
        message["outer"] = {
            name: self.environ[name] for name in (VISIBLE_DEVICES, DEVICE_ORDER) if name in self.environ
        }
        with compat.uncaptured(config):  # the interpreter captures for itself, and debuggers need the terminal
            return self.source.start(message, lease.filenos())

    def _refer(self, item: pytest.Item) -> Any:
        """A test, in the words of the device process."""
        if not self.is_fresh:
            return self.index[item]
        return {"nodeid": compat.collected_id(item), "path": str(item.path)}

    def _shares(self, item: pytest.Item) -> bool:
        """Whether the level of isolation lets this test run in the process of the last one."""
        if self.last is None:
            return True
        if any(test.stash[PLAN].requirement.isolated for test in (item, self.last)):
            return False
        if self.level == "session":
            return True
        return self.level == "module" and item.getparent(pytest.Module) is self.last.getparent(pytest.Module)

    def _ask(self, child: Child, attempt: Attempt, nextitem: pytest.Item | None) -> Message | None:
        """Have a test run in a process; the process's last word on it, or None where it died before that."""
        faulthandler.cancel_dump_traceback_later()
        item, following = attempt.item, None
        if nextitem is not None:
            is_near = not self.is_fresh or nextitem.path == item.path
            following = self._refer(nextitem) if is_near else ELSEWHERE
        message = {"run": self._refer(item), "next": following, "testsfailed": self.pytest_session.testsfailed}
        message["line"] = compat.terminal_line(item.config)
        if attempt.reruns_left or reruns_of(item):
            message["reruns"] = attempt.reruns_left
        child.remains.forget_stacks()
        with contextlib.suppress(OSError):
            child.channel.send(message)
        return attempt.listen(self.source, child)

    def _run(
        self, child: Child, attempt: Attempt, item: pytest.Item, nextitem: pytest.Item | None
    ) -> tuple[BaseException | None, bool]:
        """Run a test in a process. Returns what ends the run, and whether the test is to run again."""
        self.last = item
        done = self._ask(child, attempt, nextitem)
        if done is None:
            self.child = None
            # The zygote has died before the test began: it is to run, and not to fail.
            is_spared = child.is_lost and not attempt.has_begun and not self.is_fresh
            if not attempt.interrupted:
                if not is_spared:
                    attempt.fail_dead(child)
                    self._quote_xids(attempt)
                self._take(None, attempt)
            self._forget(child)
            self._release()
            if attempt.interrupted:
                return KeyboardInterrupt(), False
            return None, is_spared or attempt.reruns_left > 0
        state = done["done"]
        self.pytest_session.shouldfail = self.pytest_session.shouldfail or state["shouldfail"]
        self.pytest_session.shouldstop = self.pytest_session.shouldstop or state["shouldstop"]
        if "sticky" in done:
            self._end_broken(child, done, attempt)
        if "missing" in done:
            text = "the file in which this test stands could not be collected again in a fresh interpreter"
            attempt.fail(f"[no-fork] {text}:\n{done['missing']}", "setup")
        if "internal" in done:
            attempt.fail(f"the device process failed inside pytest:\n{done['internal']}", "call")
        if "exit" in done:
            return pytest.exit.Exception(done["exit"]["reason"], done["exit"]["returncode"]), False
        interrupted = "interrupted" in done or attempt.interrupted
        return KeyboardInterrupt() if interrupted else None, "cut short" in done and not interrupted

    def _end_broken(self, child: Child, done: Message, attempt: Attempt) -> None:
        """End a process whose CUDA context is broken: every later test in it would fail, and be innocent."""
        self.child = None
        child.kill()
        self._bury(child)
        self._take(None, attempt)
        runs_again, ends_run = "cut short" in done, attempt.interrupted or "interrupted" in done or "exit" in done
        if attempt.failure is not None:
            # Who is asked to debug a failure is asked once.
            if not ends_run and not self.pytest_session.config.getoption("usepdb"):
                self._look_again(done["sticky"], attempt)
        elif not runs_again and not ends_run:
            text = f"[cuda-sticky] this test left CUDA broken ({done['sticky']}); its device process was ended"
            attempt.fail(text, "teardown")
        self._quote_xids(attempt)
        self._release()

    def _look_again(self, error: str, attempt: Attempt) -> None:
        """Run a test that broke CUDA once more, where each kernel ends before the next line of Python.

        Kernels run behind Python's back, and an error is raised where somebody next asks: this finds its true line.
        """
        failure = attempt.failure
        assert failure is not None
        found = f"[cuda-sticky] this test broke CUDA ({error}); its device process was ended"
        again = Attempt(self.session, attempt.item, is_published=False, seconds=LOOKING_AGAIN)
        try:
            child = self._start(attempt.item, CUDA_LAUNCH_BLOCKING="1")
        except OSError:
            compat.add_section(failure, "CUDA", found)
            return
        done = self._ask(child, again, None)
        child.kill()
        self._bury(child)
        if again.interrupted:
            attempt.interrupted = True
        if again.failure is not None and done is not None:
            seen = f"With CUDA_LAUNCH_BLOCKING=1 it is raised here:\n{again.failure.longreprtext}"
        elif done is None:
            seen = "With CUDA_LAUNCH_BLOCKING=1 its process died or did not end"
        else:
            seen = "With CUDA_LAUNCH_BLOCKING=1 it passed"
        compat.add_section(failure, "CUDA", f"{found}. {seen}")

    def _error(self, item: pytest.Item, text: str) -> None:
        """Report that a test could not even start."""
        attempt = Attempt(self.session, item)
        attempt.fail(text, "setup")
        attempt.flush()

    def _tear_down_here(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End what CPU tests before this one left set up here and the next test does not need."""
        try:
            compat.tear_down_to(self.pytest_session, nextitem)
        except Exception as error:
            item.ihook.pytest_runtest_logreport(report=compat.teardown_report(item, error))

    def _close(self, item: pytest.Item | None) -> None:
        """End the process, reporting what its teardown reports, under the running test where there is one."""
        died = self._died_idle()
        if died is not None and (owner := item or self.last) is not None:
            self._report_idle(died, owner)
        child, self.child = self.child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.channel.send({"close": True})
        if (owner := item or self.last) is not None:
            attempt = Attempt(self.session, owner, seconds=CLOSING)
            attempt.phase = "teardown"
            said = attempt.listen(self.source, child)
            self._take(said, attempt)
            attempt.flush()
            if said is None and not attempt.interrupted:
                self._report_end(child, attempt, "at its end")
        self._bury(child)
        self._release()

    def _take(self, handed: Message | None, attempt: Attempt) -> None:
        """Take over what a process had at its end; None: it died before. What a conftest makes of it may fail."""
        try:
            take(attempt.item.config, handed)
        except Exception:
            attempt.fail(f"[{DEATH}] what a device process handed over:\n{traceback.format_exc()}", "teardown")

    def _bury(self, child: Child) -> None:
        """Wait for the end of a process that has been told to end, and kill it if need be."""
        if not self.source.wait(child, 10.0):
            child.kill()
            self.source.wait(child, 10.0)
        self._forget(child)

    def _forget(self, child: Child) -> None:
        """Take note of the end of a process: what it has left behind is read, and its children end with it."""
        if child.status is not None and (left := below(self.source.orphans(child))):
            end_all(left)
        child.close()
        if self.source.has_died:
            self._replace_source()

    def end(self) -> None:
        """End the last process, and what it came from."""
        self._close(None)
        self.source.close()
        if self.xids is not None:
            self.xids.close()


def candidates_of(requirement: Requirement, session: CudaSession) -> tuple[CudaDevice, ...]:
    """The visible devices that meet a test's requirement."""
    return tuple(d for d in session.reading.devices if not device_reasons(requirement, d, session.host))


def budget_of(requirement: Requirement, session: CudaSession) -> int | None:
    """Bytes on each device of a test that shares its devices; None: it takes them whole."""
    return None if requirement.exclusive else requirement.memory or session.settings.default_memory


def demand_of(requirement: Requirement, session: CudaSession) -> Demand:
    """What a test with this requirement leases."""
    candidates = candidates_of(requirement, session)
    return Demand(
        tuple(d.uuid for d in candidates),
        requirement.device_count,
        budget_of(requirement, session),
        {d.uuid: d.total_memory for d in candidates if d.total_memory is not None},
    )


def reruns_of(item: pytest.Item) -> int:
    """How often pytest-rerunfailures would run this test again; 0 without it.

    https://pytest-rerunfailures.readthedocs.io
    """
    plugin = item.config.pluginmanager.get_plugin("rerunfailures")
    count = getattr(plugin, "get_reruns_count", None)
    return int(count(item) or 0) if count is not None else 0
