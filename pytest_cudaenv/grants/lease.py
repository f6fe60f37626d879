"""Leases: which devices of this host are in use, as kernel locks that end with the processes that hold them.

Every run, worker and user of a host shares one folder of lock files. `flock` on a descriptor of our own is the
truth about who holds what: a lock lives until the last copy of its descriptor is closed, also by `kill -9`, and a
process id is never asked for. What stands *inside* a file only names holders and orders those who wait.

    gate               held for about a millisecond while a process looks at all the others and takes what it may
    device.<uuid>      exclusive: held whole; shared: held by processes that each declared a memory budget
    share.<uuid>.<n>   exclusive: one sharer of that device, its budget inside
    queue.<n>          exclusive: one request that waits; its turn and what it asks for inside

Devices are taken all or none, in one look, and nobody holds a device while waiting for another, so there is no
deadlock. Who may take them is the pure function `decide`: a request takes free devices past those that wait longer
unless they need the same ones. An unreadable file can cost a request its turn, never a device its holder.

The locks bind those who use them: any user can lock a file of a shared folder, or use a GPU without asking.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudaenv.grants.grant import INHERITED_VARIABLE

DIRECTORY_VARIABLE = "CUDAENV_LEASE_DIR"

SHARED_DIRECTORY = Path("/tmp/pytest-cudaenv-leases")
"""Fixed, and not below TMPDIR: that differs between the users, jobs and runs that must see each other's locks."""

LONGEST_PAUSE = 0.05
"""Seconds between two looks of a request that waits, at most."""
GATE_PATIENCE = 1.0
"""Seconds after which a gate that stays shut is taken for one whose holder is stopped."""
STALE_AFTER = 5.0
"""Seconds without a look after which a waiting request (stopped, in a debugger) reserves nothing until it looks."""
SHARERS = 64
"""Budgets that one device can be divided into."""
WAITERS = 1024
"""Requests that can queue; further ones wait without a turn."""

_SHARED, _EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


class LeaseError(RuntimeError):
    """The lock folder cannot be used; the message names the path, its owner and the remedy."""


class LeaseTimeout(LeaseError):
    """Devices that others hold did not become free in time; the message names the holders."""

    def __init__(self, message: str, holders: Sequence[Holder] = ()) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


def lease_directory(explicit: str | None, environ: Mapping[str, str]) -> Path:
    """The folder of the lock files: as given, or CUDAENV_LEASE_DIR, or one that all users of the host share.

    Containers, and services with a `/tmp` of their own, share locks only where they share this folder.
    """
    chosen = explicit or environ.get(DIRECTORY_VARIABLE, "").strip()
    return Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else SHARED_DIRECTORY


def inherited(environ: Mapping[str, str]) -> frozenset[str]:
    """UUIDs in CUDAENV_LEASE: devices that a surrounding test holds, and that its child processes use under it."""
    return frozenset(filter(None, (uuid.strip() for uuid in environ.get(INHERITED_VARIABLE, "").split(","))))


# Who may take what: pure functions of what is held and of who waits.

Held = Mapping[str, Sequence[int | None]]
"""UUID -> what its holders took of it: bytes of a budget each, or one None for a device that is held whole."""


