"""Who uses a device without a lease of it, and whether that leaves enough: pure functions of what NVML says.

Memory is what counts. In a container NVML may list processes under ids of the host, only some of them, or none, but
it tells how much of a device is in use. What leases explain is never a stranger's, and what is unknown counts as
nothing: a test is kept from its devices only by what is known to be in its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaenv.grants.demand import Holding
from pytest_cudaenv.host.devices import CudaDevice, DeviceUsage, GiB
from pytest_cudaenv.requirements.sizes import format_memory, is_enough_memory

NORMAL = 2 * GiB
"""Bytes that may be in use on a device at rest: display servers, MPS, contexts of idle processes, the driver's own."""

NORMAL_SHARE = 0.1
"""The part of a large device that may be in use likewise, where a test takes it whole and declares no memory."""

CONTEXT = GiB
"""Bytes that a process takes beside its budget, at most: a CUDA context has 620 MiB on an H200."""


@dataclass(frozen=True)
class Occupied:
    """A device that others than tests with a lease use, and so much of it that a test can't have it."""

    device: CudaDevice
    foreign: int
    """Bytes that no lease explains, at least."""
    processes: tuple[tuple[int, int | None], ...]
    """(process id, bytes or None) of those that NVML lists."""

    def describe(self, name_of: Callable[[int], str | None]) -> str:
        """`40.0 GiB of NVIDIA H200 GPU-… in use by pid 77 (python) 40.0 GiB`."""
        listed = [
            f"pid {pid} ({name_of(pid) or 'not visible here'}) {'?' if size is None else format_memory(size)}"
            for pid, size in self.processes
        ]
        by = ", ".join(listed) or "processes that NVML does not list (another container's?)"
        return f"{format_memory(self.foreign)} of {self.device.name} {self.device.uuid} in use by {by}"


def foreign_memory(usage: Mapping[str, DeviceUsage], uuid: str, holding: Holding) -> int:
    """Bytes of a device that are in use and that no lease explains, at least; 0 where that is unknown.

    `usage` is that of all devices that were asked about: it tells whether NVML lists the run's own processes at all.
    """
    if uuid not in usage or None in holding.budgets:
        return 0
    explained = sum((budget or 0) + CONTEXT for budget in holding.budgets)
    here = dict(usage[uuid].processes or ())
    anywhere = {pid for one in usage.values() for pid, _ in one.processes or ()}
    for pid in holding.unleased:
        size = here.get(pid, None if pid in here or pid not in anywhere else 0)
        if size is None:
            return 0  # the run's own memory can't be told from a stranger's
        explained += size
    return max(0, usage[uuid].used - explained)


def is_in_the_way(total: int, foreign: int, memory: int, budgets: Sequence[int | None] = ()) -> bool:
    """Whether so many foreign bytes keep a test from a device; `memory` is what it declares to use, 0 for nothing."""
    if foreign <= NORMAL:
        return False
    if not memory:
        return foreign > NORMAL_SHARE * total
    return not is_enough_memory(total - foreign - sum(budget or 0 for budget in budgets), memory)


def occupied(
    devices: Sequence[CudaDevice], usage: Mapping[str, DeviceUsage], holdings: Mapping[str, Holding], memory: int
) -> dict[str, Occupied]:
    """Those of the devices, by UUID, that a test which declares `memory` bytes can't have now."""
    found: dict[str, Occupied] = {}
    for device in devices:
        holding = holdings.get(device.uuid, Holding())
        foreign = foreign_memory(usage, device.uuid, holding)
        if foreign and is_in_the_way(usage[device.uuid].total, foreign, memory, holding.budgets):
            listed = [p for p in usage[device.uuid].processes or () if p[0] not in holding.unleased]
            found[device.uuid] = Occupied(device, foreign, tuple(listed))
    return found


def is_returned(before: DeviceUsage, now: DeviceUsage | None) -> bool:
    """Whether a device that was held whole is as empty as when it was granted; True where that is unknown."""
    return now is None or now.used <= before.used + CONTEXT / 2
