"""The zygote: a copy of the pytest process, taken right after collection, from which device processes are forked.

It never runs a test. So neither CUDA nor OpenMP state of the pytest process reaches a device process, and an import
is paid for once. It ends with the pytest process, and with it all that it forked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pytest_cudaenv.grants.family import children, relative, tagged
from pytest_cudaenv.grants.process import adopt_orphans, die_with_parent, forget_inherited, fork, pause_openmp
from pytest_cudaenv.grants.source import Child
from pytest_cudaenv.grants.transport import Channel, Message, channels

Serve = Callable[[Channel, Message, Sequence[int]], None]
"""What a device process does with its channel, the order that started it and the open files that came with it."""

LAST = 5.0
"""Seconds that the zygote outlives the pytest process, to end all that has come from it."""

MOST_FILES = 250
"""Open files that one message can carry (SCM_MAX_FD is 253)."""


@dataclass
class Zygote:
    """The pytest process's end; a `Source` of device processes."""

    name: ClassVar[str] = "zygote"
    pid: int
    channel: Channel
    children: dict[int, Child] = field(default_factory=dict)
    has_died: bool = False

    @classmethod
    def fork(cls, serve: Serve, prepare: Callable[[], None]) -> Zygote:
        """Fork the zygote. `prepare` runs in it once; `serve` runs in each device process."""
        gc.collect()  # cycles of collection must not be finalised once in each process
        pause_openmp()
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = channels()
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            ours.close()
            try:
                forget_inherited()
                prepare()
                Server(theirs, serve, parent).run()
            finally:
                os._exit(0)
        theirs.close()
        return cls(pid, ours)

    def start(self, order: Message, fds: Sequence[int] = ()) -> Child:
        """A new device process, which `serve`s this order. Raises OSError where the zygote has died."""
        ours, theirs = channels()
        child = Child(0, ours)
        try:
            with contextlib.suppress(OSError):
                self.channel.send({"fork": order}, fds=(theirs.fileno(), *child.remains.filenos(), *fds))
            while (message := self.channel.receive()) is not None:
                if "forked" in message:
                    child.pid = message["forked"]
                    self.children[child.pid] = child
                    return child
                if "refused" in message:
                    raise OSError(message["refused"])
                self._note(message)
            self._lose_children()
            raise OSError(f"the {self.name} has died")
        except OSError:
            child.close()
            raise
        finally:
            theirs.close()

    def fileno(self) -> int:
        """For selectors: the zygote tells of deaths, and its own end is the end of the stream."""
        return self.channel.fileno()

    def note_deaths(self) -> bool:
        """Take in what the zygote has said of ended processes; False where it has died itself."""
        alive = self.channel.fill()
        while (message := self.channel.pending()) is not None:
            self._note(message)
        if not alive:
            self._lose_children()
        return alive

    def _lose_children(self) -> None:
        """The zygote has died: the kernel kills what it had forked, of which nothing will be told any more."""
        self.has_died = True
        while self.children:
            _, child = self.children.popitem()
            child.kill()
            child.status, child.is_lost = signal.SIGKILL, True

    def _note(self, message: Message) -> None:
        if "ended" in message and (child := self.children.pop(message["ended"], None)) is not None:
            child.status = message["status"]

    def wait(self, child: Child, seconds: float) -> bool:
        """Wait for a process to end; False where it has not, within that time."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while child.status is None:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return False
                if not self.note_deaths():
                    break  # it died with the zygote
        return True

    def orphans(self, child: Child) -> list[int]:
        """What the zygote has adopted; what begins with the process's tag, where nobody has, as the zygote has died."""
        if self.has_died or relative(self.pid) is None:  # which the stream does not tell before it is read
            return [process.pid for process in tagged(f"{child.tag}:")]
        return [pid for pid in children(self.pid) if pid not in self.children]

    def close(self) -> int | None:
        """End the zygote, and every process that it forked; its own status."""
        self.channel.close()
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, 0)[1]
        return None


class Server:
    """The zygote's own loop: forks on order, and tells of each process that ended."""

    def __init__(self, channel: Channel, serve: Serve, parent: int) -> None:
        self.channel = channel
        self.serve = serve
        # A closed channel does not tell of the parent's death: processes that it forked may hold the other end.
        self.parent = os.pidfd_open(parent)
        self.children: set[int] = set()

    def run(self) -> None:
        gc.freeze()
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the processes that run tests
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ, "order")
            selector.register(wake, selectors.EVENT_READ, "child")
            selector.register(self.parent, selectors.EVENT_READ, "parent")
            while True:
                for key, _ in selector.select():
                    if key.data == "child":
                        with contextlib.suppress(BlockingIOError):
                            wake.recv(4096)
                    elif key.data == "parent" or not self._order((wake, woken)):
                        self._end()
                        return
                self._reap()

    def _order(self, private: tuple[socket.socket, ...]) -> bool:
        message, fds = self.channel.receive_with_fds(MOST_FILES)
        if message is None:
            return False
        parent = os.getpid()
        try:
            pid = fork()
        except OSError as error:  # memory or process numbers are short, for now
            for fd in fds:
                os.close(fd)
            self.channel.send({"refused": str(error)})
            return True
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            self.channel.close()
            os.close(self.parent)
            for end in private:
                end.close()
            die_with_parent(parent)
            self.serve(Channel(socket.socket(fileno=fds[0])), message["fork"], fds[1:])
            os._exit(0)
        self.children.add(pid)
        for fd in fds:
            os.close(fd)
        self.channel.send({"forked": pid})
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                self.children.discard(pid)
                with contextlib.suppress(OSError):
                    self.channel.send({"ended": pid, "status": status})

    def _end(self) -> None:
        """Kill every process, and those that come here as their parents end."""
        until = time.monotonic() + LAST
        while (left := children(os.getpid())) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)
