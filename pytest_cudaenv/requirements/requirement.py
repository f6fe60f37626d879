"""A requirement, how several merge into one, and which of its needs a host does not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pytest_cudaenv.host.devices import CudaDevice, Host
from pytest_cudaenv.host.mask import INVALID_DEVICE, VISIBLE_DEVICES, MaskReading
from pytest_cudaenv.requirements import attention, hub_kernels, packages, precision, quantization, torch_build
from pytest_cudaenv.requirements.capability import describe
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Importer, Rank, Reason, brief, ordered, unknown
from pytest_cudaenv.requirements.sizes import format_memory, is_enough_memory, version_tuple_fits


@dataclass(frozen=True)
class Requirement:
    """What a test needs: the sum of its markers and of its whole fixture closure.

    Tuples hold every declaration; numbers hold the largest one. The empty requirement needs nothing.
    """

    devices: int = 0
    """That many NVIDIA devices, or the test does not run."""
    device_if_any: bool = False
    """One device where the host has one, the CPU otherwise (`device`, `cell`, `attn_backend`)."""
    memory: int = 0
    """Bytes that the test uses on each device."""
    capability: tuple[str, ...] = ()
    """PEP 440 specifiers on the compute capability."""
    driver: tuple[str, ...] = ()
    """PEP 440 specifiers on the newest CUDA version that the driver supports."""
    exclusive: bool = False
    """No other test on its devices at the same time."""
    dtypes: tuple[str, ...] = ()
    """dtypes that must be native, never emulated."""
    attn_backends: tuple[str, ...] = ()
    """Attention backends that must run, by canonical name or Hub kernel."""
    cell_dtype: str | None = None
    """The dtype of this test's cell: the backends above must take it."""
    hub_kernels: tuple[HubKernel, ...] = ()
    needs_kernels: bool = False
    """A usable pair of `kernels` and `transformers`, whichever kernel is loaded later."""
    quantization: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """PEP 508 strings, alternatives joined by ` | `."""
    nccl: bool = False
    isolated: bool = False
    """A device process of its own."""
    model_reasons: tuple[Reason, ...] = ()
    """Unmet needs that a model class declares (`_supports_sdpa = False`)."""

    def merged(self, other: Requirement) -> Requirement:
        """Both requirements at once: the larger numbers, every declaration of the rest."""
        values: dict[str, object] = {}
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, tuple):
                values[f.name] = tuple(dict.fromkeys(mine + theirs))
            elif isinstance(mine, (bool, int)):
                values[f.name] = max(mine, theirs)
            else:
                values[f.name] = theirs or mine
        return Requirement(**values)  # type: ignore[arg-type]

    @property
    def asks_for_device(self) -> bool:
        """Whether a host with devices should grant one."""
        return self.devices > 0 or self.device_if_any

    @property
    def device_count(self) -> int:
        """How many devices to grant where they are to be had."""
        return max(self.devices, int(self.device_if_any))


def fitting(requirement: Requirement, host: Host, visible: Sequence[CudaDevice]) -> tuple[CudaDevice, ...] | None:
    """The first visible devices that meet the requirement, as many as it needs; None where too few do."""
    count = requirement.device_count
    found = [d for d in visible if not device_reasons(requirement, d, host)]
    return tuple(found[:count]) if count and len(found) >= count else None


def unmet(
    requirement: Requirement, host: Host, reading: MaskReading, imports: Importer | None = None
) -> tuple[Reason, ...]:
    """Every need that this host, under this mask, does not meet; empty where the test can run.

    `imports` tries modules out in the process that is to run the test; without it (while collecting) a package
    that is installed counts as working.
    """
    reasons = [*requirement.model_reasons, *_software_reasons(requirement, host, imports)]
    if requirement.asks_for_device:
        reasons += _presence_reasons(requirement, host, reading)
        if not reading.deliberate:
            # Whoever hides the devices on purpose may run any build of torch.
            reasons += torch_build.host_reasons(host)
    if reading.devices and requirement.asks_for_device and host.problem is None:
        reasons += _best_device_reasons(requirement, host, reading.devices)
    elif not requirement.devices and not any(reason.is_error for reason in reasons):
        reasons += _cpu_reasons(requirement, host)
    return ordered(reasons)


def device_reasons(requirement: Requirement, device: CudaDevice, host: Host) -> tuple[Reason, ...]:
    """The needs that one device does not meet."""
    reasons: list[Reason] = [*torch_build.device_reasons(device, host.software.torch)]
    if requirement.capability:
        wanted = ",".join(requirement.capability)
        if device.capability is None:
            reasons.append(unknown(f"needs capability {wanted}", "a capability that no query answered"))
        elif not version_tuple_fits(device.capability, requirement.capability, "capability"):
            remedy = "Run it on a device of that capability."
            reasons.append(brief("cuda-capability", f"needs capability {wanted}", describe(device), remedy))
    if requirement.memory:
        wanted = format_memory(requirement.memory)
        if device.total_memory is None:
            reasons.append(unknown(f"needs {wanted} of memory", "a total that no query answered"))
        elif not is_enough_memory(device.total_memory, requirement.memory):
            have = f"{format_memory(device.total_memory)} ({device.short_name})"
            remedy = "Run it on a device with that much memory."
            reasons.append(brief("cuda-memory", f"needs {wanted} of memory", have, remedy))
    for dtype in requirement.dtypes:
        reasons += precision.dtype_reasons(dtype, device)
    for backend in requirement.attn_backends:
        reasons += attention.device_reasons(backend, requirement.cell_dtype, device, host.software)
    for kernel in requirement.hub_kernels:
        reasons += hub_kernels.device_reasons(kernel, device, host.software)
    for method in requirement.quantization:
        reasons += quantization.device_reasons(method, device)
    return ordered(reasons)


