"""Fresh interpreters as device processes, for a pytest process that cannot be forked any more.

Each starts with its mask set, so nothing that the suite does at import can spoil it, and pays for all imports again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from pytest_cudaenv.grants.family import tagged
from pytest_cudaenv.grants.source import Child
from pytest_cudaenv.grants.transport import Message, channels

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pytest_cudaenv.interpreter import main; main(*map(int, sys.argv[2:]))"
)
"""The program of a fresh interpreter: with the import path of the pytest process, so that it finds the same."""


class Interpreters:
    """The pytest process's end; a `Source` of device processes."""

    has_died = False

    def __init__(self, environ: Mapping[str, str], directory: str) -> None:
        self.environ = dict(environ)
        """As it was when collection ended; an order's own variables come on top."""
        self.directory = directory
        self._ended = select.epoll()
        self._children: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}
        """By pidfd."""

    def start(self, order: Message, fds: Sequence[int] = ()) -> Child:
        """A new interpreter, which is sent this order. Raises OSError where none can be started."""
        ours, theirs = channels()
        child = Child(0, ours)
        fds = (*child.remains.filenos(), *fds)
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path), str(os.getpid()), str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                [*command, *map(str, fds)],
                env={**self.environ, **order["environ"]},
                cwd=self.directory,
                pass_fds=(theirs.fileno(), *fds),
            )
        except OSError:
            child.close()
            raise
        finally:
            theirs.close()
        child.pid = process.pid
        pidfd = os.pidfd_open(process.pid)
        self._children[pidfd] = (child, process)
        self._ended.register(pidfd, select.EPOLLIN)
        with contextlib.suppress(OSError):  # it has ended already, which is told as every death is
            ours.send(order)
        return child

    def fileno(self) -> int:
        """For selectors."""
        return self._ended.fileno()

    def note_deaths(self) -> bool:
        """Take in which interpreters have ended."""
        self._note(0)
        return True

    def _note(self, seconds: float) -> None:
        for pidfd, _ in self._ended.poll(seconds):
            child, process = self._children.pop(pidfd)
            self._ended.unregister(pidfd)
            os.close(pidfd)
            code = process.wait()
            child.status = -code if code < 0 else code << 8

    def wait(self, child: Child, seconds: float) -> bool:
        """Wait for an interpreter to end; False where it has not, within that time."""
        deadline = time.monotonic() + seconds
        while child.status is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._note(left)
        return True

    def orphans(self, child: Child) -> list[int]:
        """What begins with the interpreter's tag, as a child that never became another program does, too."""
        return [process.pid for process in tagged(f"{child.tag}:")]

    def close(self) -> None:
        """Kill the interpreters that are left."""
        for child, _ in tuple(self._children.values()):
            child.kill(signal.SIGKILL)
            self.wait(child, 10.0)
        self._ended.close()
