"""What NVML says about this machine.  The only file that talks to pynvml.

Every query is guarded by itself: one that fails makes its own fact unknown and nothing else. Return codes and
structures: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cudaenv.host.catalog import CATALOG
from pytest_cudaenv.host.devices import (
    UNKNOWN_NAME,
    Capability,
    CudaDevice,
    DeviceUsage,
    Problem,
    cuda_version,
    renumbered,
)
from pytest_cudaenv.host.problems import PROBLEMS

SUCCESS = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
UNKNOWN = 999

PROBLEM_OF_CODE = {
    NO_PERMISSION: "nvml-permission",
    9: "driver-not-loaded",
    LIBRARY_NOT_FOUND: "nvml-missing",
    FUNCTION_NOT_FOUND: "nvml-too-old",
    15: "gpu-lost",
    16: "gpu-reset-required",
    17: "nvml-permission",  # the operating system blocked the request: a cgroup without the device
    18: "nvml-mismatch",
}
"""NVML's return codes that have a remedy of their own; every other is `nvml-unknown`."""

MEMORY_V2 = 0x02000028
"""`nvmlMemory_v2`: the version word of a structure of 40 bytes."""

XID_EVENT = 0x8
"""`nvmlEventTypeXidCriticalError`."""

NO_INSTANCE = 0xFFFFFFFF
"""What an event names as instance that concerns none."""

MOST_EVENTS = 1000
"""Events that are taken in at once: a GPU that fails may report without end."""

MOST_INSTANCES = 8
"""More MIG instances than any GPU has, for drivers that do not tell how many."""

# The catalogue's, and those of the TX1, the TX2 and of Thor under CUDA 12.
_UNIFIED_CAPABILITIES = {k.capability for k in CATALOG.values() if k.unified_memory} | {(5, 3), (6, 2), (10, 1)}
_DISCRETE_CAPABILITIES = {k.capability for k in CATALOG.values() if not k.unified_memory}
_UNIFIED_NAME = re.compile(r"\b(Tegra|Xavier|Orin|Thor|GB10)\b")

_UUID = re.compile(r"((?:GPU|MIG)-)?([0-9A-Fa-f][0-9A-Fa-f-]+)|MIG-GPU-[0-9A-Fa-f-]+/[0-9]+/[0-9]+")


@dataclass(frozen=True)
class NvmlAnswer:
    """What NVML says; `problem` is set where it says nothing, or no GPU that it counts can be used."""

    devices: tuple[CudaDevice, ...] = ()
    """In PCI bus order; a GPU in MIG mode is represented by its instances. Empty where `problem` is set."""
    driver: str | None = None
    driver_cuda: Capability | None = None
    """The newest CUDA version that the driver supports, (major, minor)."""
    problem: Problem | None = None
    found_library: bool = False
    """Whether there is an NVML on this machine, working or not."""
    notes: tuple[str, ...] = ()
    """One for each GPU that is left out, and why."""


def read_nvml(root: Path = Path("/")) -> NvmlAnswer:
    """What NVML says about this machine; never raises, and leaves NVML shut down.

    `root` is where `/proc` and WSL's libraries are looked for.
    """
    if _is_library_missing(root):
        return NvmlAnswer(problem=PROBLEMS["nvml-missing"])
    binding = _binding(root)
    if binding is None:
        note = "the module pynvml (nvidia-ml-py) can't be imported"
        return NvmlAnswer(problem=PROBLEMS["nvml-missing"], notes=(note,))
    nvml = _Nvml(binding)
    code = nvml.ask("nvmlInit").code
    if code != SUCCESS:
        return NvmlAnswer(problem=_problem_of(code), found_library=code != LIBRARY_NOT_FOUND)
    try:
        return _read(nvml, root)
    finally:
        nvml.ask("nvmlShutdown")


def read_usage(uuids: Iterable[str], root: Path = Path("/")) -> dict[str, DeviceUsage]:
    """What is in use now of the devices with these UUIDs; those of which NVML does not tell are left out."""
    binding = _binding(root)
    if binding is None:
        return {}
    nvml = _Nvml(binding)
    if nvml.ask("nvmlInit").code != SUCCESS:
        return {}
    try:
        found = {uuid: _usage(nvml, uuid) for uuid in uuids}
    finally:
        nvml.ask("nvmlShutdown")
    return {uuid: usage for uuid, usage in found.items() if usage is not None}


def free_memory(uuid: str, root: Path = Path("/")) -> int | None:
    """Bytes that nobody uses now on the device with this UUID; None where NVML does not tell."""
    usage = read_usage([uuid], root).get(uuid)
    return None if usage is None else usage.free