@dataclass(frozen=True)
class Demand:
    """`count` of these devices, whole or with a memory budget on each."""

    candidates: tuple[str, ...]
    """UUIDs, the preferred ones first."""
    count: int
    memory: int | None = None
    """Bytes on each device; None takes them whole."""
    total: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each device has. One that is not listed is unknown, and taken whole."""

    def budget(self, uuid: str) -> int | None:
        """What this takes of a device: bytes, or None for all of it (also where the budget is all it has)."""
        total = self.total.get(uuid)
        return None if self.memory is None or total is None or self.memory >= total else self.memory

    def fits(self, uuid: str, held: Held) -> bool:
        """Whether the device can be taken beside what is held of it."""
        budget, budgets = self.budget(uuid), held.get(uuid, ())
        if budget is None or not budgets:
            return not budgets
        taken = sum(b if b is not None else self.total[uuid] for b in budgets)
        return taken + budget <= self.total[uuid] and len(budgets) < SHARERS

    def fitting(self, held: Held) -> tuple[str, ...]:
        """The first `count` devices that can be taken; fewer where there are not enough."""
        return tuple([uuid for uuid in self.candidates if self.fits(uuid, held)][: self.count])

    def reserves(self, held: Held) -> tuple[str, ...]:
        """The devices that are kept for this while it waits: those that fit, then those with the fewest holders.

        A device that fits stays so, as it is kept, and no holder joins the others: so the first in the queue is
        served once some holders end, and everybody becomes the first.
        """
        fitting = self.fitting(held)
        others = [uuid for uuid in self.candidates if uuid not in fitting]
        others.sort(key=lambda uuid: len(held.get(uuid, ())))
        return (*fitting, *others[: self.count - len(fitting)])


def decide(demand: Demand, ahead: Sequence[Demand], held: Held) -> tuple[str, ...] | None:
    """The devices that a request takes now, in its order of preference; None: it waits.

    It may take what those `ahead`, the longest waiting first, have no use for: it never delays them.
    """
    kept = {uuid: list(budgets) for uuid, budgets in held.items()}
    for earlier in ahead:
        for uuid in earlier.reserves(kept):
            kept.setdefault(uuid, []).append(earlier.budget(uuid))
    fitting = demand.fitting(kept)
    return fitting if len(fitting) == demand.count else None


def waits_for_others(demand: Demand, ahead: Sequence[Demand], held: Held) -> bool:
    """Whether other runs keep a request waiting, given what they alone hold and which of them wait ahead.

    False where one's own run holds enough: then the request is served when its own tests end. Those ahead who
    would be served then are waiting for one's own run too, and are not to blame.
    """
    stuck = [earlier for earlier in ahead if decide(earlier, (), held) is None]
    return decide(demand, stuck, held) is None


# What stands in the files: to be read, cut and doubted.


@dataclass(frozen=True)
class Holder:
    """Who holds a device, or waits for it, as they say themselves; unknown where the file is unreadable."""

    uuid: str
    """The device; empty for the gate, and for one who waits."""
    pid: int | None = None
    run: str = ""
    test: str = ""
    since: float | None = None
    """Seconds since the epoch."""
    memory: int | None = None
    """Bytes of a sharer's budget; None: the whole device, or unknown."""
    waiting: bool = False
    """Waits ahead of the request that was told about it."""

    def __str__(self) -> str:
        what = "waits longer" if self.waiting else self.uuid or "gate"
        who = f"pid {self.pid}" if self.pid is not None else "unknown process"
        run = f" of run {self.run}" if self.run else ""
        test = f", test {self.test}" if self.test else ""
        when = ""
        if self.since is not None:
            when = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        return f"{what}: {who}{run}{test}{when}"


@dataclass(frozen=True)
class _Waiting:
    """An entry of the queue."""

    turn: int
    demand: Demand
    holder: Holder


def _parsed(data: bytes) -> dict[str, Any]:
    """The first line of a file as a JSON object; empty for anything else."""
    try:
        found = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object, least: int = 0) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and least <= value < 2**63 else None  # type: ignore[return-value, operator]


def _seconds(value: object) -> float | None:
    is_time = isinstance(value, (int, float)) and 0 <= value < 2**36  # refuses NaN and the infinities too
    return float(value) if is_time else None  # type: ignore[arg-type]


