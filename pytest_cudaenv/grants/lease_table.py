"""Leases: which devices of this host are in use, as kernel locks that end with the processes that hold them.

Every run, worker and user of a host shares one folder of lock files. `flock` on a descriptor of our own is the
truth about who holds what: a lock lives until the last copy of its descriptor is closed, also by `kill -9`, and a
process id is never asked for. What stands *inside* a file only names holders and orders those who wait.

    gate               held for about a millisecond while a process looks at all the others and takes what it may
    device.<uuid>      exclusive: held whole; shared: held by processes that each declared a memory budget
    share.<uuid>.<n>   exclusive: one sharer of that device, its budget inside
    queue.<n>          exclusive: one request that waits; its turn and what it asks for inside
    unleased.<n>       exclusive: a pytest process that uses devices without a lease

Devices are taken all or none, in one look, and nobody holds a device while waiting for another, so there is no
deadlock. Who may take them is the pure function `decide`: a request takes free devices past those that wait longer
unless they need the same ones. An unreadable file can cost a request its turn, never a device its holder.

The locks bind those who use them: any user can lock a file of a shared folder, or use a GPU without asking.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaenv.grants.demand import SHARERS, Demand, Holding, decide, waits_for_others
from pytest_cudaenv.grants.grant import INHERITED_VARIABLE
from pytest_cudaenv.grants.holder import Holder, Waiting, holder_from, waiting_from
from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.lock_folder import EXCLUSIVE, SHARED, LeaseError, LockFile, LockFolder, refused

LONGEST_PAUSE = 0.05
"""Seconds between two looks of a request that waits, at most."""
GATE_PATIENCE = 1.0
"""Seconds after which a gate that stays shut is taken for one whose holder is stopped."""
WAITERS = 1024
"""Requests that can queue; further ones wait without a turn."""


class LeaseTimeout(LeaseError):
    """Devices that others hold did not become free in time; the message names the holders."""

    def __init__(self, message: str, holders: Sequence[Holder] = ()) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


def inherited(environ: Mapping[str, str]) -> frozenset[str]:
    """UUIDs in CUDAENV_LEASE: devices that a surrounding test holds, and that its child processes use under it."""
    return frozenset(filter(None, (uuid.strip() for uuid in environ.get(INHERITED_VARIABLE, "").split(","))))


@dataclass
class _Request:
    """A demand while it is being met."""

    demand: Demand
    test: str
    since: float
    place: LockFile | None = None
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
        with LockFolder(self.directory) as folder:
            queue = self._queue(folder, None)
        return any(set(uuids) & set(entry.demand.candidates) for entry in queue)

    def survey(self, uuids: Sequence[str]) -> dict[str, Holding]:
        """What others hold of these devices (all of them, where that can't be told), and who uses them unleased."""
        end = time.monotonic() + GATE_PATIENCE
        while True:
            with LockFolder(self.directory) as folder:
                if folder.locked("gate", EXCLUSIVE) is not None:
                    found = {uuid: [h for h in _holders(folder, uuid) if not self._is_mine(h)] for uuid in uuids}
                    said = [holder_from("", s) for s in _live(folder, "unleased.")]
                    unleased = frozenset(h.pid for h in said if h.pid is not None and self._is_own(h))
                    return {uuid: Holding([h.memory for h in held], unleased) for uuid, held in found.items()}
            if time.monotonic() >= end:
                return {uuid: Holding([None]) for uuid in uuids}
            time.sleep(0.002)

    def announce(self) -> LockFile:
        """Say that this process uses devices without a lease, until the file is closed or the process ends."""
        with LockFolder(self.directory) as folder:
            file = _free(folder, "unleased.", WAITERS)
            if file is None:
                raise LeaseError(f"{WAITERS} processes use devices without a lease")
            file.stays = True
            file.write({"pid": os.getpid(), "run": self.run})
            return file

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
        with LockFolder(self.directory) as folder:
            gate = folder.locked("gate", EXCLUSIVE)
            if gate is None:
                return None
            with refused(folder.path / "gate"):
                gate.write(self._record(request, time.time()))
                return self._look_behind_gate(folder, request)

    def _look_behind_gate(self, folder: LockFolder, request: _Request) -> _Look:
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

    def _taken(self, folder: LockFolder, request: _Request, uuids: Sequence[str]) -> Lease | None:
        """The lease of these devices; None where one is locked against all appearances."""
        files: list[LockFile] = []
        records: list[tuple[LockFile, dict[str, Any]]] = []
        for uuid in uuids:
            budget = request.demand.budget(uuid)
            holding = device = folder.locked(_device(uuid), EXCLUSIVE if budget is None else SHARED)
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

    def _queue(self, folder: LockFolder, own: LockFile | None) -> list[Waiting]:
        """Everybody else who waits, the longest waiting first."""
        found = [waiting_from(said, time.monotonic()) for said in _live(folder, "queue.", own)]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.turn)

    def _take_place(self, folder: LockFolder, request: _Request, queue: Sequence[Waiting]) -> None:
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

    def _is_mine(self, holder: Holder) -> bool:
        return holder.pid == os.getpid() and self._is_own(holder)  # the id alone may be another container's

    def _gate_holder(self) -> Holder:
        with LockFolder(self.directory) as folder:
            return holder_from("", folder.open("gate").read())

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


def _free(folder: LockFolder, prefix: str, limit: int) -> LockFile | None:
    """The first numbered file that nobody holds, locked."""
    return next(filter(None, (folder.locked(f"{prefix}{n}", EXCLUSIVE) for n in range(limit))), None)


def _live(folder: LockFolder, prefix: str, own: LockFile | None = None) -> list[dict[str, Any]]:
    """What stands in the numbered files that somebody else holds."""
    found: list[dict[str, Any]] = []
    for name in folder.names(prefix):
        file = folder.open(name)
        is_own = own is not None and os.path.sameopenfile(own.descriptor, file.descriptor)
        if not is_own and not file.lock(EXCLUSIVE):
            found.append(file.read())
        file.close()
    return found


def _holders(folder: LockFolder, uuid: str) -> list[Holder]:
    """Who holds a device. A sharer whose budget is unreadable counts as one who holds it whole."""
    device = folder.open(_device(uuid))
    is_free, is_shared = device.lock(EXCLUSIVE), device.lock(SHARED)
    whole = {**device.read(), "memory": None}
    device.close()
    if is_free:
        return []
    if not is_shared:
        return [holder_from(uuid, whole)]
    return [holder_from(uuid, said) for said in _live(folder, _share(uuid))] or [Holder(uuid)]