class Xid(NamedTuple):
    """An error that the driver has reported of a GPU: https://docs.nvidia.com/deploy/xid-errors/"""

    code: int
    uuid: str
    """Of the whole GPU."""
    gpu_instance: int | None
    """Of the MIG instance that it concerns; None for the whole, or where that is not told."""

    def concerns(self, device: CudaDevice) -> bool:
        """Whether it may be this device's."""
        if self.uuid != (device.mig_parent or device.uuid):
            return False
        return self.gpu_instance is None or device.mig_ids is None or device.mig_ids[0] == self.gpu_instance


class XidWatch:
    """The Xid errors of some devices since it was started; silent of what the driver does not tell."""

    @classmethod
    def start(cls, devices: Sequence[CudaDevice], root: Path = Path("/")) -> XidWatch | None:
        """Begin to listen; None where no GPU of these reports such events. Keeps NVML open until `close`."""
        if _is_library_missing(root) or (binding := _binding(root)) is None:
            return None
        nvml = _Nvml(binding)
        if nvml.ask("nvmlInit").code != SUCCESS:
            return None
        events = nvml.ask("nvmlEventSetCreate").value
        gpus = dict.fromkeys(device.mig_parent or device.uuid for device in devices)
        if events is not None and [uuid for uuid in gpus if _reports_xids(nvml, uuid, events)]:
            return cls(nvml, events)
        if events is not None:
            nvml.ask("nvmlEventSetFree", events)
        nvml.ask("nvmlShutdown")
        return None

    def __init__(self, nvml: _Nvml, events: object) -> None:
        self._nvml = nvml
        self._events = events
        self._seen: list[Xid] = []

    def seen(self, wait_ms: int = 0) -> tuple[Xid, ...]:
        """All so far, each once, in the order in which they came; waits so long for the first that is new."""
        for _ in range(MOST_EVENTS):
            data, code = self._nvml.ask("nvmlEventSetWait_v2", self._events, wait_ms)
            if code == FUNCTION_NOT_FOUND:
                data = self._nvml.ask("nvmlEventSetWait", self._events, wait_ms).value
            if data is None:  # nothing more came in that time, or the GPU is lost, and can tell no more
                break
            wait_ms = 0
            uuid, _ = _uuid(self._nvml, data.device)
            if data.eventType & XID_EVENT and uuid is not None:
                instance = getattr(data, "gpuInstanceId", NO_INSTANCE)
                xid = Xid(int(data.eventData), uuid, None if instance == NO_INSTANCE else int(instance))
                if xid not in self._seen:
                    self._seen.append(xid)
        return tuple(self._seen)

    def close(self) -> None:
        """Stop listening."""
        self._nvml.ask("nvmlEventSetFree", self._events)
        self._nvml.ask("nvmlShutdown")


def _reports_xids(nvml: _Nvml, uuid: str, events: object) -> bool:
    """Have a GPU report its Xid errors to a set of events; False where it cannot."""
    handle, code = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
    if code != SUCCESS:
        return False
    supported = nvml.ask("nvmlDeviceGetSupportedEventTypes", handle).value
    if supported is not None and not supported & XID_EVENT:
        return False
    return nvml.ask("nvmlDeviceRegisterEvents", handle, XID_EVENT, events).code == SUCCESS


class _Reply(NamedTuple):
    """What one query answered: a value, or None and the code that says why."""

    value: Any
    code: int = SUCCESS


