"""What a device process leaves behind when it dies: files in memory that the pytest process holds as well.

Where Python was, which `faulthandler` writes even from inside a driver call, and what was printed and not yet reported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence

TELL = signal.SIGRTMAX - 5
"""The signal on which a device process writes its stacks; one that no suite uses for itself."""

MOST = 1 << 16
"""Bytes of each file that are read; the last ones."""

_RUNNER = re.compile(
    r"/(_pytest|pluggy|pytest|pytest_cudaenv|xdist|execnet)/|/(runpy|threading)\.py|\"<(frozen|string)"
)
"""In the lines of frames that lead to a test, and are not of it."""

KINDS = ("stacks", "out", "err")


class Remains:
    """The files of one device process, by what they hold; one end for both processes."""

    def __init__(self, files: Sequence[int]) -> None:
        self.files = dict(zip(KINDS, files, strict=True))

    @classmethod
    def make(cls) -> Remains:
        """Empty files, to be handed on to the process."""
        return cls([_empty_file() for _ in KINDS])

    @classmethod
    def adopt(cls, files: Sequence[int]) -> tuple[Remains, Sequence[int]]:
        """In the device process: its own, which come first among the open files that it was given, and the others."""
        return cls(files[: len(KINDS)]), files[len(KINDS) :]

    def filenos(self) -> tuple[int, ...]:
        return tuple(self.files.values())

    # In the device process -------------------------------------------------------------------------------------

    def record_stacks(self, *, on_crash: bool) -> None:
        """From now on, have faulthandler write stacks here: when the pytest process asks, and on a crash."""
        stacks = self.files["stacks"]
        faulthandler.register(TELL, file=stacks, all_threads=True, chain=False)
        if on_crash:
            faulthandler.enable(file=stacks, all_threads=True)

    def write_stacks(self, heading: str) -> None:
        """Write them now, below a heading of one line."""
        os.write(self.files["stacks"], f"{heading}\n\n".encode())
        faulthandler.dump_traceback(file=self.files["stacks"], all_threads=True)

    # In the pytest process -------------------------------------------------------------------------------------

    def read(self, kind: str) -> str:
        """What has been written."""
        file = self.files[kind]
        with contextlib.suppress(OSError):
            size = os.fstat(file).st_size
            if size:
                return os.pread(file, MOST, max(0, size - MOST)).decode(errors="replace")
        return ""

    def forget_stacks(self) -> None:
        """Forget those of earlier tests, as processes that a test forked write theirs here too."""
        os.ftruncate(self.files["stacks"], 0)

    def look_at(self, pid: int, descriptors: Mapping[str, int]) -> None:
        """Where the process captures its output into files of its own: read those, which are its descriptors."""
        for kind, descriptor in descriptors.items():
            with contextlib.suppress(OSError):
                file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
                os.close(self.files[kind])
                self.files[kind] = file

    def wait_for_stacks(self, seconds: float) -> None:
        """Wait until they have been written, which they are not by a process that takes no signals."""
        until, before = time.monotonic() + seconds, -1
        while time.monotonic() < until:
            size = os.fstat(self.files["stacks"]).st_size
            if size and size == before:
                return
            before = size
            time.sleep(0.05)

    def close(self) -> None:
        """Harmless where they have been closed before."""
        files, self.files = self.files, dict.fromkeys(KINDS, -1)
        for file in files.values():
            if file >= 0:
                os.close(file)


def stacks_as_shown(text: str) -> str:
    """Stacks without what is the same in all of them: the frames of pytest, and faulthandler's list of all modules."""
    return "\n\n".join(filter(None, map(_one_stack, text.strip().split("\n\n"))))


def _one_stack(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
    frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return "\n".join(lines)
    last = next((place for place in reversed(frames) if not _RUNNER.search(lines[place])), frames[-1])
    return "\n".join(lines[: last + 1])


def _empty_file() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("cudaenv", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = fcntl.fcntl(temporary, fcntl.F_DUPFD_CLOEXEC, 3)
    # Both processes write and truncate: each write goes to what is the end then.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
