"""The processes that a device process has started, and those that they have: found, told apart, and ended.

Found as descendants, as a zygote adopts those whose parent has ended; or by a variable that subprocesses inherit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_cudaenv.grants.grant import TAG

PATIENCE = 0.5
"""Seconds in which what a test has left may end by itself, as workers do whose pool is gone."""

MERCY = 1.0
"""Seconds from SIGTERM to SIGKILL."""


class Relative(NamedTuple):
    """A living process; numbers of ended ones are used again."""

    pid: int
    born: str
    """When it was started, as the kernel writes it."""


# What /proc tells -------------------------------------------------------------------------------------------------


def relative(pid: int) -> Relative | None:
    """A process by its number; None where it has ended, or waits for its parent to take note of that."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Relative(pid, fields[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before them may hold blanks and brackets."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """The children of a process."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        if not found and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # CONFIG_PROC_CHILDREN
            return [p for p in _processes() if (fields := _stat(p)) is not None and int(fields[1]) == pid]
    except OSError:
        pass
    return found


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def has_children() -> bool:
    """Whether this process has any; one call of the kernel's."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def tag_of(pid: int) -> str:
    """The tag in the environment that a process was started with; empty where there is none, or it is another's."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == TAG.encode():
                return value.decode(errors="replace")
    return ""


def tagged(prefix: str) -> list[Relative]:
    """Every process whose tag begins so, but this one."""
    found = (relative(pid) for pid in _processes() if pid != os.getpid() and tag_of(pid).startswith(prefix))
    return [process for process in found if process is not None]


def command_line(pid: int) -> str:
    """How a process was started, at most 80 characters; its name where that is not told."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        text = words or Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        text = "".join(letter if letter.isprintable() else " " for letter in text)
        return text if len(text) <= 80 else f"{text[:79]}…"
    return "?"


def below(pids: Iterable[int], *, stop: Callable[[Relative], bool] = lambda _: False) -> list[Relative]:
    """These processes and all their descendants, ancestors first; nothing at or below those that `stop` names."""
    found: list[Relative] = []
    left = list(pids)
    while left:
        process = relative(left.pop(0))
        if process is None or process in found or stop(process):
            continue
        found.append(process)
        left += children(process.pid)
    return found


# Ending -----------------------------------------------------------------------------------------------------------


def end_all(processes: Sequence[Relative], mercy: float = MERCY) -> None:
    """End processes: SIGTERM, and for those that take no notice SIGKILL."""
    for number, seconds in ((signal.SIGTERM, mercy), (signal.SIGKILL, mercy)):
        left = [process for process in processes if relative(process.pid) == process]
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)
        wait_for(left, seconds)


def wait_for(processes: Sequence[Relative], seconds: float) -> list[Relative]:
    """Wait until these have ended; those that have not, within that time."""
    until, left = time.monotonic() + seconds, list(processes)
    while left := [process for process in left if relative(process.pid) == process]:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return left


# In the device process --------------------------------------------------------------------------------------------


class Family:
    """What this device process, and its tests, have started."""

    def __init__(self, tag: str, zygote: int) -> None:
        self.tag = tag
        """`RUN:PROCESS`."""
        self.zygote = zygote
        """The process that adopts orphans, or the keeper, which does so as well."""
        self._test = 0
        self.accepted: set[Relative] = set()
        """What belongs to the process and to no test, with all below it."""
        self.accepted.update(self._unknown())
        os.environ[TAG] = f"{tag}:0"

    def begin(self, test: int) -> None:
        """From now on, what is started is this test's."""
        self._test = test
        os.environ[TAG] = f"{self.tag}:{test}"

    @contextlib.contextmanager
    def of_wider_scope(self) -> Iterator[None]:
        """A block in which a fixture is set up that outlives the test: what it starts is not the test's."""
        before, tag = set(self._unknown()), os.environ.get(TAG)
        os.environ[TAG] = f"{self.tag}:0"
        try:
            yield
        finally:
            self.accepted.update(process for process in self._unknown() if process not in before)
            if tag is not None:
                os.environ[TAG] = tag

    def end_test(self) -> list[tuple[int, str]]:
        """End what the test has left running; (number, command) of each, without its own descendants."""
        if not (left := self._roots()):
            return []
        from pytest_cudaenv.grants.holders import held  # not above: the keeper of interpreters imports no pytest

        gc.collect()  # pools end their workers when they are finalised
        left = wait_for(left, PATIENCE)
        theirs = held(process.pid for process in left)
        for process in left:
            whole, _, test = tag_of(process.pid).rpartition(":")
            # A fork that never became another program shows what its parent was started with, which names no test.
            if process.pid in theirs or (whole == self.tag and test not in ("", str(self._test))):
                self.accepted.add(process)
        return self._end([process for process in left if process not in self.accepted])

    def end_process(self) -> list[tuple[int, str]]:
        """Once all fixtures are torn down: end what is left of those that outlived their tests.

        But for the workers of multiprocessing, which ends them itself.
        """
        managed = _managed()
        self.accepted.clear()
        left = [process for process in self._roots() if process.pid not in managed]
        return self._end(wait_for(left, PATIENCE)) if left else []

    def _end(self, processes: list[Relative]) -> list[tuple[int, str]]:
        told = [(process.pid, command_line(process.pid)) for process in processes]
        end_all(below(process.pid for process in processes))
        return told

    def _starts(self) -> list[int]:
        mine = children(os.getpid()) if has_children() else []
        return [*mine, *(pid for pid in children(self.zygote) if pid != os.getpid())]

    def _unknown(self) -> list[Relative]:
        starts = self._starts()
        return below(starts, stop=self.accepted.__contains__) if starts else []

    def _roots(self) -> list[Relative]:
        """What is not accepted, without its descendants; of what Python's helpers have started, each process."""
        found: list[Relative] = []
        left, helpers = self._starts(), _helpers()
        while left:
            pid = left.pop(0)
            if pid in helpers:
                left += children(pid)
            elif (process := relative(pid)) is not None and process not in self.accepted:
                found.append(process)
        return found


def _helpers() -> set[int]:
    """Processes of multiprocessing's own, which live as long as this one: the resource tracker and the fork server.

    https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/resource_tracker.py (ResourceTracker._pid)
    https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/forkserver.py (ForkServer._forkserver_pid)
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {pid for pid in (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)) if pid}


def _managed() -> set[int]:
    """The processes that multiprocessing ends when this one does."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return set()
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}
