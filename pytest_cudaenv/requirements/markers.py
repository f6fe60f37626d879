"""The markers: each is a Python signature that turns its arguments into what a test declares.

No pytest here: `pytest_cudaenv.decorators` makes the decorators, `pytest_cudaenv.plan` reads the marks.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pytest_cudaenv.requirements import attention, packages, precision, quantization
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.kernel_sources import Given, HubLayer, mode_name, sources
from pytest_cudaenv.requirements.names import spelled, unknown_name
from pytest_cudaenv.requirements.requirement import Requirement
from pytest_cudaenv.requirements.sizes import parse_memory, specifier

Backend: TypeAlias = "str | tuple[tuple[str, str], ...]"
"""An attention backend: its canonical name, or one per sub-config as ((sub-config, name), …)."""


@dataclass(frozen=True)
class Axis:
    """The values that a test's cells take along one axis."""

    values: tuple[Backend, ...] = ()
    """Empty: the project's default list."""
    exclude: tuple[Backend, ...] = ()
    model: type | None = field(default=None, compare=False)

    def of(self, default: Sequence[Backend]) -> tuple[Backend, ...]:
        """This axis, with `default` where the marker names nothing."""
        return tuple(v for v in (self.values or tuple(default)) if v not in self.exclude)


@dataclass(frozen=True)
class KnownBadCell:
    """Cells that are expected to fail, as data."""

    attn_backend: Backend | None
    dtype: str | None
    capability: str | None
    reason: str
    issue: str
    until: datetime.date | None


@dataclass(frozen=True)
class MemoryLimit:
    """What a test may take and keep of each device's memory, in bytes; None: nothing is said."""

    peak: int | None = None
    leak: int | None = None

    def merged(self, wider: MemoryLimit) -> MemoryLimit:
        """This one, with what a marker further out says where this says nothing."""
        return MemoryLimit(
            wider.peak if self.peak is None else self.peak, wider.leak if self.leak is None else self.leak
        )


NO_LIMIT = MemoryLimit()


@dataclass(frozen=True)
class SdpaKernels:
    """The kernels that sdpa may run while a test's body runs, in the order in which they are tried."""

    names: tuple[str, ...]

    @property
    def requirement(self) -> Requirement:
        """A device, where none of them runs on the CPU."""
        return Requirement(devices=0 if CPU_KERNELS & {*self.names} else 1)


SDPA_KERNELS = ("flash", "efficient", "cudnn", "math")

CPU_KERNELS = frozenset({"flash", "math"})
"""Those of them that the CPU has."""


@dataclass(frozen=True)
class WitnessUse:
    """What a test of a cell says of itself to the witness."""

    runs: bool
    """Whether its body runs attention."""


@dataclass(frozen=True)
class KernelUse:
    """How a test uses Hub kernels, by its marker."""

    mapping: Given | None = None
    """None: transformers' own."""
    mode: str | None = None
    executed: bool = True
    """Whether each replaced layer has to run."""
    allow_fallback: tuple[str, ...] = ()
    use: str | None = None
    """`both`: the test is generated with kernels off and on; None: as the ini key cuda_hub_kernels says."""

    @property
    def requirement(self) -> Requirement:
        """What it needs where kernels are on."""
        layers = [one for one in sources(self.mapping or {}) if isinstance(one, HubLayer)]
        wanted = tuple(dict.fromkeys(HubKernel(one.repo, one.version, one.revision) for one in layers))
        return Requirement(device_if_any=True, needs_kernels=True, hub_kernels=wanted)


Declaration: TypeAlias = "Requirement | Axis | KnownBadCell | MemoryLimit | SdpaKernels | WitnessUse | KernelUse"


