"""What starts device processes and knows of their deaths: the zygote, or fresh interpreters in its place."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pytest_cudaenv.grants.remains import Remains
from pytest_cudaenv.grants.transport import Channel, Message


@dataclass
class Child:
    """A device process, as the pytest process sees it."""

    pid: int
    channel: Channel
    remains: Remains = field(default_factory=Remains.make)
    tag: str = ""
    """With which the environments of its subprocesses begin to name it."""
    status: int | None = None
    """As `os.waitpid` gives it; None while the process lives."""
    is_lost: bool = False
    """Ended because the process that had started it did."""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; harmless where the process has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Once the process has ended, and what it left has been read."""
        self.channel.close()
        self.remains.close()


class Source(Protocol):
    """Starts device processes. Death is what the kernel says of a process, never the end of its stream."""

    @property
    def name(self) -> str:
        """What users are told that it is."""
        ...

    @property
    def has_died(self) -> bool:
        """Whether no more processes can be started, and those that were have been lost."""
        ...

    def start(self, order: Message, fds: Sequence[int] = ()) -> Child:
        """A new device process with this order, which is given its remains and these open files too, in this order.

        Raises OSError where there is none.
        """
        ...

    def fileno(self) -> int:
        """Readable when a process has ended."""
        ...

    def note_deaths(self) -> bool:
        """Take in which processes have ended; False where no more will ever be known."""
        ...

    def wait(self, child: Child, seconds: float) -> bool:
        """Wait for a process to end; False where it has not, within that time."""
        ...

    def orphans(self, child: Child) -> list[int]:
        """The processes that one which has ended has left behind, but for their own descendants."""
        ...

    def close(self) -> int | None:
        """End every process that is left; how the source itself ended, as `os.waitpid` gives it, if that is known."""
        ...
