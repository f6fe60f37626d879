"""One attempt at a test in a device process, as the pytest process sees it: reports, phases, deadline, death."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import selectors
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants.remains import TELL, Remains, stacks_as_shown
from pytest_cudaenv.grants.source import Child, Source
from pytest_cudaenv.grants.transport import Channel, Message

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

GRACE = 5.0
"""Seconds that a test gets past its deadline, before its process is killed from outside."""

INTERRUPTED = 30.0
"""Seconds that a device process gets to tear down after Ctrl-C."""

DEATH = "device-process-death"

_TIMEOUT = re.compile(r"^Timeout \(.*$", re.MULTILINE)
"""As pytest-timeout's method `thread`, and faulthandler's exit on timeout, head the stacks."""


class Attempt:
    """Listens to a device process while it runs a test, or while it tears down in the test's name."""

    def __init__(
        self,
        session: CudaSession,
        item: pytest.Item,
        *,
        reruns_left: int = 0,
        is_published: bool = True,
        seconds: float | None = None,
        mask: Mapping[str, str] | None = None,
    ) -> None:
        self.session = session
        self.item = item
        self.reruns_left = reruns_left
        self.is_published = is_published
        """Whether its reports are the test's; those of a second look at a failure are not."""
        self.mask = mask
        """Of the process; None where there is nothing that could be reproduced."""
        self.phase = "setup"
        self.has_begun = False
        """Whether the process has come to the test's setup."""
        self.latest = None if seconds is None else time.monotonic() + seconds
        """When it ends whatever the test's own deadline is, on the clock of `time.monotonic`."""
        self.deadline = self.latest
        self.killed = False
        """The deadline was enforced from outside."""
        self.interrupted = False
        self.remains: Remains | None = None
        """Of the process, while it may die."""
        self.stacks = ""
        """Where Python was, if the process, or one that it forked, had reason to write that."""
        self.reports: list[pytest.TestReport] = []
        self._of_others: list[pytest.TestReport] = []
        """Those of teardowns that were left from earlier tests."""
        self._first: list[pytest.TestReport] = []
        """The first failure of each attempt, as pytest-rerunfailures counts them: these are explained."""
        self._has_failed = False
        """Whether the last of these attempts has one."""
        self._held = 0
        """How many of the reports, from the end, are not passed on yet."""
        self._began, self._began_at = time.monotonic(), time.time()

    # Listening --------------------------------------------------------------------------------------------------

    def listen(self, source: Source, child: Child) -> Message | None:
        """Pass on what the process reports; its last word, or None where it died before that."""
        self.remains = child.remains
        said = self._listen(source, child)
        self.take_remains(child)
        return said

    def take_remains(self, child: Child) -> None:
        """Read what the process has left behind."""
        self.remains = child.remains
        self.stacks = stacks_as_shown(child.remains.read("stacks"))

    def _listen(self, source: Source, child: Child) -> Message | None:
        with selectors.DefaultSelector() as selector:
            selector.register(child.channel, selectors.EVENT_READ, "report")
            selector.register(source, selectors.EVENT_READ, "death")
            while True:
                while (message := child.channel.pending()) is not None:
                    if "done" in message or "closed" in message:
                        return message
                    if "captured" in message:
                        child.remains.look_at(child.pid, message["captured"])
                        continue
                    self._take(message)
                    if "report" in message:
                        with contextlib.suppress(OSError):  # it has died
                            child.channel.send({"reported": True})
                # Death is what waitpid says, never the end of the stream: grandchildren may hold the other end.
                if child.status is not None and not _readable(child.channel):
                    return None
                try:
                    ready = selector.select(self._remaining())
                except KeyboardInterrupt:
                    # The device process has it too, and is tearing down; who insists need not wait for that.
                    if self.interrupted:
                        raise
                    self.interrupted, self.deadline = True, time.monotonic() + INTERRUPTED
                    continue
                if not ready:
                    self.killed = True
                    if not stop(source, child):
                        return None
                for key, _ in ready:
                    if key.data == "report" and not child.channel.fill():
                        selector.unregister(child.channel)
                    elif key.data == "death" and not source.note_deaths():
                        selector.unregister(source)

    def _remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def _take(self, message: Message) -> None:
        config = self.item.config
        if "phase" in message:
            self.phase, self.has_begun = message["phase"], True
        elif "deadline" in message:
            self.deadline = self.latest
            if (seconds := message["deadline"]) is not None:
                self.deadline = min(time.monotonic() + seconds + GRACE, self.latest or float("inf"))
        elif "again" in message:
            self._has_failed = False
            if self.is_published:
                self.item.ihook.pytest_runtest_logfinish(nodeid=self.item.nodeid, location=self.item.location)
                self.item.ihook.pytest_runtest_logstart(nodeid=self.item.nodeid, location=self.item.location)
        elif "report" in message:
            report = config.hook.pytest_report_from_serializable(config=config, data=message["report"])
            if report.nodeid == compat.collected_id(self.item):
                report.nodeid = self.item.nodeid  # with the group that xdist may have appended in this process alone
            if isinstance(report.longrepr, str) and not message["is_text"]:
                report.longrepr = compat.Text(report.longrepr)
            compat.keep_subtest_arguments(report, message["report"])
            if self.is_published:
                compat.set_failed_subtests(config, report, message["failed_subtests"])
                compat.add_to_junit(config, report, message["junit"])
                compat.set_terminal_line(config, message.get("line"))
            if message["late"] and report.nodeid != self.item.nodeid:
                # xdist takes reports of the running test only; the text says whose it is.
                text = f"teardown of {report.nodeid}, at the end of its device process:\n{report.longreprtext}"
                report.longrepr = compat.failure_of(text, self.item.location)
                report.nodeid = self.item.nodeid
                self._of_others.append(report)
            if "_subtest.context" not in message["report"]:
                self.phase = following(self.phase, report)
            self._add(report, is_final=not message["uses_cuda"])
        elif "warning" in message and self.is_published:
            data = message["warning"]
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": _warning(data),
                    "when": message["when"],
                    "nodeid": message["nodeid"],
                    "location": tuple(message["location"]) if message["location"] else None,
                }
            )

    # Reports ----------------------------------------------------------------------------------------------------

    def _add(self, report: pytest.TestReport, *, is_final: bool = False) -> None:
        """Keep a report, and pass it on; after a failure that CUDA may explain, not before the test's end."""
        self.reports.append(report)
        is_failure = str(report.outcome) in ("failed", "rerun") and not any(report is r for r in self._of_others)
        if is_failure and not self._has_failed:
            self._has_failed = True
            self._first.append(report)
        if self._held or (report.outcome == "failed" and not is_final):
            self._held += 1
        else:
            self._publish([report])

    def _explain(self, report: pytest.TestReport) -> None:
        """End a failure, before it is passed on, with where Python was, and the line that reproduces it."""
        if self.remains is not None:
            self.stacks = stacks_as_shown(self.remains.read("stacks")) or self.stacks
        if self.stacks:
            compat.add_section(report, "Python stack", self.stacks)
        if self.mask is not None:
            self.session.add_line(self.item, report, self.mask)

    def flush(self) -> None:
        """Pass on the reports that were held back."""
        held, self._held = self.reports[len(self.reports) - self._held :], 0
        self._publish(held)

    def _publish(self, reports: Sequence[pytest.TestReport]) -> None:
        for report in reports:
            if any(report is first for first in self._first):
                self._explain(report)
        for report in reports if self.is_published else ():
            self.item.ihook.pytest_runtest_logreport(report=report)

    @property
    def failure(self) -> pytest.TestReport | None:
        """The first report of a failure of the test itself."""
        failures = (report for report in self.reports if report.outcome == "failed")
        return next((report for report in failures if not any(report is other for other in self._of_others)), None)

    @property
    def reruns(self) -> int:
        """How many of the reports are of attempts that pytest-rerunfailures repeats."""
        return sum(str(report.outcome) == "rerun" for report in self.reports)

    def fail(self, text: str, when: str | None = None, *, is_rerun: bool = False) -> None:
        """Add a failure which no process reported, with what was printed and is part of no report yet."""
        when = when or self.phase
        out, err = compat.drain_capture(self.item.config)
        if self.remains is not None:
            out, err = out + self.remains.read("out"), err + self.remains.read("err")
        sections = [
            (f"Captured {name} {when}", content) for name, content in (("stdout", out), ("stderr", err)) if content
        ]
        report = pytest.TestReport(
            nodeid=self.item.nodeid,
            location=self.item.location,
            keywords=dict.fromkeys(self.item.keywords, 1),
            # pytest-rerunfailures counts what it sees under this name, and fails no run for it.
            outcome="rerun" if is_rerun else "failed",  # type: ignore[arg-type]
            longrepr=compat.failure_of(text, self.item.location),
            when=when,  # type: ignore[arg-type]
            sections=sections,
            duration=time.monotonic() - self._began,
        )
        self.session.describe(self.item, report)
        self._add(report)

    def fail_dead(self, child: Child, when: str | None = None) -> None:
        """Add the failure of a test whose process died under it, or `when` that was."""
        how = "died with the process that had started it" if child.is_lost else death(child.status)
        if not self.killed and (timeout := _TIMEOUT.search(self.stacks)) is not None:
            how = f"was ended at its deadline, {timeout[0].rstrip('.!')},"
        if self.killed:
            how = f"did not end within {GRACE:g} s of its deadline and was killed"
            if child.status is None:
                how += " without effect, as it is stuck inside the kernel: its devices stay locked"
        text = f"[{DEATH}] device process {child.pid} {how} {when or f'during {self.phase}'}"
        if locks := build_locks(os.environ, since=self._began_at):
            text += (
                f"\nit may have held {', '.join(map(str, locks))}: builds wait for that for ever, until it is deleted"
            )
        self.fail(text, is_rerun=self.reruns_left > 0)


