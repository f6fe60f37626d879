"""Leasing: the devices of a test, once nobody else holds or fills them; and their return, once they are empty again.

A device that strangers fill is taken last. Where there are not enough others it is waited for, holding nothing: so
the tests that can do without it go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.lease_table import LeaseTable
from pytest_cudaenv.grants.lock_folder import LeaseError
from pytest_cudaenv.grants.occupancy import NORMAL, Occupied, foreign_memory, is_returned, occupied
from pytest_cudaenv.host.devices import CudaDevice, DeviceUsage
from pytest_cudaenv.requirements.sizes import format_memory

RECHECK = 2.0
"""Seconds between two questions to NVML, at most, while devices are waited for."""

RETURN = 5.0
"""Seconds that the driver gets to release the memory of a device process that has ended."""

ReadUsage = Callable[[Iterable[str]], Mapping[str, DeviceUsage]]


class DeviceOccupied(LeaseError):
    """Processes without a lease did not leave a device within the time; the message names them."""

    code = "device-occupied"


class _Changed(Exception):
    """A device that was set aside has become free."""


@dataclass(frozen=True)
class Demanded:
    """What a test asks for: so many of these devices, and its memory on each."""

    devices: tuple[CudaDevice, ...]
    """In the order of preference."""
    count: int
    budget: int | None = None
    """Bytes on each device, which it shares; None: it takes them whole."""
    memory: int = 0
    """Bytes that it declares to use on each device; 0: it does not say."""
    test: str = ""


@dataclass
class Waited:
    """How long a test has waited for its devices."""

    seconds: float = 0.0
    whole: bool = False
    """It declares no memory, and so takes its devices whole."""


@dataclass(frozen=True)
class _Look:
    """What strangers do on the devices that a test could have, by UUID."""

    foreign: Mapping[str, int] = field(default_factory=dict)
    """Bytes that no lease explains."""
    occupied: Mapping[str, Occupied] = field(default_factory=dict)
    """Devices that the test can't have for them."""