def _software_reasons(requirement: Requirement, host: Host, imports: Importer | None) -> list[Reason]:
    reasons: list[Reason] = []
    software = host.software
    for spec in requirement.packages:
        reasons += packages.package_reasons(spec, software, imports)
    for backend in requirement.attn_backends:
        reasons += attention.software_reasons(backend, software, imports)
    for kernel in requirement.hub_kernels:
        reasons += hub_kernels.software_reasons(kernel, software)
    if requirement.needs_kernels or requirement.hub_kernels:
        reasons += hub_kernels.pair_reasons(software)
    for method in requirement.quantization:
        reasons += quantization.software_reasons(method, software, imports)
    if requirement.nccl:
        reasons += torch_build.nccl_reasons(software.torch)
    return reasons


def _presence_reasons(requirement: Requirement, host: Host, reading: MaskReading) -> list[Reason]:
    """Why there are not as many devices as the requirement asks for, whatever they can do."""
    need = "needs a CUDA device" if requirement.device_count == 1 else f"needs {requirement.device_count} CUDA devices"
    if reading.deliberate and (host.devices or host.problem):
        return _hidden_reasons(requirement, need, len(host.devices))
    if (problem := host.problem) is not None:
        return [brief(problem.code, need, problem.have, problem.remedy, Rank.UNUSABLE)]
    count, total = len(reading.devices), len(host.devices)
    if reading.cu_init == INVALID_DEVICE:
        remedy = f"{reading.notes[-1]}; correct the variable." if reading.notes else f"Correct {VISIBLE_DEVICES}."
        return [brief("cuda-mask-invalid", need, "a mask under which CUDA fails", remedy, Rank.UNUSABLE)]
    if host.devices and not count:
        return _mistaken_reasons(requirement, need, reading, total)
    if not requirement.devices or count >= requirement.devices:
        return _driver_reasons(requirement, host) if requirement.driver and count else []
    if not host.devices:
        have = f"{host.amd_devices} AMD GPU(s), no CUDA device" if host.amd_devices else "none"
        code = "vendor-rocm" if host.amd_devices else "cuda-none"
        return [brief(code, need, have, "Run it on a runner with an NVIDIA GPU.")]
    if any(d.is_mig for d in reading.devices):
        remedy = "A process sees one MIG instance at most; run it where whole GPUs are."
        return [brief("cuda-mig", need, "MIG, which shows a process 1", remedy)]
    have = f"{count} visible of {total}" if count < total else str(count)
    return [brief("cuda-devices", need, have, "Run it on a runner with as many GPUs, or widen the mask.")]


def _hidden_reasons(requirement: Requirement, need: str, total: int) -> list[Reason]:
    """Devices that somebody hid on purpose: what can do without goes to the CPU."""
    if not requirement.devices:
        return []
    have = f"{total} hidden by {VISIBLE_DEVICES}" if total else f"hidden by {VISIBLE_DEVICES}"
    return [brief("cuda-hidden", need, have, f"Unset {VISIBLE_DEVICES}.")]


def _mistaken_reasons(requirement: Requirement, need: str, reading: MaskReading, total: int) -> list[Reason]:
    remedy = f"{reading.notes[0]}." if reading.notes else f"Correct {VISIBLE_DEVICES}."
    # A mask that names nothing is a mistake. A test that would go on without a device must not do so quietly.
    rank = Rank.HARDWARE if requirement.devices else Rank.UNUSABLE
    return [brief("cuda-mask", need, f"{total} hidden by a mistaken mask", remedy, rank)]


def _driver_reasons(requirement: Requirement, host: Host) -> list[Reason]:
    wanted = ",".join(requirement.driver)
    if host.driver_cuda is None:
        return [unknown(f"needs a driver for CUDA {wanted}", "a driver that does not tell")]
    if version_tuple_fits(host.driver_cuda, requirement.driver, "driver"):
        return []
    have = "CUDA {}.{} (driver {})".format(*host.driver_cuda, host.driver or "unknown")
    return [brief("cuda-driver", f"needs a driver for CUDA {wanted}", have, "Update the NVIDIA driver.")]


def _best_device_reasons(requirement: Requirement, host: Host, visible: Sequence[CudaDevice]) -> list[Reason]:
    """What the devices lack that come closest, where too few of them fit."""
    per_device = sorted((device_reasons(requirement, d, host) for d in visible), key=len)
    # Of three that are needed the third best decides; where there are two, what the second lacks is worth knowing.
    place = min(requirement.device_count, len(per_device)) - 1
    return list(per_device[place])


def _cpu_reasons(requirement: Requirement, host: Host) -> list[Reason]:
    """What the CPU lacks, for a test that runs there where no device is."""
    reasons: list[Reason] = []
    for backend in requirement.attn_backends:
        reasons += attention.device_reasons(backend, requirement.cell_dtype, None, host.software)
    for method in requirement.quantization:
        reasons += quantization.device_reasons(method, None)
    return reasons


def with_cell(requirement: Requirement, backends: Sequence[str], dtype: str | None) -> Requirement:
    """The requirement of a test in one cell: these backends (one, or one per sub-config), taking this dtype."""
    cell = Requirement(device_if_any=True, attn_backends=tuple(backends))
    return replace(requirement.merged(cell), cell_dtype=dtype)
