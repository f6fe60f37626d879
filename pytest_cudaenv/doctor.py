"""What decides a skip on a host, with remedies: the report of `pytest-cudaenv doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_cudaenv._version import __version__
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES, MaskReading
from pytest_cudaenv.ledger.header import describe_device, header_lines
from pytest_cudaenv.names import DTYPES
from pytest_cudaenv.requirements import attention, quantization
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement, unmet

DISTRIBUTIONS = (
    "torch", "transformers", "kernels", "accelerate", "flash-attn", "flash-attn-3", "flash-attn-4", "triton",
    "nvidia-ml-py", "pytest", "pytest-xdist",
)  # fmt: skip
"""Whose versions decide most skips."""

VARIABLES = (
    VISIBLE_DEVICES, DEVICE_ORDER, "NVIDIA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK", "USE_HUB_KERNELS",
    "DISABLE_KERNEL_MAPPING", "LOCAL_KERNELS", "KERNELS_CACHE", "HF_HUB_OFFLINE", "HF_HOME",
)  # fmt: skip
"""Environment variables that change what is visible or usable; anything that starts with CUDAENV_ besides."""


@dataclass(frozen=True)
class Check:
    """One thing that a test may need, and the reasons (none: it is there)."""

    subject: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Report:
    """What `examine` found."""

    host: Host
    reading: MaskReading
    environ: Mapping[str, str]
    checks: tuple[Check, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def is_unusable(self) -> bool:
        """Whether a device is present and cannot be used, so that device tests would be errors."""
        return any(reason.is_error for check in self.checks for reason in check.reasons)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "version": __version__,
            "simulated": self.host.simulated,
            "driver": self.host.driver,
            "driver_cuda": _dotted(self.host.driver_cuda),
            "problem": None
            if self.host.problem is None
            else {"code": self.host.problem.code, "have": self.host.problem.have, "remedy": self.host.problem.remedy},
            "cu_init": self.reading.cu_init,
            "devices": [
                {
                    "index": d.index,
                    "uuid": d.uuid,
                    "name": d.name,
                    "capability": _dotted(d.capability),
                    "total_memory": d.total_memory,
                    "unified_memory": d.unified_memory,
                    "pci_bus_id": d.pci_bus_id,
                }
                for d in self.reading.devices
            ],
            "hidden": [{"uuid": d.uuid, "name": d.name} for d in self.reading.hidden],
            "warnings": list(self.reading.notes),
            "notes": list(self.host.notes),
            "environment": dict(self.environ),
            "distributions": dict(self.versions),
            "checks": {
                check.subject: [
                    {"code": r.code, "need": r.need, "have": r.have, "remedy": r.remedy} for r in check.reasons
                ]
                for check in self.checks
            },
        }

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"pytest-cudaenv {__version__}", *header_lines(self.host, self.reading, {}, self.environ)]
        lines += [f"  cuda:{d.index}  {describe_device(d)}  {d.uuid}" for d in self.reading.devices]
        lines += [f"  hidden  {describe_device(d)}  {d.uuid}" for d in self.reading.hidden]
        lines += ["", "environment"]
        lines += [f"  {name}={value}" for name, value in self.environ.items()] or ["  nothing that changes a decision"]
        lines += ["", "installed"]
        lines += [f"  {name} {version or 'not installed'}" for name, version in self.versions.items()]
        lines += ["", "what tests may need"]
        for check in self.checks:
            lines.append(f"  {check.subject}: {'ok' if not check.reasons else check.reasons[0]}")
            lines += [f"  {' ' * len(check.subject)}  {reason}" for reason in check.reasons[1:]]
            lines += [f"  {' ' * len(check.subject)}  -> {remedy}" for remedy in _remedies(check)]
        return lines


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else "{}.{}".format(*version)


def _remedies(check: Check) -> list[str]:
    return list(dict.fromkeys(reason.remedy for reason in check.reasons if reason.remedy))


def examine(host: Host, reading: MaskReading, environ: Mapping[str, str]) -> Report:
    """Ask of a host everything that a marker can ask for; imports no package and asks no network."""
    needs = {"a CUDA device": Requirement(devices=1), "two CUDA devices": Requirement(devices=2, nccl=True)}
    for name in ("bfloat16", "tf32", "float8_e4m3fn", "float4_e2m1fn_x2"):
        needs[DTYPES[name]] = Requirement(devices=1, dtypes=(name,))
    for name, backend in attention.registered().items():
        need = Requirement(device_if_any=True) if backend.runs_on_cpu else Requirement(devices=1)
        needs[f"attention {name}"] = need.merged(Requirement(attn_backends=(name,)))
    needs["hub kernels"] = Requirement(device_if_any=True, needs_kernels=True)
    for name in quantization.METHODS:
        needs[f"quantization {name}"] = Requirement(device_if_any=True, quantization=(name,))
    checks = tuple(Check(subject, tuple(unmet(need, host, reading))) for subject, need in needs.items())
    shown = {n: v for n, v in environ.items() if n in VARIABLES or n.startswith("CUDAENV_")}
    versions = {name: host.software.version(name) for name in DISTRIBUTIONS}
    return Report(host, reading, shown, checks, versions)