class Leasing:
    """The leases that one process takes for its tests.

    `usage` asks NVML; None on a simulated host, whose devices nobody can fill. `wait` is in seconds, and bounds the
    waiting for other runs and for strangers. `warn` is told what a reader of the summary should know.
    """

    def __init__(
        self, table: LeaseTable, wait: float, usage: ReadUsage | None, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self.table = table
        self.wait = wait
        self.waited: dict[str, Waited] = {}
        """By test."""
        self._usage = usage
        self._warn = warn
        self._before: dict[str, DeviceUsage] = {}
        """What was in use of the devices that are held whole, when they were granted."""
        self._waited_in_vain: set[str] = set()
        """Devices that strangers did not leave in time, and have not left since: they are not waited for again."""

    def acquire(self, demanded: Demanded) -> Lease:
        """Hold the devices. Raises LeaseError: LeaseTimeout and DeviceOccupied name who is in the way."""
        began = time.monotonic()
        self._before = {}
        try:
            return self._acquired(demanded)
        finally:
            waited = self.waited.setdefault(demanded.test, Waited())
            waited.seconds += time.monotonic() - began
            waited.whole = demanded.budget is None and not demanded.memory

    def release(self, lease: Lease, devices: Iterable[CudaDevice] = ()) -> None:
        """Give the devices back, whose process has ended, once the driver has released its memory, or soon after."""
        try:
            self._await_return({d.uuid: d for d in devices})
        finally:
            lease.release()

    def _acquired(self, demanded: Demanded) -> Lease:
        waited, pause = 0.0, 0.05
        # Where all devices are needed there is no choice, and what was taken is looked at anyhow.
        look = self._look(demanded) if len(demanded.devices) > demanded.count else _Look()
        while True:
            if len(demanded.devices) - len(look.occupied) >= demanded.count:
                lease = self._taken(demanded, look, self.wait - waited)
                if lease is None:
                    look = self._look(demanded)
                    continue
                taken = self._look(demanded, [d for d in demanded.devices if d.uuid in lease.uuids])
                if not taken.occupied:
                    return lease
                lease.release()
                look = _Look({**look.foreign, **taken.foreign}, {**look.occupied, **taken.occupied})
                continue
            if waited >= self.wait or self._waited_in_vain.issuperset(look.occupied):
                self._waited_in_vain.update(look.occupied)
                raise _refusal(demanded, look.occupied.values(), self.wait)
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, RECHECK, max(self.wait - waited, 0.01))
            look = self._look(demanded)

    def _taken(self, demanded: Demanded, look: _Look, timeout: float) -> Lease | None:
        """The lease of devices that strangers do not fill; None once one that they did has become free."""
        asked = time.monotonic()

        def look_again(*_: object) -> None:
            nonlocal asked
            if look.occupied and time.monotonic() - asked >= RECHECK:
                asked = time.monotonic()
                if look.occupied.keys() - self._look(demanded).occupied.keys():
                    raise _Changed

        usable = [d for d in demanded.devices if d.uuid not in look.occupied]
        usable.sort(key=lambda d: look.foreign.get(d.uuid, 0) > NORMAL)
        try:
            return self.table.acquire(
                [d.uuid for d in usable],
                demanded.count,
                timeout=max(0.0, timeout),
                waiting=look_again,
                memory=demanded.budget,
                total={d.uuid: d.total_memory for d in usable if d.total_memory is not None},
                test=demanded.test,
            )
        except _Changed:
            return None

    def _look(self, demanded: Demanded, taken: Sequence[CudaDevice] = ()) -> _Look:
        """What strangers do on the devices that the test could have; on those `taken`, once it has them."""
        devices = [d for d in taken or demanded.devices if not d.unified_memory and d.uuid not in self.table.inherited]
        usage = self._usage([d.uuid for d in devices]) if self._usage is not None and devices else {}
        if not usage:
            return _Look()
        holdings = self.table.survey(list(usage))
        found = occupied(devices, usage, holdings, demanded.memory)
        self._waited_in_vain -= usage.keys() - found.keys()
        if taken and demanded.budget is None:
            self._before = dict(usage)
        return _Look({uuid: foreign_memory(usage, uuid, holdings[uuid]) for uuid in usage}, found)

    def _await_return(self, devices: Mapping[str, CudaDevice]) -> None:
        before, pause = {u: b for u, b in self._before.items() if u in devices}, 0.02
        self._before = {}
        end = time.monotonic() + RETURN
        while before and self._usage is not None:
            now = self._usage(before)
            before = {uuid: b for uuid, b in before.items() if not is_returned(b, now.get(uuid))}
            if before and time.monotonic() >= end:
                for uuid, b in before.items():
                    more = format_memory(now[uuid].used - b.used)
                    self._warn(
                        f"[device-memory] {devices[uuid].name} {uuid}: {more} more in use {RETURN:g} s after the end "
                        "of a device process than before its start; end what it has left behind, or whoever uses the "
                        "device without a lease"
                    )
                return
            if before:
                time.sleep(pause)
                pause = min(2 * pause, 0.5)


def _refusal(demanded: Demanded, found: Iterable[Occupied], wait: float) -> DeviceOccupied:
    each = f" with {format_memory(demanded.memory)} free" if demanded.memory else ""
    have = "; ".join(one.describe(process_name) for one in found)
    return DeviceOccupied(
        f"needs {demanded.count} of {len(demanded.devices)} device(s){each}; have {have}. Waited up to {wait:g} s: end "
        "these processes, choose other devices with --cuda-visible, or raise --cuda-wait"
    )


def process_name(pid: int) -> str | None:
    """What a process calls itself; None for one that cannot be seen from here."""
    try:
        text = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return "".join(c if c.isprintable() else "?" for c in text)
