"""Devices, and forked processes that hold leases of them, wait for them, and are killed."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from pytest_cudaenv.grants.holder import Holder
from pytest_cudaenv.grants.lease_table import LeaseTable, LeaseTimeout

GPUS = tuple(f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(4))
A, B, C, D = GPUS
GiB = 1024**3
SIZES = dict.fromkeys(GPUS, 24 * GiB)
Say = Callable[[str], None]

PATIENCE = 60.0
"""Seconds after which a test fails instead of hanging; never a measure of speed."""


class Forked:
    """A forked child that runs `work(say)`; `say` sends the parent a line. Killed with its block."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        self._lines, write = os.pipe()
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._lines)
                work(lambda line: _say(write, line))
                status = 0
            except BaseException as error:
                _say(write, f"{type(error).__name__}: {error}".replace("\n", " "))
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        self.status: int | None = None

    def line(self) -> str:
        """The child's next line; empty at its end."""
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._lines], [], [], deadline - time.monotonic())
            assert ready, "the child said nothing"
            data = os.read(self._lines, 1 << 16)
            if not data:
                return ""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def kill(self, how: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, how)

    def wait(self) -> int:
        """The exit status; negative for a signal."""
        deadline = time.monotonic() + PATIENCE
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                assert time.monotonic() < deadline, "the child did not end"
                time.sleep(0.002)
        return self.status

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is None:
            self.kill()
            self.wait()
        os.close(self._lines)


def _say(descriptor: int, line: str) -> None:
    os.write(descriptor, line.encode() + b"\n")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for as long as PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def forever(*_: object) -> None:
    """Hold whatever is held until killed."""
    while True:
        signal.pause()


def is_free(table: LeaseTable, *uuids: str) -> bool:
    """Whether all these devices could be held whole now."""
    try:
        table.acquire(uuids, len(uuids), timeout=0).release()
    except LeaseTimeout:
        return False
    return True


def holding(table: LeaseTable, *uuids: str) -> Callable[[Say], None]:
    """The work of a child that holds devices until it is killed."""

    def work(say: Say) -> None:
        with table.acquire(uuids, len(uuids)):
            say("held")
            forever()

    return work


def waiting_for(table: LeaseTable, candidates: Sequence[str], count: int) -> Callable[[Say], None]:
    """The work of a child that says that it waits, and then what it was given."""

    def work(say: Say) -> None:
        told: list[float] = []

        def waits(seconds: float, holders: Sequence[Holder]) -> None:
            if not told:
                say("waits")
            told.append(seconds)

        with table.acquire(candidates, count, waiting=waits) as lease:
            say(" ".join(lease.uuids))
            forever()

    return work