def _text(value: object) -> str:
    """A text that another user wrote, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in value[:300]) if isinstance(value, str) else ""


def _holder(uuid: str, said: Mapping[str, Any], *, waiting: bool = False) -> Holder:
    return Holder(
        uuid,
        pid=_number(said.get("pid"), 1),
        run=_text(said.get("run")),
        test=_text(said.get("test")),
        since=_seconds(said.get("since")),
        memory=_number(said.get("memory"), 1),
        waiting=waiting,
    )


def _waiting(said: Mapping[str, Any], now: float) -> _Waiting | None:
    """An entry of the queue; None where it is unreadable or its owner has stopped looking."""
    turn, count = _number(said.get("turn")), _number(said.get("count"), 1)
    looked, pairs = _seconds(said.get("looked")), said.get("of")
    if turn is None or count is None or looked is None or not isinstance(pairs, dict) or count > len(pairs):
        return None
    if abs(now - looked) > STALE_AFTER:
        return None
    total = {uuid: t for uuid, t in pairs.items() if _number(t, 1) is not None}
    demand = Demand(tuple(pairs), count, _number(said.get("memory"), 1), total)
    return _Waiting(turn, demand, _holder("", said, waiting=True))


# Files, their locks, and what a fork does to them.

_forking = threading.RLock()
# Forks happen anywhere, so what a child must close is known to the process: descriptors that carry locks.
_open_files: set[_File] = set()


class _File:
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
        return _parsed(os.pread(self.descriptor, 1 << 16, 0))

    def close(self) -> None:
        """Give up this copy of the descriptor; the lock goes with the last one."""
        with _forking:
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
    _forking.release()


# No fork falls between opening a file and noting it. Forks that bypass Python (in C code) keep the locks they copy.
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


class _Folder:
    """The folder of lock files, open for one look. Nothing in it is ever followed, truncated or removed.

    Files that the look opened are closed with it unless they `stay`, also when an exception (Ctrl-C) ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self._opened: list[_File] = []

    def __enter__(self) -> _Folder:
        # Opened anew for every look: a folder that a cleaner removed and somebody made again is a new one.
        with _refused(self.path):
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

    def open(self, name: str) -> _File:
        """A lock file, made where there is none: for everybody to write, whatever the umask."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        path = self.path / name
        for attempt in range(100):
            with _refused(path), _forking:
                try:
                    # Without O_CREAT, which fs.protected_regular refuses on another user's file.
                    self._opened.append(_File(os.open(name, flags, dir_fd=self.descriptor)))
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
            with _refused(path):
                if _prepared(path, file):
                    return file
            file.close()
        raise LeaseError(f"{path} is removed again and again; keep cleaners away from {self.path}")

    def locked(self, name: str, how: int) -> _File | None:
        """A lock file, locked; None where somebody else holds it."""
        while True:
            file = self.open(name)
            with _refused(self.path / name):
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


def _prepared(path: Path, file: _File) -> bool:
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
        f"{DIRECTORY_VARIABLE}, the same for everybody who uses the devices of this host"
    )


@contextmanager
def _refused(path: Path) -> Iterator[None]:
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


# The lease, and the table that gives it.


class Lease:
    """Devices held by this process and by everybody to whom `filenos` were passed.

    One that is forgotten is held until the process ends: a device must not become free while it is used. A forked
    child has no part in it (`kept` apart), and neither has a program that is started.
    """

    def __init__(
        self, uuids: Sequence[str], files: Sequence[_File] = (), records: Sequence[tuple[_File, dict[str, Any]]] = ()
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
        with _forking:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            return cls(uuids, [_File(descriptor) for descriptor in descriptors])

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


@dataclass
class _Request:
    """A demand while it is being met."""

    demand: Demand
    test: str
    since: float
    place: _File | None = None
    """Its entry in the queue, once it waits."""
    turn: int = 0


@dataclass(frozen=True)
class _Look:
    """What a request found behind the gate."""

    lease: Lease | None = None
    blockers: tuple[Holder, ...] = ()
    for_others: bool = False
    """Whether other runs keep it waiting."""


class LeaseTable:
    """The leases of this host, as the lock files of one folder tell them.

    `run` names this run, the same in all its processes: what it holds itself is waited for without limit.
    `inherited` are devices that a surrounding test holds. Nothing is opened before the first `acquire`, and nothing
    stays open but leases, so a table may be copied, forked and pickled.
    """

    def __init__(self, directory: Path, *, run: str = "", inherited: frozenset[str] = frozenset()) -> None:
        self.directory = directory
        self.run = run
        self.inherited = inherited

    def acquire(
        self,
        candidates: Sequence[str],
        count: int,
        *,
        timeout: float | None = None,
        waiting: Callable[[float, Sequence[Holder]], None] | None = None,
        memory: int | None = None,
        total: Mapping[str, int] | None = None,
        test: str = "",
    ) -> Lease:
        """Hold `count` of the devices `candidates` (UUIDs, the preferred first): all of them, or wait.

        `memory`, in bytes on each device, shares a device with others that declare a budget while all fit its
        `total`; without it, or where the total is unknown or not larger, the device is held whole. `timeout` bounds
        the seconds of waiting for other runs (0: none; None: no limit). `waiting` is told after every look, at most
        some 20 times a second, for how many seconds the request waits and who is in its way; what it raises ends the
        request.

        Inherited devices count as held already and come first. Raises LeaseTimeout, ValueError for what can never be
        met, and LeaseError where the folder cannot be used. A process that holds a lease gives it back before it
        asks for another; with inherited devices, which it cannot give back, it never waits for further ones.
        """
        wanted = tuple(dict.fromkeys(candidates))
        if not 0 <= count <= len(wanted) or not all(wanted):
            raise ValueError(f"a lease of {count} of {len(wanted)} devices")
        if memory is not None and memory < 1:
            raise ValueError(f"a memory budget of {memory} bytes")
        granted = tuple(uuid for uuid in wanted if uuid in self.inherited)[:count]
        if len(granted) == count:
            return Lease(granted)
        rest = tuple(uuid for uuid in wanted if uuid not in self.inherited)
        demand = Demand(rest, count - len(granted), memory, {u: t for u, t in (total or {}).items() if u in rest})
        request = _Request(demand, test, time.time())
        try:
            lease = self._met(request, timeout, waiting, may_wait=not granted)
        finally:
            if request.place is not None:
                request.place.close()
        lease.uuids = granted + lease.uuids
        return lease

    def waited_for(self, uuids: Sequence[str]) -> bool:
        """Whether a request waits that could use one of these devices: then give them back between two tests."""
        with _Folder(self.directory) as folder:
            queue = self._queue(folder, None)
        return any(set(uuids) & set(entry.demand.candidates) for entry in queue)

    def _met(
        self,
        request: _Request,
        timeout: float | None,
        waiting: Callable[[float, Sequence[Holder]], None] | None,
        may_wait: bool,
    ) -> Lease:
        began = looked = time.monotonic()
        for_others, pause = 0.0, 0.001
        look = _Look()
        while True:
            new = self._look(request)
            now = time.monotonic()
            if new is None:  # The gate is shut: for a millisecond, or because who shut it is stopped.
                shut = now - looked
                if shut < GATE_PATIENCE:
                    pause = min(pause, 0.005)
                else:
                    at_gate = (self._gate_holder(),)
                    if timeout is not None and for_others + shut >= timeout:
                        raise self._timeout(request, timeout, at_gate)
                    if waiting is not None:
                        waiting(now - began, at_gate)
            elif new.lease is not None:
                return new.lease
            else:
                for_others += now - looked if look.for_others else 0.0
                look, looked = new, now
                if not may_wait:
                    raise LeaseTimeout(
                        f"{request.demand.count} device(s) beyond those inherited ({INHERITED_VARIABLE}) are in use, "
                        f"and to wait for them while holding those could last for ever; {_listed(look.blockers)}",
                        look.blockers,
                    )
                if timeout is not None and look.for_others and for_others >= timeout:
                    raise self._timeout(request, timeout, look.blockers)
                if waiting is not None:
                    waiting(now - began, look.blockers)
            # Uneven, so that processes that started together do not meet at the gate for ever.
            time.sleep(pause * (0.5 + time.monotonic_ns() % 997 / 1994))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _look(self, request: _Request) -> _Look | None:
        """Take what the request may take now, or a place in the queue; None while another process looks."""
        with _Folder(self.directory) as folder:
            gate = folder.locked("gate", _EXCLUSIVE)
            if gate is None:
                return None
            with _refused(folder.path / "gate"):
                gate.write(self._record(request, time.time()))
                return self._look_behind_gate(folder, request)

    def _look_behind_gate(self, folder: _Folder, request: _Request) -> _Look:
        demand = request.demand
        queue = self._queue(folder, request.place)
        ahead = [entry for entry in queue if request.place is None or entry.turn < request.turn]
        uuids = dict.fromkeys((*demand.candidates, *(u for entry in ahead for u in entry.demand.candidates)))
        holders = {uuid: _holders(folder, uuid) for uuid in uuids}
        held = {uuid: [h.memory for h in found] for uuid, found in holders.items()}
        chosen = decide(demand, [entry.demand for entry in ahead], held)
        lease = None if chosen is None else self._taken(folder, request, chosen)
        if lease is not None:
            return _Look(lease)
        self._take_place(folder, request, queue)

        others = [entry.demand for entry in ahead if not self._is_own(entry.holder)]
        held_by_others = {u: [h.memory for h in found if not self._is_own(h)] for u, found in holders.items()}
        blockers = [holder for uuid in demand.candidates for holder in holders[uuid]]
        blockers += [entry.holder for entry in ahead if set(entry.demand.candidates) & set(demand.candidates)]
        return _Look(None, tuple(blockers), waits_for_others(demand, others, held_by_others))

    def _taken(self, folder: _Folder, request: _Request, uuids: Sequence[str]) -> Lease | None:
        """The lease of these devices; None where one is locked against all appearances."""
        files: list[_File] = []
        records: list[tuple[_File, dict[str, Any]]] = []
        for uuid in uuids:
            budget = request.demand.budget(uuid)
            holding = device = folder.locked(_device(uuid), _EXCLUSIVE if budget is None else _SHARED)
            if device is not None and budget is not None:
                files.append(device)
                holding = _free(folder, _share(uuid), SHARERS)
            if holding is None:
                return None
            files.append(holding)
            records.append((holding, {**self._record(request, time.time()), "memory": budget}))
            holding.write(records[-1][1])
        for file in files:
            file.stays = True
        return Lease(uuids, files, records)

    def _queue(self, folder: _Folder, own: _File | None) -> list[_Waiting]:
        """Everybody else who waits, the longest waiting first."""
        found = [_waiting(said, time.monotonic()) for said in _live(folder, "queue.", own)]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.turn)

    def _take_place(self, folder: _Folder, request: _Request, queue: Sequence[_Waiting]) -> None:
        """Enter the queue, or say in our entry that we still look."""
        if request.place is None:
            request.place = _free(folder, "queue.", WAITERS)
            if request.place is not None:
                request.place.stays = True
            request.turn = max((entry.turn for entry in queue), default=0) + 1
        if request.place is not None:
            demand = request.demand
            said = {"turn": request.turn, "count": demand.count, "memory": demand.memory, "looked": time.monotonic()}
            of = {uuid: demand.total.get(uuid) for uuid in demand.candidates}
            request.place.write({**self._record(request, request.since), **said, "of": of})

    def _record(self, request: _Request, since: float) -> dict[str, Any]:
        return {"pid": os.getpid(), "run": self.run, "test": request.test, "since": round(since, 3)}

    def _is_own(self, holder: Holder) -> bool:
        return bool(self.run) and holder.run == self.run

    def _gate_holder(self) -> Holder:
        with _Folder(self.directory) as folder:
            return _holder("", folder.open("gate").read())

    def _timeout(self, request: _Request, timeout: float, blockers: Sequence[Holder]) -> LeaseTimeout:
        demand = request.demand
        each = "" if demand.memory is None else f" with {demand.memory} bytes each"
        return LeaseTimeout(
            f"{demand.count} of {len(demand.candidates)} device(s){each} did not become free within the {timeout:g} s "
            f"that this run waits for others; {_listed(blockers)}",
            blockers,
        )


def _listed(holders: Sequence[Holder]) -> str:
    return "; ".join(str(holder) for holder in holders) or "no holder is known"


def _file_name(uuid: str) -> str:
    """A device's part of file names: an older spelling of MIG devices has slashes."""
    return re.sub(r"[^A-Za-z0-9-]", lambda found: f"%{ord(found.group()):x}.", uuid)