class _Nvml:
    """NVML's functions by name, none of which raises."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def ask(self, name: str, *arguments: object) -> _Reply:
        """The reply of one function; a binding that lacks it replies like a library that does."""
        function = getattr(self._binding, name, None)
        if function is None:
            return _Reply(None, FUNCTION_NOT_FOUND)
        try:
            return _Reply(function(*arguments))
        except UnicodeDecodeError as error:
            # nvidia-ml-py decodes strictly, and R555 under WSL answers names that are not UTF-8.
            return _Reply(error.object)
        except Exception as error:
            code = getattr(error, "value", None)
            return _Reply(None, code if isinstance(code, int) else UNKNOWN)

    def ask_first(self, *names: str) -> _Reply:
        """The reply of the first function that answers, of versions from new to old."""
        reply = _Reply(None, FUNCTION_NOT_FOUND)
        for name in names:
            reply = self.ask(name)
            if reply.code == SUCCESS:
                break
        return reply


def _is_library_missing(root: Path) -> bool:
    """Whether the loader finds no NVML: then pynvml, whose import is the dearest part of a start, is not needed."""
    if sys.platform != "linux" or "pynvml" in sys.modules or _wsl_library(root) is not None:
        return False
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return True
    return False


def _wsl_library(root: Path) -> Path | None:
    library = root / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    return library if _is_wsl(root) and library.exists() else None


def _binding(root: Path) -> Any | None:
    with warnings.catch_warnings():
        # The PyPI project `pynvml` installs a module of the same name that warns at import.
        warnings.simplefilter("ignore")
        try:
            import pynvml
        except Exception:
            return None
    library = _wsl_library(root)
    if library is not None and getattr(pynvml, "nvmlLib", None) is None:
        # A distribution's own libnvidia-ml, found first on the path, does not work under WSL.
        with contextlib.suppress(OSError):
            pynvml.nvmlLib = ctypes.CDLL(str(library))
    return pynvml


def _is_wsl(root: Path) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def _problem_of(code: int) -> Problem:
    known = PROBLEM_OF_CODE.get(code)
    if known is None and code != UNKNOWN:
        return replace(PROBLEMS["nvml-unknown"], have=f"NVML, which fails with code {code}")
    return PROBLEMS[known or "nvml-unknown"]


def _read(nvml: _Nvml, root: Path) -> NvmlAnswer:
    driver = _text(nvml.ask("nvmlSystemGetDriverVersion").value)
    # Version 2 asks the libcuda that a program would load; version 1 answers from the driver alone.
    version = nvml.ask_first("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion").value
    answer = NvmlAnswer(driver=driver, driver_cuda=cuda_version(version), found_library=True)
    count = nvml.ask("nvmlDeviceGetCount")
    if count.code != SUCCESS:
        return replace(answer, problem=_problem_of(count.code))
    gpus = [_read_gpu(nvml, index, root) for index in range(count.value)]
    # NVML promises no order. GPUs that do not tell their place come last, as NVML lists them.
    gpus.sort(key=lambda gpu: (gpu.place is None, gpu.place or ()))
    devices = renumbered(device for gpu in gpus for device in gpu.devices)
    faults = [fault for gpu in gpus for fault in gpu.faults]
    problem = faults[0].problem if faults and not devices else None
    return replace(answer, devices=devices, problem=problem, notes=tuple(fault.note for fault in faults))


class _Fault(NamedTuple):
    """Why a GPU, or an instance of it, is left out."""

    note: str
    problem: Problem


class _Gpu(NamedTuple):
    """What one index of NVML stands for: a GPU, its instances, or nothing that can be used."""

    place: tuple[int, int, int] | None
    """(domain, bus, device)."""
    devices: tuple[CudaDevice, ...] = ()
    faults: tuple[_Fault, ...] = ()


def _read_gpu(nvml: _Nvml, index: int, root: Path) -> _Gpu:
    handle, code = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if code != SUCCESS:
        return _Gpu(None, faults=(_left_out(f"the GPU at NVML index {index}", _problem_of(code)),))
    place = _place(nvml, handle)
    uuid, code = _uuid(nvml, handle)
    gpu = CudaDevice(
        index=index,
        uuid=uuid or "",
        name=_text(nvml.ask("nvmlDeviceGetName", handle).value) or UNKNOWN_NAME,
        capability=_capability(nvml, handle),
        total_memory=None,
        pci_bus_id="{:08X}:{:02X}:{:02X}.0".format(*place) if place else None,
    )
    if _is_in_mig_mode(nvml, handle):
        return _read_instances(nvml, handle, gpu, place)
    if not uuid:
        problem = _problem_of(code) if code in PROBLEM_OF_CODE else PROBLEMS["gpu-no-uuid"]
        return _Gpu(place, faults=(_left_out(f"{gpu.name} at NVML index {index}", problem),))
    total, unified = _memory(nvml, handle, gpu, root)
    whole = replace(gpu, total_memory=total, unified_memory=unified, multiprocessors=_multiprocessors(nvml, handle))
    return _Gpu(place, (whole,))


def _left_out(what: str, problem: Problem) -> _Fault:
    return _Fault(f"{what} is left out ({problem.code}: {problem.have}). {problem.remedy}", problem)


def _is_in_mig_mode(nvml: _Nvml, handle: object) -> bool:
    modes = nvml.ask("nvmlDeviceGetMigMode", handle).value  # [current, pending]
    return bool(modes) and modes[0] == 1


def _read_instances(nvml: _Nvml, handle: object, gpu: CudaDevice, place: tuple[int, int, int] | None) -> _Gpu:
    """The MIG instances of a GPU, none of which says anything about the whole."""
    devices: list[CudaDevice] = []
    faults: list[_Fault] = []
    for instance, code in _instance_handles(nvml, handle):
        uuid, uuid_code = _uuid(nvml, instance) if code == SUCCESS else (None, code)
        if uuid is None:
            problem = _problem_of(uuid_code) if uuid_code in PROBLEM_OF_CODE else PROBLEMS["gpu-no-uuid"]
            faults.append(_left_out(f"a MIG instance of {gpu.name}", problem))
            continue
        devices.append(
            replace(
                gpu,
                uuid=uuid,
                name=_text(nvml.ask("nvmlDeviceGetName", instance).value) or f"{gpu.name} MIG",
                # In a container the whole GPU's memory may be forbidden, and it is never the instance's.
                total_memory=_reported_memory(nvml, instance)[0],
                multiprocessors=_multiprocessors(nvml, instance),
                unified_memory=_is_unified_part(gpu),
                mig_parent=gpu.uuid or None,
                mig_ids=_mig_ids(nvml, instance),
            )
        )
    if not devices and not faults:
        faults.append(_left_out(f"{gpu.name} at NVML index {gpu.index}", PROBLEMS["mig-empty"]))
    return _Gpu(place, tuple(devices), tuple(faults))


def _instance_handles(nvml: _Nvml, handle: object) -> Iterator[_Reply]:
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle).value or MOST_INSTANCES
    for number in range(most):
        reply = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if reply.code != NOT_FOUND:  # indices may have gaps
            yield reply


def _mig_ids(nvml: _Nvml, instance: object) -> tuple[int, int] | None:
    gpu_instance = nvml.ask("nvmlDeviceGetGpuInstanceId", instance).value
    compute_instance = nvml.ask("nvmlDeviceGetComputeInstanceId", instance).value
    return None if gpu_instance is None or compute_instance is None else (gpu_instance, compute_instance)


def _text(value: object) -> str | None:
    """A text that NVML answered, as bytes from old bindings; None where it did not, or an empty one."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text.strip() or None if isinstance(text, str) else None