def requires_cuda(
    devices: int = 1,
    memory: int | str | None = None,
    capability: str | None = None,
    driver: str | None = None,
    exclusive: bool = False,
) -> Requirement:
    """That many NVIDIA devices; `memory` is what the test uses on each."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: write a number of devices, 1 or more")
    if not isinstance(exclusive, bool):
        raise TypeError(f"exclusive={exclusive!r}: write True or False")
    return Requirement(
        devices=devices,
        memory=0 if memory is None else parse_memory(memory),
        capability=_specifiers(capability, "capability"),
        driver=_driver(driver),
        exclusive=exclusive,
    )


def _driver(text: str | None) -> tuple[str, ...]:
    found = _specifiers(text, "driver")
    if any(int(number) >= 100 for number in re.findall(r"(?<![.\d])\d+", text or "")):
        raise ValueError(
            f"driver={text!r}: write the CUDA version that the driver supports (>=12.4), not its own number"
        )
    return found


def _specifiers(text: str | None, argument: str) -> tuple[str, ...]:
    return () if text is None else (str(specifier(text, argument)),)


def requires_dtype(*names: str) -> Requirement:
    """Native support for these dtypes, never emulation."""
    if not names:
        raise ValueError("name at least one dtype")
    return Requirement(devices=1, dtypes=tuple(precision.dtype_name(n) for n in names))


def requires_bf16() -> Requirement:
    """Native bfloat16 arithmetic."""
    return requires_dtype("bfloat16")


def requires_fp8() -> Requirement:
    """Native 8-bit floating point matrix products (e4m3)."""
    return requires_dtype("fp8")


def requires_fp4() -> Requirement:
    """Native 4-bit floating point matrix products (NVFP4)."""
    return requires_dtype("fp4")


def requires_tf32() -> Requirement:
    """TensorFloat-32 matrix products."""
    return requires_dtype("tf32")


def requires_attn_backend(name: str) -> Requirement:
    """The package or Hub kernel of an attention backend, on a device for which it has code."""
    return Requirement(devices=1, attn_backends=(attention.backend_name(name),))


def requires_flash_attn2() -> Requirement:
    """FlashAttention-2."""
    return requires_attn_backend("flash_attention_2")


def requires_flash_attn3() -> Requirement:
    """FlashAttention-3."""
    return requires_attn_backend("flash_attention_3")


def requires_flash_attn4() -> Requirement:
    """FlashAttention-4."""
    return requires_attn_backend("flash_attention_4")


def requires_flex_attention() -> Requirement:
    """FlexAttention, torch's compiled attention."""
    return requires_attn_backend("flex_attention")


def requires_hub_kernels(*repos: str, version: int | None = None, revision: str | None = None) -> Requirement:
    """A usable pair of kernels and transformers, and a build of each repository for this host."""
    wanted = tuple(HubKernel(repo, version, revision) for repo in repos)
    return Requirement(device_if_any=True, needs_kernels=True, hub_kernels=wanted)


def requires_quantization(method: str) -> Requirement:
    """A quantization method's packages and capability."""
    return Requirement(device_if_any=True, quantization=(quantization.method_name(method),))


def requires_package(*specs: str) -> Requirement:
    """Installed packages, as PEP 508 strings; ` | ` separates alternatives."""
    if not specs:
        raise ValueError("name at least one package")
    for spec in specs:
        packages.parse_package(spec)
    return Requirement(packages=tuple(specs))


def requires_nccl() -> Requirement:
    """NCCL and two devices."""
    return Requirement(devices=2, nccl=True)


def cuda_isolated() -> Requirement:
    """A device process of its own, for a test that asks for a device."""
    return Requirement(isolated=True)


def attn_backends(
    *names: str | Mapping[str, str], exclude: str | Sequence[str] = (), model: type | None = None
) -> Axis:
    """This test's attention backends; with a model class, what the class declares gives reasons."""
    if model is not None and not isinstance(model, type):
        raise TypeError(f"model={model!r}: give the model class")
    return Axis(tuple(backend(n) for n in names), tuple(backend(n) for n in _listed(exclude)), model)


def dtypes(*names: str, exclude: str | Sequence[str] = ()) -> Axis:
    """This test's dtypes."""
    return Axis(tuple(precision.cell_dtype(n) for n in names), tuple(precision.cell_dtype(n) for n in _listed(exclude)))


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    return (value,) if isinstance(value, str) else tuple(value)


def backend(value: str | Mapping[str, str]) -> Backend:
    """The canonical form of a backend: a name in any spelling, or a dict with one name per sub-config."""
    if isinstance(value, str):
        return attention.backend_name(value)
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"{value!r}: write a backend's name, or a dict of sub-config and name")
    return tuple((str(sub), attention.backend_name(name)) for sub, name in value.items())