def following(phase: str, report: pytest.TestReport) -> str:
    """The phase that a test is in once this has been reported: a death from then on is not the reported phase's."""
    if report.when != phase or phase == "teardown":
        return phase
    return "call" if phase == "setup" and report.outcome == "passed" else "teardown"


def stop(source: Source, child: Child) -> bool:
    """Kill a process that does not end, once it has told where it is; False where it outlives that."""
    child.kill(TELL)
    child.remains.wait_for_stacks(2.0)
    child.kill()
    return source.wait(child, 10.0)


def death(status: int | None) -> str:
    """How a process ended, in words, from what `os.waitpid` said."""
    if status is None:
        return "vanished"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
        return f"was killed by signal {number}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def build_locks(environ: Mapping[str, str], since: float) -> list[Path]:
    """Locks of torch's extension builds that are there, and were made since: who held one may have died.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/cpp_extension.py (_get_build_directory, FileBaton)
    """
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    found: list[Path] = []
    for pattern in ("*/lock", "*/*/lock"):
        for lock in root.glob(pattern):
            with contextlib.suppress(OSError):
                if lock.stat().st_mtime >= since:
                    found.append(lock)
    return sorted(found)


def _readable(channel: Channel) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(0)) and channel.fill()


def _warning(data: dict[str, Any]) -> warnings.WarningMessage:
    category: type[Warning] = UserWarning
    with contextlib.suppress(Exception):
        found: Any = importlib.import_module(data["module"])
        for name in data["category"].split("."):
            found = getattr(found, name)
        category = found
    try:
        message = category(data["text"])
    except Exception:  # it takes other arguments
        message = category.__new__(category)
        message.args = (data["text"],)
    if str(message) != data["text"]:
        message = UserWarning(data["text"])
    return warnings.WarningMessage(message, category, data["filename"], data["lineno"])
