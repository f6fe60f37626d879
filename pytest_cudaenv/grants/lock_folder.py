"""The folder of lock files: opened with suspicion, locked by the kernel, closed in forked children."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pytest_cudaenv.grants.holder import parsed

SHARED_DIRECTORY = Path("/tmp/pytest-cudaenv-leases")
"""Fixed, and not below TMPDIR: that differs between the users, jobs and runs that must see each other's locks."""

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


class LeaseError(RuntimeError):
    """The lock folder cannot be used; the message names the path, its owner and the remedy."""

    code = "device-busy"
    """The stable code of the test's error."""


def lease_directory(chosen: str | None) -> Path:
    """The folder of the lock files: the one that the run was told, or one that all users of the host share.

    Containers, and services with a `/tmp` of their own, share locks only where they share this folder.
    """
    return Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else SHARED_DIRECTORY


forking = threading.RLock()
# Forks happen anywhere, so what a child must close is known to the process: descriptors that carry locks.
_open_files: set[LockFile] = set()


class LockFile:
    """An open lock file: close-on-exec, and closed in forked children unless `kept`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.stays = False
        """Outlives the look that opened it."""
        self.kept = False
        """Forked children keep it too."""
        _open_files.add(self)

    def lock(self, how: int) -> bool:
        """Lock without waiting. There is no unlocking, which would undo the lock in every copy: only `close`."""
        try:
            fcntl.flock(self.descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, said: Mapping[str, Any]) -> None:
        """Replace the first line, in one write and without truncating."""
        os.pwrite(self.descriptor, json.dumps(said).encode() + b"\n", 0)

    def read(self) -> dict[str, Any]:
        return parsed(os.pread(self.descriptor, 1 << 16, 0))

    def close(self) -> None:
        """Give up this copy of the descriptor; the lock goes with the last one."""
        with forking:
            descriptor, self.descriptor = self.descriptor, -1
            _open_files.discard(self)
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)


def _close_in_child() -> None:
    for file in tuple(_open_files):
        if file.kept:
            file.kept = False  # for this child, not for its children
        else:
            file.close()
    forking.release()


# No fork falls between opening a file and noting it. Forks that bypass Python (in C code) keep the locks they copy.
os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_close_in_child)


class LockFolder:
    """The folder of lock files, open for one look. Nothing in it is ever followed, truncated or removed.

    Files that the look opened are closed with it unless they `stay`, also when an exception (Ctrl-C) ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self._opened: list[LockFile] = []

    def __enter__(self) -> LockFolder:
        # Opened anew for every look: a folder that a cleaner removed and somebody made again is a new one.
        with refused(self.path):
            parent = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _check_trust(self.path.parent, os.fstat(parent))
                self.descriptor = _opened_folder(self.path, parent)
            finally:
                os.close(parent)
        return self

    def __exit__(self, *_: object) -> None:
        for file in reversed(self._opened):  # the gate last
            if not file.stays:
                file.close()
        os.close(self.descriptor)

    def names(self, prefix: str) -> list[str]:
        """The files whose name starts so."""
        return [name for name in os.listdir(self.descriptor) if name.startswith(prefix)]

    def open(self, name: str) -> LockFile:
        """A lock file, made where there is none: for everybody to write, whatever the umask."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        path = self.path / name
        for attempt in range(100):
            with refused(path), forking:
                try:
                    # Without O_CREAT, which fs.protected_regular refuses on another user's file.
                    self._opened.append(LockFile(os.open(name, flags, dir_fd=self.descriptor)))
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        os.close(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self.descriptor))
                    continue
                except PermissionError:
                    if attempt >= 50 or not self._being_made(name):
                        raise
                    time.sleep(0.01)
                    continue
            file = self._opened[-1]
            with refused(path):
                if _prepared(path, file):
                    return file
            file.close()
        raise LeaseError(f"{path} is removed again and again; keep cleaners away from {self.path}")

    def locked(self, name: str, how: int) -> LockFile | None:
        """A lock file, locked; None where somebody else holds it."""
        while True:
            file = self.open(name)
            with refused(self.path / name):
                if not file.lock(how):
                    file.close()
                    return None
                # A cleaner may have removed it meanwhile: then the lock is on a file that nobody else will open.
                with suppress(FileNotFoundError):
                    there = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                    if os.path.samestat(there, os.fstat(file.descriptor)):
                        return file
            file.close()

    def _being_made(self, name: str) -> bool:
        """Whether another user has made the file just now, and not yet opened it to everybody."""
        with suppress(FileNotFoundError):
            return abs(time.time() - os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_ctime) < 2
        return True


def _opened_folder(path: Path, parent: int) -> int:
    """A descriptor of the folder, made where there is none: for every user, each of whom may remove only their own."""
    made = False
    for attempt in range(100):
        try:
            folder = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o1777, dir_fd=parent)
                made = True
            continue
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP, errno.EACCES}:
                raise
            found = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
            if error.errno == errno.EACCES and attempt < 50 and abs(time.time() - found.st_ctime) < 2:
                time.sleep(0.01)  # Another user has made it just now, and not yet opened it to everybody.
                continue
            if error.errno == errno.EACCES:
                raise
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
            raise _refusal(path, found, f"is {kind}", "remove it") from None
        try:
            found = os.fstat(folder)
            # A process may have been killed here after making the folder; one that the user chose is left as it is.
            if found.st_uid == os.geteuid() and (made or path == SHARED_DIRECTORY):
                os.fchmod(folder, 0o1777)
                found = os.fstat(folder)
            _check_trust(path, found)
        except BaseException:
            os.close(folder)
            raise
        return folder
    raise LeaseError(f"{path} is removed again and again; keep cleaners away from it")


def _check_trust(path: Path, found: os.stat_result) -> None:
    """Refuse a folder whose entries somebody could swap: only root, ourselves, or in one that all share as `/tmp`.

    The owner of a shared folder is believed: it would otherwise serve nobody but the user who came first, and the
    locks bind only those who want to be bound.
    """
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o1777 == 0o1777:
        return
    if found.st_uid not in {0, os.geteuid()}:
        raise _refusal(path, found, f"(mode {mode:04o}) is another user's", "have them run chmod 1777 on it")
    if mode & stat.S_IWOTH:
        raise _refusal(path, found, f"(mode {mode:04o}) lets every user swap its files", "run chmod +t on it")


def _prepared(path: Path, file: LockFile) -> bool:
    """Whether an opened lock file is one that is still there, after opening it to everybody.

    Raises LeaseError for what is no plain file with one name.
    """
    found = os.fstat(file.descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, found, "is not a plain file", "remove it")
    if found.st_nlink > 1:
        raise _refusal(path, found, "has a second name (a hard link)", "remove it")
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o666:
        os.fchmod(file.descriptor, 0o666)
    return found.st_nlink == 1


def _refusal(path: Path, found: os.stat_result, why: str, remedy: str) -> LeaseError:
    import pwd

    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = "unknown"
    return LeaseError(
        f"device leases: {path} {why} (owner: {owner}, uid {found.st_uid}); {remedy}, or name another folder with "
        f"--cuda-lease-dir, the same for everybody who uses the devices of this host"
    )


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """What the system refuses about `path`, as a LeaseError that says what to do."""
    try:
        yield
    except OSError as error:
        nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if error.errno == errno.ELOOP:
            raise _refusal(nearest, os.lstat(nearest), "is a symbolic link", "remove it") from None
        beyond = "" if nearest == path else f" (for {path.relative_to(nearest)} in it)"
        remedy = _REMEDIES.get(error.errno or 0, "make it writable")
        raise _refusal(nearest, os.lstat(nearest), f"cannot be used{beyond}: {error.strerror}", remedy) from error


_REMEDIES = {
    errno.EACCES: "have its owner open it to you",
    errno.ENOENT: "make the folders above it",
    errno.ENOSPC: "free some space",
    errno.ENOLCK: "put it on a file system with flock",
    errno.EOPNOTSUPP: "put it on a file system with flock",
}
