"""Whether the installed torch can use the host's driver and has code for its devices."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping

from pytest_cudaenv.host.devices import CudaDevice, Host
from pytest_cudaenv.host.software import TorchBuild, torch_build_of
from pytest_cudaenv.requirements.capability import TEGRA, any_runs_on
from pytest_cudaenv.requirements.reason import Rank, Reason, brief

RELEASES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("12.6", "x86_64"): ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    ("12.6", "aarch64"): ("sm_80", "sm_90"),
    ("12.9", "x86_64"): ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    ("12.9", "aarch64"): ("sm_80", "sm_90", "sm_100", "sm_120"),
    ("13.0", "x86_64"): ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    ("13.0", "aarch64"): ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120"),
    ("13.2", "x86_64"): ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    ("13.2", "aarch64"): ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120"),
}
"""(CUDA, machine) -> the code in PyTorch's release wheels, from RELEASES_SINCE on.

https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py (PYTORCH_RELEASES_CODE_CC)
"""

RELEASES_SINCE = (2, 13)
"""The release that RELEASES was read from; what older wheels hold under the same CUDA version, it does not say."""


def host_reasons(host: Host) -> list[Reason]:
    """Why this torch can use none of the host's devices: built for something else, or too new for the driver.

    No torch is no reason: a suite may use another library, and one that needs torch says so.
    """
    torch = host.software.torch
    if torch is None or not host.devices:
        return []
    if torch.hip is not None:
        return [
            brief(
                "vendor-rocm",
                "needs a CUDA build of torch",
                f"torch {torch.version}",
                "Install a CUDA build of torch.",
                Rank.UNUSABLE,
            )
        ]
    if torch.cuda is None:
        remedy = "Install a CUDA build of torch, or hide the devices with CUDA_VISIBLE_DEVICES=-1."
        return [brief("torch-cpu", "needs a CUDA build of torch", f"torch {torch.version}", remedy, Rank.UNUSABLE)]
    return _driver_reasons(host, torch.cuda)


def _driver_reasons(host: Host, cuda: str) -> list[Reason]:
    """Majors decide: within one, any driver runs any toolkit's code.

    https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    major = _leading_number(cuda)
    if major is None or host.driver_cuda is None or host.driver_cuda[0] >= major:
        return []
    have = "driver {} for CUDA {}.{}".format(host.driver or "unknown", *host.driver_cuda)
    remedy = f"Update the NVIDIA driver, or install a torch built for CUDA {host.driver_cuda[0]}."
    return [brief("torch-driver", f"torch needs CUDA {major}", have, remedy, Rank.UNUSABLE)]


def _leading_number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def device_reasons(device: CudaDevice, torch: TorchBuild | None) -> list[Reason]:
    """Why this torch has no code for the device; empty where it has, or where either is unknown."""
    if torch is None or torch.cuda is None:
        return []
    archs = torch.arch_list or _release_archs(device, torch)
    if archs is None or device.capability is None or any_runs_on(archs, device.capability):
        return []
    need = "torch needs code for sm_{}{}".format(*device.capability)
    remedy = f"Install a torch with code for it: {torch.version} has {', '.join(archs)}."
    return [brief("torch-arch", need, f"none ({device.short_name})", remedy, Rank.UNUSABLE)]


def _release_archs(device: CudaDevice, torch: TorchBuild) -> tuple[str, ...] | None:
    """What PyTorch's own wheel of this version holds for such a device; None where nobody says.

    A release wheel names its CUDA in its local version. NVIDIA's containers, the wheels for Jetson, conda and
    source builds do not, and are built for what their makers chose.
    """
    if device.capability in TEGRA:
        return None
    return release_archs(torch)


def release_archs(torch: TorchBuild) -> tuple[str, ...] | None:
    """The code in PyTorch's own wheel of this version and CUDA, for this machine; None for any other build."""
    release = torch_build_of(torch.version)
    if release is None or release.cuda != torch.cuda or torch.cuda is None:
        return None
    machine = "aarch64" if platform.machine().lower() in {"aarch64", "arm64"} else "x86_64"
    if told := _told_by_torch(torch, machine):
        return told
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < RELEASES_SINCE:
        return None
    return RELEASES.get((torch.cuda, machine))


def _told_by_torch(torch: TorchBuild, machine: str) -> tuple[str, ...] | None:
    """The same table as the torch of this process has it, if one of that release is imported already."""
    module = sys.modules.get("torch")
    version = str(getattr(module, "__version__", ""))
    if version.split(".")[:2] != torch.version.split(".")[:2]:
        return None
    table = getattr(getattr(module, "cuda", None), "PYTORCH_RELEASES_CODE_CC", {})
    codes = table.get(torch.cuda)
    if isinstance(codes, Mapping):  # by machine since 2.13; one set before
        codes = codes.get(machine)
    return tuple(f"sm_{code}" for code in sorted(codes)) if codes else None


def nccl_reasons(torch: TorchBuild | None) -> list[Reason]:
    """Why there is no NCCL: it comes with torch's GPU builds, and only with them."""
    if torch is not None and (torch.cuda or torch.hip):
        return []
    have = f"torch {torch.version}" if torch else "no torch"
    return [brief("nccl-missing", "needs NCCL", have, "Install a CUDA build of torch.", Rank.MISSING)]
