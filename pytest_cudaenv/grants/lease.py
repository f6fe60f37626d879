"""A lease: devices that are held for a test, as descriptors that carry kernel locks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pytest_cudaenv.grants.lock_folder import LockFile, forking


class Lease:
    """Devices held by this process and by everybody to whom `filenos` were passed.

    One that is forgotten is held until the process ends: a device must not become free while it is used. A forked
    child has no part in it (`kept` apart), and neither has a program that is started.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        files: Sequence[LockFile] = (),
        records: Sequence[tuple[LockFile, dict[str, Any]]] = (),
    ) -> None:
        self.uuids = tuple(uuids)
        """The devices, in the order of preference of who asked; those that were inherited come first."""
        self._files = tuple(files)
        self._records = tuple(records)

    @classmethod
    def adopt(cls, descriptors: Sequence[int], uuids: Sequence[str]) -> Lease:
        """The lease whose `filenos` and `uuids` another process sent; this process then holds it too.

        Receive them with `socket.recv_fds(..., flags=socket.MSG_CMSG_CLOEXEC)`. They belong to the lease from here.
        """
        with forking:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            return cls(uuids, [LockFile(descriptor) for descriptor in descriptors])

    def filenos(self) -> tuple[int, ...]:
        """The descriptors that carry the locks: for `socket.send_fds`, or `pass_fds` of a subprocess."""
        return tuple(file.descriptor for file in self._files if file.descriptor >= 0)

    def note(self, test: str, pid: int | None = None) -> None:
        """Say for which test the devices are held now, and in which process (default: this one).

        Only where the lease was acquired; does nothing in who adopted it.
        """
        for file, said in self._records:
            said.update(test=test, pid=os.getpid() if pid is None else pid)
            if file.descriptor >= 0:
                with suppress(OSError):
                    file.write(said)

    def release(self) -> None:
        """Give up this process's part; the devices are free when the last holder has. Again is harmless."""
        for file in self._files:
            file.close()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Children that are forked inside the block (by any thread) hold the lease too."""
        for file in self._files:
            file.kept = True
        try:
            yield
        finally:
            for file in self._files:
                file.kept = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({', '.join(self.uuids)})"
