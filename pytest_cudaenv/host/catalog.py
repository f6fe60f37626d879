"""Known NVIDIA devices, from which simulated hosts are made.

Totals are what NVML was seen to answer (MiB, as in public `nvidia-smi` and cloud listings), so that "80 GB" means
here what it means on the real card. Capabilities: https://developer.nvidia.com/cuda-gpus. Parts with unified
memory (Orin, Thor, GB10) answer no NVML memory query; their total is the host's.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from pytest_cudaenv.host.devices import Capability, CudaDevice, Host
from pytest_cudaenv.host.software import Software, TorchBuild, torch_build_of

MiB = 1024**2

SIMULATED_DRIVER, SIMULATED_DRIVER_CUDA = "580.95.05", (13, 0)


@dataclass(frozen=True)
class KnownDevice:
    """One row of the catalogue."""

    name: str
    """The product name as NVML reports it."""
    capability: Capability
    total_mib: int
    multiprocessors: int
    unified_memory: bool = False


CATALOG: dict[str, KnownDevice] = {
    "p100": KnownDevice("Tesla P100-SXM2-16GB", (6, 0), 16384, 56),
    "p40": KnownDevice("Tesla P40", (6, 1), 22919, 30),
    "v100": KnownDevice("Tesla V100-SXM2-16GB", (7, 0), 16384, 80),
    "v100-32": KnownDevice("Tesla V100-SXM2-32GB", (7, 0), 32768, 80),
    "xavier": KnownDevice("Xavier", (7, 2), 31919, 8, unified_memory=True),
    "t4": KnownDevice("Tesla T4", (7, 5), 15360, 40),
    "rtx2080ti": KnownDevice("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11264, 68),
    "a100": KnownDevice("NVIDIA A100-SXM4-40GB", (8, 0), 40960, 108),
    "a100-80": KnownDevice("NVIDIA A100-SXM4-80GB", (8, 0), 81920, 108),
    "a30": KnownDevice("NVIDIA A30", (8, 0), 24576, 56),
    "a10": KnownDevice("NVIDIA A10", (8, 6), 23028, 72),
    "a10g": KnownDevice("NVIDIA A10G", (8, 6), 23028, 80),
    "rtx3090": KnownDevice("NVIDIA GeForce RTX 3090", (8, 6), 24576, 82),
    "orin": KnownDevice("Orin (nvgpu)", (8, 7), 62841, 16, unified_memory=True),
    "l4": KnownDevice("NVIDIA L4", (8, 9), 23034, 58),
    "l40s": KnownDevice("NVIDIA L40S", (8, 9), 46068, 142),
    "rtx4090": KnownDevice("NVIDIA GeForce RTX 4090", (8, 9), 24564, 128),
    "h100": KnownDevice("NVIDIA H100 80GB HBM3", (9, 0), 81559, 132),
    "h100-pcie": KnownDevice("NVIDIA H100 PCIe", (9, 0), 81559, 114),
    "h200": KnownDevice("NVIDIA H200", (9, 0), 143771, 132),
    "gh200": KnownDevice("NVIDIA GH200 480GB", (9, 0), 97871, 132),
    "b200": KnownDevice("NVIDIA B200", (10, 0), 183359, 148),
    "gb200": KnownDevice("NVIDIA GB200", (10, 0), 189471, 152),
    "b300": KnownDevice("NVIDIA B300 SXM6 AC", (10, 3), 275040, 148),
    "gb300": KnownDevice("NVIDIA GB300", (10, 3), 284208, 152),
    "thor": KnownDevice("NVIDIA Thor", (11, 0), 125747, 20, unified_memory=True),
    "rtx5090": KnownDevice("NVIDIA GeForce RTX 5090", (12, 0), 32607, 170),
    "rtxpro6000": KnownDevice("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97887, 188),
    "gb10": KnownDevice("NVIDIA GB10", (12, 1), 124610, 48, unified_memory=True),
}

ALIASES = {
    "v100-16": "v100",
    "a100-40": "a100",
    "h100-sxm": "h100",
    "2080ti": "rtx2080ti",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "spark": "gb10",
    "dgx-spark": "gb10",
}

MAX_COUNT = 16
"""As many devices as a simulated host may have: their UUIDs differ in the first hexadecimal digit."""


class UnknownDeviceError(ValueError):
    """A name or count that the catalogue does not have; the text names the choices."""


def parse_simulated(text: str) -> tuple[str, int]:
    """`"h100:2"` -> ("h100", 2).

    Raises UnknownDeviceError for a name that is not in the catalogue and a count outside 1 to 16.
    """
    name, colon, count_text = text.strip().lower().partition(":")
    key = ALIASES.get(name, name)
    if key not in CATALOG:
        raise UnknownDeviceError(f"unknown device {name!r}; choose from {', '.join(CATALOG)}")
    if not colon:
        return key, 1
    if not re.fullmatch(r"[0-9]+", count_text) or not 1 <= int(count_text) <= MAX_COUNT:
        raise UnknownDeviceError(f"{text!r}: the count is a number from 1 to {MAX_COUNT}")
    return key, int(count_text)


def simulated_host(text: str, software: Software | None = None) -> Host:
    """The host that `NAME[:COUNT]` describes, with the given software.

    Its torch is taken to be a CUDA build that fits, unless the build is assumed by name (`torch==2.11.0+cpu`):
    the question is what would run there, and this machine's wheel says nothing about that one.
    """
    key, count = parse_simulated(text)
    software = software or Software()
    version = software.version("torch") or (software.torch.version if software.torch else None)
    if version is not None and not ("torch" in software.assumed and torch_build_of(version)):
        # CUDA 13 has no code for what is older than Turing.
        cuda = "{}.{}".format(*SIMULATED_DRIVER_CUDA) if CATALOG[key].capability >= (7, 5) else "12.6"
        build = TorchBuild(version.partition("+")[0], cuda=cuda)
        software = replace(software, torch=build)
    return Host(
        devices=tuple(simulated_device(key, i) for i in range(count)),
        software=software,
        driver=SIMULATED_DRIVER,
        driver_cuda=SIMULATED_DRIVER_CUDA,
        simulated=f"{key}:{count}",
    )


def simulated_device(key: str, index: int) -> CudaDevice:
    """The index-th device of a simulated host; its UUID is the same on every machine."""
    known = CATALOG[key]
    digits = hashlib.sha256(f"{key}:{index}".encode()).hexdigest()
    uuid = f"{index:x}{digits[1:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"
    return CudaDevice(
        index=index,
        uuid=f"GPU-{uuid}",
        name=known.name,
        capability=known.capability,
        total_memory=known.total_mib * MiB,
        unified_memory=known.unified_memory,
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        multiprocessors=known.multiprocessors,
    )