def _device(uuid: str) -> str:
    return f"device.{_file_name(uuid)}"


def _share(uuid: str) -> str:
    return f"share.{_file_name(uuid)}."


def _free(folder: _Folder, prefix: str, limit: int) -> _File | None:
    """The first numbered file that nobody holds, locked."""
    return next(filter(None, (folder.locked(f"{prefix}{n}", _EXCLUSIVE) for n in range(limit))), None)


def _live(folder: _Folder, prefix: str, own: _File | None = None) -> list[dict[str, Any]]:
    """What stands in the numbered files that somebody else holds."""
    found: list[dict[str, Any]] = []
    for name in folder.names(prefix):
        file = folder.open(name)
        is_own = own is not None and os.path.sameopenfile(own.descriptor, file.descriptor)
        if not is_own and not file.lock(_EXCLUSIVE):
            found.append(file.read())
        file.close()
    return found


def _holders(folder: _Folder, uuid: str) -> list[Holder]:
    """Who holds a device. A sharer whose budget is unreadable counts as one who holds it whole."""
    device = folder.open(_device(uuid))
    is_free, is_shared = device.lock(_EXCLUSIVE), device.lock(_SHARED)
    whole = {**device.read(), "memory": None}
    device.close()
    if is_free:
        return []
    if not is_shared:
        return [_holder(uuid, whole)]
    return [_holder(uuid, said) for said in _live(folder, _share(uuid))] or [Holder(uuid)]