def attn_sdpa_kernel(*kernels: str) -> SdpaKernels:
    """sdpa runs these kernels alone while the test's body runs: the first possible one."""
    if not kernels:
        raise ValueError(f"name a kernel of sdpa: {', '.join(SDPA_KERNELS)}")
    for kernel in kernels:
        if kernel not in SDPA_KERNELS:
            known = spelled((name, name) for name in SDPA_KERNELS)
            raise ValueError(unknown_name("sdpa kernel", kernel, known, ", ".join(SDPA_KERNELS)))
    return SdpaKernels(kernels)


def attn_witness(runs: bool = True) -> WitnessUse:
    """Whether this test's body runs attention; one that does not (it saves a checkpoint) proves no backend."""
    if not isinstance(runs, bool):
        raise TypeError(f"runs={runs!r}: write True or False")
    return WitnessUse(runs)


def xfail_cells(
    attn_backend: str | Mapping[str, str] | None = None,
    dtype: str | None = None,
    capability: str | None = None,
    reason: str = "",
    issue: str = "",
    until: str | datetime.date | None = None,
) -> KnownBadCell:
    """Cells that are known to fail on devices of a capability; past `until` (2027-01-31) the test fails."""
    if attn_backend is None and dtype is None and capability is None:
        raise ValueError("say which cells: attn_backend=, dtype= or capability=")
    if not (reason or issue):
        raise ValueError("say why: reason= or issue=")
    if capability is not None:
        specifier(capability, "capability")
    if isinstance(until, str):
        try:
            until = datetime.date.fromisoformat(until)
        except ValueError:
            raise ValueError(f"until={until!r}: write a date, 2027-01-31") from None
    return KnownBadCell(
        None if attn_backend is None else backend(attn_backend),
        None if dtype is None else precision.dtype_name(dtype),
        capability,
        reason,
        issue,
        until,
    )


def cuda_memory(peak: int | str | None = None, leak: int | str | None = None) -> MemoryLimit:
    """The most device memory that the test may use at once, and keep after its end ("0": none)."""
    if peak is None and leak is None:
        raise ValueError('say how much: peak="2GiB" or leak="0"')
    return MemoryLimit(_amount(peak, "peak"), _amount(leak, "leak"))


def _amount(value: int | str | None, argument: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, bool) and str(value).strip() == "0":
        return 0
    try:
        return parse_memory(value)
    except ValueError as error:
        raise ValueError(str(error).replace("memory=", f"{argument}=", 1)) from None


def hub_kernels(
    mapping: Given | None = None,
    mode: str | None = None,
    executed: bool = True,
    allow_fallback: str | Sequence[str] = (),
    use: str | None = None,
) -> KernelUse:
    """What the fixture `hub_kernels` puts into this test's models, and whether it has to run."""
    if mapping is not None and (not isinstance(mapping, Mapping) or not mapping):
        raise TypeError(f"mapping={mapping!r}: write a dict of layer name and kernel")
    if not isinstance(executed, bool):
        raise TypeError(f"executed={executed!r}: write True or False")
    if use not in {None, "both", "on"}:
        raise ValueError(f"use={use!r}: write 'both' for a test with kernels off and on, or 'on'")
    declared = KernelUse(mapping, mode and mode_name(mode), executed, tuple(_listed(allow_fallback)), use)
    _ = declared.requirement  # whether its texts name kernels
    return declared


MARKERS: dict[str, Callable[..., Declaration]] = {
    function.__name__: function
    for function in (
        requires_cuda,
        requires_dtype,
        requires_bf16,
        requires_fp8,
        requires_fp4,
        requires_tf32,
        requires_attn_backend,
        requires_flash_attn2,
        requires_flash_attn3,
        requires_flash_attn4,
        requires_flex_attention,
        requires_hub_kernels,
        requires_quantization,
        requires_package,
        requires_nccl,
        cuda_isolated,
        attn_backends,
        dtypes,
        attn_sdpa_kernel,
        attn_witness,
        xfail_cells,
        cuda_memory,
        hub_kernels,
    )
}
"""Marker name -> its signature, which validates the arguments and returns what they declare."""
