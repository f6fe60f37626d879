"""The header: what decides this run, one line each; pure functions of facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_cudaenv.host.devices import CudaDevice, Host
from pytest_cudaenv.host.mask import VISIBLE_DEVICES, MaskReading
from pytest_cudaenv.requirements.sizes import format_memory

PREFIX = "cudaenv: "


def header_lines(
    host: Host,
    reading: MaskReading,
    provenance: Mapping[str, str],
    environ: Mapping[str, str],
    warnings: Iterable[str] = (),
) -> list[str]:
    """What a reader needs to believe the run: devices, driver, torch, settings with their origin, warnings."""
    lines = [f"{_simulated(host)}{_devices(host, reading)}; {_software(host)}"]
    lines += [f"{setting} ({origin})" for setting, origin in provenance.items()]
    lines += [f"warning: {warning}" for warning in (*_mask_warnings(host, reading, environ), *warnings)]
    lines += [f"note: {note}" for note in host.notes]
    return [PREFIX + line for line in lines]


def _simulated(host: Host) -> str:
    return f"SIMULATED {host.simulated}: " if host.simulated else ""


def _devices(host: Host, reading: MaskReading) -> str:
    if host.problem is not None:
        return f"NVIDIA device present but unusable: {host.problem.have} [{host.problem.code}]"
    if not host.devices:
        amd = f", {host.amd_devices} AMD GPU(s) that are not CUDA devices" if host.amd_devices else ""
        return f"no NVIDIA device{amd}: tests that need one do not run, cells run on the CPU"
    if not reading.devices:
        return f"none of {len(host.devices)} CUDA device(s) is visible"
    return ", ".join(_counted(reading.devices))


def _counted(devices: Sequence[CudaDevice]) -> list[str]:
    """`2 x NVIDIA H200 (9.0, 140.4 GiB)`: equal devices once, in the order in which CUDA lists them."""
    return [f"{count} x {text}" for text, count in Counter(describe_device(d) for d in devices).items()]


def describe_device(device: CudaDevice) -> str:
    """`NVIDIA H200 (9.0, 140.4 GiB)`; what no query answered is `unknown`."""
    capability = "unknown capability" if device.capability is None else "{}.{}".format(*device.capability)
    memory = "unknown memory" if device.total_memory is None else format_memory(device.total_memory)
    return f"{device.name} ({capability}, {memory}{' shared with the host' if device.unified_memory else ''})"


def _software(host: Host) -> str:
    cuda = f", CUDA {host.driver_cuda[0]}.{host.driver_cuda[1]}" if host.driver_cuda else ""
    parts = [f"driver {host.driver}{cuda}"] if host.driver else []
    torch = host.software.torch
    if torch is None:
        return "; ".join([*parts, "torch not installed"])
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU build"
    return "; ".join([*parts, f"torch {torch.version} ({build})"])


def _mask_warnings(host: Host, reading: MaskReading, environ: Mapping[str, str]) -> list[str]:
    warnings = list(reading.notes)
    mask = environ.get(VISIBLE_DEVICES)
    if mask is not None and reading.hidden and host.devices:
        hidden = f"{len(reading.hidden)} of {len(host.devices)} device(s)"
        warnings.insert(0, f"{VISIBLE_DEVICES}={mask} hides {hidden}")
    return warnings
