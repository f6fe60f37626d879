"""Sets of compute capabilities, and which compiled code runs on which of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_cudaenv.host.devices import Capability, CudaDevice

NEWEST: Capability = (99, 9)

TEGRA: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
"""Integrated parts (TX1, TX2, Xavier, Orin, Thor); sm_101 is Thor's name under CUDA 12."""

_OWN_CODE_ONLY: frozenset[Capability] = TEGRA - {(11, 0)}
# torch's DEVICE_REQUIREMENT says the same of every arch that it knows:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py


@dataclass(frozen=True)
class Capabilities:
    """A set of compute capabilities: inclusive ranges, and the words in which a message names them."""

    text: str
    ranges: tuple[tuple[Capability, Capability], ...]

    def __contains__(self, capability: object) -> bool:
        return any(low <= capability <= high for low, high in self.ranges)  # type: ignore[operator]


def at_least(major: int, minor: int) -> Capabilities:
    """That capability and every newer one, of whatever family."""
    return Capabilities(f"capability {major}.{minor}", (((major, minor), NEWEST),))


def exactly(text: str, *families: int | Capability) -> Capabilities:
    """These capabilities, (major, minor), and these majors with every minor; nothing in between, nothing newer.

    Blackwell is three families (10.x, 11.0, 12.x) that run each other's code as little as Hopper's.
    """
    return Capabilities(text, tuple(((f, 0), (f, 9)) if isinstance(f, int) else (f, f) for f in families))


def describe(device: CudaDevice) -> str:
    """`8.6 (A10G)`."""
    capability = "unknown" if device.capability is None else "{}.{}".format(*device.capability)
    return f"{capability} ({device.short_name})"


_ARCH = re.compile(r"(?P<kind>sm_|compute_)?(?P<major>\d+?)\.?(?P<minor>\d)(?P<suffix>[af]?)(?P<ptx>\+PTX)?")


def runs_on(arch: str, capability: Capability) -> bool | None:
    """Whether code for an arch, in torch's spelling (`sm_90a`) or that of `kernels` (`9.0a`), runs on a device.

    A cubin runs on its own major from its own minor on, except on Tegra parts, which take only their own; with the
    suffix "a" on that capability alone, with "f" on its family; PTX on everything newer, by just-in-time
    compilation. None: a spelling that nobody knows.
    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
    """
    match = _ARCH.fullmatch(arch.strip())
    if match is None:
        return None
    built = (int(match["major"]), int(match["minor"]))
    if built == (10, 1) and capability == (11, 0):
        return True
    if match["suffix"] == "a":
        return built == capability
    same_family = built[0] == capability[0] and built[1] <= capability[1]
    if match["suffix"] == "f":
        return same_family
    if match["kind"] == "compute_" or match["ptx"]:
        return built <= capability
    if _OWN_CODE_ONLY & {built, capability}:
        return built == capability
    return same_family


def any_runs_on(archs: Iterable[str], capability: Capability) -> bool:
    """Whether some of this code runs on the device, or may: a spelling that nobody knows is no proof against it."""
    answers = [runs_on(arch, capability) for arch in archs]
    return any(a is not False for a in answers) or not answers
