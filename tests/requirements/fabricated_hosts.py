"""Hosts, devices and software made up for these tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pytest_cudaenv.host.catalog import CATALOG, simulated_device
from pytest_cudaenv.host.devices import Capability, CudaDevice, Host
from pytest_cudaenv.host.mask import MaskReading, read_mask
from pytest_cudaenv.host.software import Software, TorchBuild, torch_build_of

PACKAGES = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b4"}
MODULES = frozenset({"flash_attn", "flash_attn_interface", "flash_attn.cute"})

TORCH = TorchBuild("2.13.0", cuda="13.0")
"""A CUDA build of which nobody knows what it has code for."""


def device(key: str) -> CudaDevice:
    """A device of the catalogue."""
    return simulated_device(key, 0)


def capable(capability: Capability | None, name: str = "NVIDIA Test") -> CudaDevice:
    """A device of this capability."""
    return replace(device("h100"), capability=capability, name=name)


def software(
    distributions: Mapping[str, str] | None = None,
    modules: Iterable[str] = (),
    torch: str | TorchBuild | None = TORCH,
    assumed: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Software:
    """Software; `torch` is a build, or the version of a wheel such as `2.13.0+cu130`."""
    build = torch_build_of(torch) if isinstance(torch, str) else torch
    return Software(dict(distributions or {}), frozenset(modules), build, frozenset(assumed), dict(environ or {}))


def everything(**changes: object) -> Software:
    """Software with every attention package, installed and importable."""
    return replace(software(PACKAGES, MODULES), **changes)  # type: ignore[arg-type]


def host(*devices: CudaDevice | str, **changes: object) -> Host:
    """A host with these devices, or catalogue keys, and a current driver."""
    found = [device(d) if d in CATALOG else d for d in devices]
    numbered = tuple(
        replace(d, index=i, uuid=f"{d.uuid[:-2]}{i:02x}", pci_bus_id=f"00000000:{i + 1:02X}:00.0")  # type: ignore[type-var]
        for i, d in enumerate(found)
    )
    facts: dict[str, object] = {"software": software(), "driver": "580.95.05", "driver_cuda": (13, 0), **changes}
    return Host(devices=numbered, **facts)  # type: ignore[arg-type]


def reading(of: Host, mask: str | None = None) -> MaskReading:
    """What a process sees of the host under a mask."""
    return read_mask(mask, "PCI_BUS_ID", of.devices)


def codes(reasons: Iterable[object]) -> list[str]:
    """The codes of reasons, in their order."""
    return [r.code for r in reasons]  # type: ignore[attr-defined]
