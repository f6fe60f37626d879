"""What is here: NVML's answer, CUDA's where NVML has none, and the difference between no GPU and no answer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_cudaenv.host.devices import Capability, CudaDevice, Host, Problem
from pytest_cudaenv.host.driver import DriverAnswer, ask_driver
from pytest_cudaenv.host.mask import DEVICE_ORDER, ORDERS, VISIBLE_DEVICES, models_differ
from pytest_cudaenv.host.nvml import NvmlAnswer, read_nvml
from pytest_cudaenv.host.problems import PROBLEMS
from pytest_cudaenv.host.software import Software, installed_software

GPU_NODES = re.compile(r"nvidia[0-9]+|nvhost-.+|nvgpu.*|nvmap")
"""Device nodes of a GPU: of a card, and of the integrated GPU of a Jetson."""

DRIVER_NODES = re.compile(rf"{GPU_NODES.pattern}|nvidiactl|dxg")
"""Those, the driver's own, and WSL's."""

NVIDIA, AMD = "0x10de", "0x1002"
"""PCI vendors."""


def detect_host(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Host:
    """The facts of this machine, before any mask; never raises.

    Starts no process where NVML works and the GPUs are all alike. `root` is where `/dev`, `/proc` and `/sys` are
    looked for.
    """
    software = replace(installed_software(), environ=dict(environ))
    try:
        return _detect(software, environ, root)
    except Exception as error:
        # Whatever went wrong, it must not read as "no GPU".
        return Host(software=software, problem=PROBLEMS["detection-failed"], notes=(f"detection failed: {error!r}",))


def _detect(software: Software, environ: Mapping[str, str], root: Path) -> Host:
    found = _find(environ, root)
    fastest_first, order_notes = _fastest_first(found.devices, environ)
    return Host(
        devices=found.devices,
        software=software,
        driver=found.driver or _kernel_driver(root),
        driver_cuda=found.driver_cuda,
        problem=found.problem,
        fastest_first=fastest_first,
        amd_devices=_count_amd(software, root),
        notes=(*found.notes, *order_notes),
    )


@dataclass(frozen=True)
class _Found:
    """NVIDIA devices, or why there are none; a problem and devices exclude each other."""

    devices: tuple[CudaDevice, ...] = ()
    driver: str | None = None
    driver_cuda: Capability | None = None
    problem: Problem | None = None
    notes: tuple[str, ...] = ()


def _find(environ: Mapping[str, str], root: Path) -> _Found:
    nvml = read_nvml(root)
    if nvml.devices:
        return _completed(nvml, environ)
    if _is_proven_none(nvml, root):
        return _Found(driver=nvml.driver, driver_cuda=nvml.driver_cuda, notes=_bare_gpu_notes(root))
    problem = nvml.problem or PROBLEMS["gpu-missing"]
    if problem.code == "nvml-mismatch":
        # CUDA talks to the same kernel module and fails as well.
        return _Found(driver=nvml.driver, driver_cuda=nvml.driver_cuda, problem=problem, notes=nvml.notes)
    return _from_driver(problem, nvml, ask_driver(_unmasked(environ, "PCI_BUS_ID")))


def _from_driver(problem: Problem, nvml: NvmlAnswer, cuda: DriverAnswer) -> _Found:
    """The devices that CUDA lists where NVML lists none; the problem where it lists none either."""
    if cuda.devices:
        note = f"NVML does not answer ({problem.code}), and the devices are those that CUDA lists. {problem.remedy}"
    else:
        note = f"CUDA has no device either: {cuda.error or 'it counts none'}"
    return _Found(
        devices=cuda.devices,
        driver=nvml.driver,
        driver_cuda=nvml.driver_cuda or cuda.version,
        problem=None if cuda.devices else problem,
        notes=(*nvml.notes, note),
    )


def _completed(nvml: NvmlAnswer, environ: Mapping[str, str]) -> _Found:
    """NVML's devices; what a stub of it leaves open (Jetson's does) is asked of CUDA."""
    devices, notes, version = nvml.devices, nvml.notes, nvml.driver_cuda
    if any(d.capability is None for d in devices):
        cuda = ask_driver(_unmasked(environ, "PCI_BUS_ID"))
        known = {d.uuid: d for d in cuda.devices}
        devices = tuple(_filled(d, known[d.uuid]) if d.uuid in known else d for d in devices)
        version = version or cuda.version
        if any(d.capability is None for d in devices):
            why = cuda.error or "it lists other devices"
            notes = (*notes, f"NVML does not tell every compute capability, and CUDA does not either ({why})")
    return _Found(devices, nvml.driver, version, notes=notes)


def _filled(device: CudaDevice, cuda: CudaDevice) -> CudaDevice:
    return replace(
        device,
        capability=device.capability or cuda.capability,
        total_memory=device.total_memory or cuda.total_memory,
        unified_memory=device.unified_memory or cuda.unified_memory,
        multiprocessors=device.multiprocessors or cuda.multiprocessors,
    )


def _unmasked(environ: Mapping[str, str], order: str) -> dict[str, str]:
    """The environment of a process that sees every device, in this order."""
    return {**{k: v for k, v in environ.items() if k != VISIBLE_DEVICES}, DEVICE_ORDER: order}


def _fastest_first(
    devices: tuple[CudaDevice, ...], environ: Mapping[str, str]
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """(UUIDs in CUDA's default order, notes); asked only where it matters and can differ from the bus order."""
    order = environ.get(DEVICE_ORDER)
    matters = order != "PCI_BUS_ID" and (order is None or order in ORDERS)
    # With MIG, CUDA lists one device, which tells no order.
    if not matters or not models_differ(devices) or any(d.is_mig for d in devices):
        return None, ()
    cuda = ask_driver(_unmasked(environ, "FASTEST_FIRST"))
    listed = tuple(d.uuid for d in cuda.devices)
    if {d.uuid for d in devices} <= set(listed):
        return listed, ()
    why = cuda.error or "it lists other devices than NVML"
    note = f"CUDA does not tell how it orders these GPUs ({why}). Set {DEVICE_ORDER}=PCI_BUS_ID"
    return None, (note,)


def _is_proven_none(nvml: NvmlAnswer, root: Path) -> bool:
    """Whether no NVIDIA device is here, as opposed to none that answers."""
    if nvml.problem is None:
        return not _nodes(root, GPU_NODES)
    if _has_driver_traces(root):
        return False
    if nvml.found_library and nvml.problem.code == "driver-not-loaded":
        # An image made for GPUs, with NVML in it, on a machine without: only the bus can tell.
        return _has_nvidia_gpu_on_bus(root) is False
    return not nvml.found_library


def _has_driver_traces(root: Path) -> bool:
    """Whether the kernel has, or shows this container, anything of an NVIDIA driver."""
    if (root / "proc/driver/nvidia/version").exists():
        return True
    nodes = _nodes(root, DRIVER_NODES)
    return bool(nodes) and not (nodes == {"dxg"} and _is_wsl_without_nvidia(root))


def _is_wsl_without_nvidia(root: Path) -> bool:
    """Whether Windows shares the libraries of its GPUs and NVIDIA's are not among them (an AMD or Intel laptop)."""
    libraries = root / "usr/lib/wsl/lib"
    return (libraries / "libdxcore.so").exists() and not any(libraries.glob("libcuda.so*"))


def _nodes(root: Path, names: re.Pattern[str]) -> set[str]:
    try:
        return {name for name in os.listdir(root / "dev") if names.fullmatch(name)}
    except OSError:
        return set()


def _has_nvidia_gpu_on_bus(root: Path) -> bool | None:
    """Whether the PCI bus has a GPU of NVIDIA's; None where the bus shows nothing at all."""
    devices = [(_read(f), _read(f.with_name("class"))) for f in root.glob("sys/bus/pci/devices/*/vendor")]
    seen = [(vendor, kind) for vendor, kind in devices if vendor is not None]
    if not seen:
        return None
    # NVIDIA also makes bridges, switches and sound chips. Class 3 is a display controller, as every GPU is.
    return any(vendor == NVIDIA and (kind is None or kind.startswith("0x03")) for vendor, kind in seen)


def _bare_gpu_notes(root: Path) -> tuple[str, ...]:
    if not _has_nvidia_gpu_on_bus(root):
        return ()
    note = "the PCI bus has an NVIDIA GPU, but neither its driver nor its device nodes are here: it counts as none"
    return (note,)


def _kernel_driver(root: Path) -> str | None:
    """The version of the loaded kernel module, `580.159.04`."""
    match = re.search(r"Kernel Module\b.*?\s([0-9]+(?:\.[0-9]+)+)\s", _read(root / "proc/driver/nvidia/version") or "")
    return match[1] if match else None


def _count_amd(software: Software, root: Path) -> int:
    """AMD GPUs that a ROCm build could use; none is counted where nothing here is made for them."""
    if not (software.torch is not None and software.torch.hip) and not (root / "dev/kfd").exists():
        return 0
    ids = [_read(f) for f in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")]
    # A node without a GPU (a CPU) has the id 0, and one that this container may not use cannot be read.
    computing = sum(1 for i in ids if i not in (None, "", "0"))
    cards = [f for f in root.glob("sys/class/drm/card*/device/vendor") if re.fullmatch(r"card[0-9]+", f.parts[-3])]
    return computing or sum(1 for card in cards if _read(card) == AMD)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
