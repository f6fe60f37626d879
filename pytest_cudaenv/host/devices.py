"""Facts about this machine, as frozen data.

Nothing here asks anything: `host.nvml`, `host.driver` and `host.catalog` fill these classes in, and tests
fabricate them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pytest_cudaenv.host.software import Software

GiB = 1024**3
"""Bytes in a GiB, the unit in which `nvidia-smi` counts."""

Capability = tuple[int, int]
"""A compute capability, (major, minor)."""

UNKNOWN_NAME = "unknown GPU"
"""The name of a device that no query named."""


@dataclass(frozen=True, eq=False, repr=False)
class CudaDevice(str):
    """One CUDA device (a GPU or a MIG instance), good wherever torch takes a device.

    It *is* the string `"cuda:<index>"`, because torch accepts strings and refuses foreign classes. `index` is
    its place in the tuple that lists it: CUDA's own number in a process that sees exactly those devices.
    """

    index: int = field()  # type: ignore[assignment]  # torch.device has it too; nobody calls str.index on a device
    uuid: str
    """`GPU-…` or `MIG-…`, in full, as NVML prints it."""
    name: str
    """The product name as NVML reports it; never proof of a family."""
    capability: Capability | None
    """Compute capability; None where no query answered."""
    total_memory: int | None
    """Bytes, as NVML reports them; None is unknown, never 0."""
    unified_memory: bool = False
    """The device shares the host's memory (Orin, Thor, GB10); `total_memory` is then the host's."""
    pci_bus_id: str | None = None
    multiprocessors: int | None = None
    mig_parent: str | None = None
    """UUID of the GPU that this MIG instance is cut from; None for a whole GPU."""
    mig_ids: tuple[int, int] | None = None
    """(GPU instance, compute instance), which the older spelling `MIG-GPU-…/gi/ci` names."""

    type = "cuda"
    """As `torch.device.type`."""

    def __new__(cls, index: int, *_: object, **__: object) -> CudaDevice:
        return str.__new__(cls, f"cuda:{index}")

    def __repr__(self) -> str:
        return f"CudaDevice({str(self)!r}, {self.name!r})"

    def __getnewargs__(self) -> tuple[int]:  # type: ignore[override]
        return (self.index,)

    @property
    def is_mig(self) -> bool:
        """Whether this is a MIG instance and not a whole GPU."""
        return self.mig_parent is not None or self.uuid.startswith("MIG-")

    @property
    def short_name(self) -> str:
        """The name without vendor words, for lines that are cut at 80 columns."""
        words = [w for w in self.name.split() if w not in {"NVIDIA", "GeForce", "Tesla"}]
        return " ".join(words[:3]) or self.name


@dataclass(frozen=True)
class DeviceUsage:
    """What is in use of a device at one moment, in bytes, by whomever."""

    total: int
    used: int
    """Allocated, without what the driver keeps for itself where it tells that apart."""
    free: int
    processes: tuple[tuple[int, int | None], ...] | None = None
    """(process id, its bytes or None) of each compute process; None is unknown.

    A container may be shown ids of the host, those of its own processes alone, or none at all.
    """


def renumbered(devices: Iterable[CudaDevice]) -> tuple[CudaDevice, ...]:
    """The same devices, numbered by their place: what a process that sees exactly these would call them."""
    return tuple(d if d.index == i else replace(d, index=i) for i, d in enumerate(devices))


def cuda_version(number: object) -> Capability | None:
    """12080 -> (12, 8), as NVML and CUDA write their versions; None for what is none."""
    if not isinstance(number, int) or number <= 0:
        return None
    return number // 1000, number % 1000 // 10


@dataclass(frozen=True)
class Problem:
    """Why devices that are here, or may be, cannot be used.  Not the same as having none."""

    code: str
    """Stable, lower-case with dashes: `nvml-mismatch`."""
    have: str
    """What was found, in a few words."""
    remedy: str


@dataclass(frozen=True)
class Host:
    """The facts that decide every skip: devices, driver, software.

    `devices` lists every NVIDIA device in PCI bus order, before any mask; a GPU in MIG mode is represented by
    its instances. `problem` is set where a device is (or may be) present and cannot be used: callers must then
    not read an empty `devices` as "none".
    """

    devices: tuple[CudaDevice, ...] = ()
    software: Software = field(default_factory=Software)
    driver: str | None = None
    """The NVIDIA driver's version, `580.159.04`."""
    driver_cuda: Capability | None = None
    """The newest CUDA version that the driver supports, (major, minor)."""
    problem: Problem | None = None
    fastest_first: tuple[str, ...] | None = None
    """UUIDs in CUDA's default order, where the driver was asked; None: the order of `devices`."""
    amd_devices: int = 0
    """Number of AMD GPUs seen. They answer as `torch.cuda` under ROCm and are never CUDA devices here."""
    simulated: str | None = None
    """The catalogue spelling, `h100:2`, of a host that is made up."""
    notes: tuple[str, ...] = ()
    """What a reader of the header should know, one sentence each."""