def _uuid(nvml: _Nvml, handle: object) -> tuple[str | None, int]:
    """The UUID in the spelling that CUDA takes, or None and the code that says why."""
    value, code = nvml.ask("nvmlDeviceGetUUID", handle)
    match = _UUID.fullmatch(_text(value) or "")
    if match is None:
        return None, code
    # Jetson's NVML leaves the prefix out.
    return f"GPU-{match[0]}" if match[2] and not match[1] else match[0], code


def _place(nvml: _Nvml, handle: object) -> tuple[int, int, int] | None:
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle).value
    return (pci.domain, pci.bus, pci.device) if pci is not None else None


def _capability(nvml: _Nvml, handle: object) -> Capability | None:
    value = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle).value
    return (value[0], value[1]) if value and value[0] else None


def _multiprocessors(nvml: _Nvml, handle: object) -> int | None:
    attributes = nvml.ask("nvmlDeviceGetAttributes_v2", handle).value
    return attributes.multiprocessorCount or None if attributes is not None else None


def _memory_info(nvml: _Nvml, handle: object) -> _Reply:
    reply = nvml.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
    return reply if reply.code == SUCCESS else nvml.ask("nvmlDeviceGetMemoryInfo", handle)


def _reported_memory(nvml: _Nvml, handle: object) -> tuple[int | None, int]:
    """Bytes in total, or None and the code that says why; a stub's zero is no answer."""
    info, code = _memory_info(nvml, handle)
    return (info.total or None) if info is not None else None, code


def _usage(nvml: _Nvml, uuid: str) -> DeviceUsage | None:
    """What is in use of a device; None where NVML does not tell, or tells of memory that is the host's."""
    handle, code = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
    info = _memory_info(nvml, handle).value if code == SUCCESS else None
    if info is None or not info.total:
        return None
    listed = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle).value
    processes = None if listed is None else tuple((p.pid, p.usedGpuMemory) for p in listed)
    return DeviceUsage(info.total, info.used, info.free, processes)


def _memory(nvml: _Nvml, handle: object, gpu: CudaDevice, root: Path) -> tuple[int | None, bool]:
    """(bytes in total, whether they are the host's)."""
    total, code = _reported_memory(nvml, handle)
    # "Not supported" means unified memory, except on a part that is known to have its own.
    silent = code == NOT_SUPPORTED and gpu.capability not in _DISCRETE_CAPABILITIES
    if _is_unified_part(gpu) or silent:
        # Some drivers answer with a carve-out of the memory that CUDA can use.
        return _host_memory(root) or total, True
    return total, False


def _is_unified_part(gpu: CudaDevice) -> bool:
    return gpu.capability in _UNIFIED_CAPABILITIES or bool(_UNIFIED_NAME.search(gpu.name))


def _host_memory(root: Path) -> int | None:
    """`MemTotal` in bytes."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^MemTotal:\s*([0-9]+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
