"""Fresh interpreters as device processes, for a pytest process that cannot be forked any more.

Each starts with its mask set, so nothing that the suite does at import can spoil it, and pays for all imports again.
They come from a keeper: a small process that imports nothing of the suite's, and ends with the pytest process and with
all that has come from it, as a zygote does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from pytest_cudaenv.grants.source import Child
from pytest_cudaenv.grants.transport import Channel, Message, channels
from pytest_cudaenv.grants.zygote import Server, Zygote

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {0} import {1}; {1}(*map(int, sys.argv[2:]))"
"""The program of a new process: with the import path of the pytest process, so that it finds the same."""

KEEPER = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + BOOT.format(__name__, "keep")

INTERPRETER = BOOT.format("pytest_cudaenv.interpreter", "main")


class Interpreters:
    """The pytest process's end; a `Source` of device processes."""

    name = "keeper of fresh interpreters"

    def __init__(self, environ: Mapping[str, str], directory: str) -> None:
        self.environ = dict(environ)
        """As it was when collection ended; an order's own variables come on top."""
        self.directory = directory
        self._keeper: _Keeper | None = None
        """Started with the first interpreter, whose test is the one to fail where that is impossible."""

    @property
    def has_died(self) -> bool:
        """Whether the keeper has, and with it all interpreters."""
        return self._keeper is not None and self._keeper.has_died

    @property
    def keeper(self) -> _Keeper:
        """Which is started if need be. Raises OSError."""
        if self._keeper is None:
            self._keeper = _Keeper.start_one(self.environ, self.directory)
        return self._keeper

    def start(self, order: Message, fds: Sequence[int] = ()) -> Child:
        """A new interpreter, which is sent this order. Raises OSError where none can be started."""
        child = self.keeper.start({"environ": order["environ"]}, fds)
        with contextlib.suppress(OSError):  # it has ended already, which is told as every death is
            child.channel.send(order)
        return child

    def fileno(self) -> int:
        """For selectors."""
        return self.keeper.fileno()

    def note_deaths(self) -> bool:
        """Take in which interpreters have ended; False where the keeper has."""
        return self.keeper.note_deaths()

    def wait(self, child: Child, seconds: float) -> bool:
        """Wait for an interpreter to end; False where it has not, within that time."""
        return self.keeper.wait(child, seconds)

    def orphans(self, child: Child) -> list[int]:
        """What the keeper has adopted; what begins with the interpreter's tag, where the keeper has died."""
        return self.keeper.orphans(child)

    def close(self) -> int | None:
        """End the keeper, and all that has come from it."""
        return None if self._keeper is None else self._keeper.close()


class _Keeper(Zygote):
    """A zygote that has imported nothing of the suite's, and each fork of which becomes a fresh interpreter."""

    name: ClassVar[str] = Interpreters.name
    process: subprocess.Popen[bytes]

    @classmethod
    def start_one(cls, environ: Mapping[str, str], directory: str) -> _Keeper:
        """A new one. Raises OSError."""
        ours, theirs = channels()
        # Without the site module, whose .pth files may begin to measure coverage, or whatever else.
        command = [sys.executable, "-S", "-c", KEEPER, json.dumps(sys.path), str(os.getpid()), str(theirs.fileno())]
        try:
            process = subprocess.Popen(command, env=environ, cwd=directory, pass_fds=(theirs.fileno(),))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        keeper = cls(process.pid, ours)
        keeper.process = process
        return keeper

    def close(self) -> int:
        """End the keeper, and every interpreter that it started; its own status."""
        self.channel.close()
        code = self.process.wait()
        return -code if code < 0 else code << 8


# In the keeper ----------------------------------------------------------------------------------------------------


def keep(parent: int, channel: int) -> NoReturn:
    """Be the keeper of the pytest process `parent`."""
    os.set_inheritable(channel, False)
    try:
        Server(Channel(socket.socket(fileno=channel)), _become_interpreter, parent).run()
    finally:
        os._exit(0)


def _become_interpreter(channel: Channel, order: Message, fds: Sequence[int]) -> NoReturn:
    """In a fork of the keeper."""
    files = (channel.fileno(), *fds)
    for file in files:
        os.set_inheritable(file, True)
    arguments = [sys.argv[1], str(os.getppid()), *map(str, files)]
    try:
        os.execve(sys.executable, [sys.executable, "-c", INTERPRETER, *arguments], {**os.environ, **order["environ"]})
    except OSError as error:
        os.write(2, f"{sys.executable}: {error}\n".encode())
    os._exit(127)
