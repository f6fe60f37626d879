"""Quantization methods of transformers: the packages and devices that each one needs, as data.

https://github.com/huggingface/transformers/tree/main/src/transformers/quantizers (validate_environment of each).
Where a method would be undone silently (weights dequantized to bfloat16 on a device or without a package that it
needs), what it needs is a need here: a test of it would pass without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.software import Software
from pytest_cudaenv.requirements import packages
from pytest_cudaenv.requirements.capability import Capabilities, at_least, describe, exactly
from pytest_cudaenv.requirements.names import plain, spelled, unknown_name
from pytest_cudaenv.requirements.packages import Finding, State
from pytest_cudaenv.requirements.reason import Importer, Reason, brief, unknown

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True)
class Package:
    """A package that a method needs."""

    module: str
    """The module that transformers looks for."""
    specs: str
    """PEP 508, alternatives joined by ` | `: distributions that ship it."""


@dataclass(frozen=True)
class QuantMethod:
    """One quantization method."""

    name: str
    """As `quant_method` in a model's config."""
    packages: tuple[Package, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other spellings; case, dashes, underscores and blanks do not matter."""
    capabilities: Capabilities | None = None
    """The devices on which it computes; None: transformers asks for none."""
    runs_on_cpu: bool = True
    runs_on_cuda: bool = True


ACCELERATE = Package("accelerate", "accelerate>=1.1")
KERNELS = Package("kernels", "kernels")
GPTQMODEL = Package("gptqmodel", "gptqmodel")

METHODS: dict[str, QuantMethod] = {
    m.name: m
    for m in (
        QuantMethod("bitsandbytes", (ACCELERATE, Package("bitsandbytes", "bitsandbytes>=0.46.1")), ("bnb",)),
        QuantMethod("gptq", (Package("optimum", "optimum"), GPTQMODEL)),
        QuantMethod("awq", (GPTQMODEL, ACCELERATE)),
        QuantMethod("aqlm", (ACCELERATE, Package("aqlm", "aqlm"))),
        QuantMethod("auto-round", (Package("auto_round", "auto-round>=0.5"),)),
        QuantMethod("quanto", (Package("optimum.quanto", "optimum-quanto"), ACCELERATE), ("optimum-quanto",)),
        QuantMethod("hqq", (Package("hqq", "hqq>=0.2.1"),)),
        QuantMethod("torchao", (Package("torchao", "torchao>=0.15"),)),
        # Only its optimized inference needs 8.9; it says so and goes on without.
        QuantMethod("compressed-tensors", (Package("compressed_tensors", "compressed-tensors>=0.15"),)),
        # Anywhere else both are dequantized, or cannot be quantized at all.
        QuantMethod(
            "fp8",
            (ACCELERATE, KERNELS),
            ("finegrained-fp8", "fine-grained-fp8"),
            capabilities=at_least(8, 9),
            runs_on_cpu=False,
        ),
        QuantMethod("mxfp8", (ACCELERATE, KERNELS), capabilities=at_least(8, 9), runs_on_cpu=False),
        QuantMethod(
            "fbgemm_fp8",
            (Package("fbgemm_gpu", "fbgemm-gpu | fbgemm-gpu-genai"), ACCELERATE),
            ("fbgemm",),
            capabilities=at_least(9, 0),
            runs_on_cpu=False,
        ),
        QuantMethod("mxfp4", (ACCELERATE, Package("triton", "triton>=3.4"), KERNELS), capabilities=at_least(7, 5)),
        # transformers asks for major 10 and above; the kernel is built for 10.0a and 12.0a, which run nowhere else.
        QuantMethod("nvfp4", (KERNELS,), capabilities=exactly("10.0 or 12.0", (10, 0), (12, 0)), runs_on_cpu=False),
        # "Blackwell" by its text alone, whichever; the pseudo-quantized form runs on older ones too.
        QuantMethod(
            "fp_quant",
            (Package("fp_quant", "fp-quant>=0.3.2"), Package("qutlass", "qutlass>=0.2")),
            capabilities=exactly("10.x, 11.0 or 12.x", 10, (11, 0), 12),
            runs_on_cpu=False,
        ),
        QuantMethod("fouroversix", (Package("fouroversix", "fouroversix"),), ("4over6", "four-over-six")),
        QuantMethod("eetq", (KERNELS, ACCELERATE), runs_on_cpu=False),
        QuantMethod(
            "higgs",
            (
                ACCELERATE,
                Package("flute", "flute-kernel>=0.4.1"),
                Package("fast_hadamard_transform", "fast-hadamard-transform"),
            ),
            runs_on_cpu=False,
        ),
        QuantMethod("spqr", (ACCELERATE, Package("spqr_quant", "spqr-quant")), runs_on_cpu=False),
        QuantMethod("vptq", (ACCELERATE, Package("vptq", "vptq>=0.0.4")), runs_on_cpu=False),
        QuantMethod("bitnet", (ACCELERATE,)),
        QuantMethod("quark", (Package("quark", "amd-quark>=0.12"),), ("amd-quark",)),
        # transformers' own check of it is always true.
        QuantMethod("sinq", (Package("sinq", "sinq"),)),
        QuantMethod("metal", (KERNELS,), runs_on_cpu=False, runs_on_cuda=False),
        QuantMethod("gguf", (KERNELS,)),
        QuantMethod("gemma"),
    )
}


_SPELLINGS = spelled((spelling, m.name) for m in METHODS.values() for spelling in (m.name, *m.aliases))


class UnknownMethodError(ValueError):
    """A method that nobody knows; the text names the choices."""


def method_name(text: str) -> str:
    """The canonical name of a method in any spelling (`bnb`, `AutoRound`).

    Raises UnknownMethodError, with the choices, for anything else.
    """
    name = plain(str(text).strip())
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    raise UnknownMethodError(unknown_name("quantization method", text, _SPELLINGS, ", ".join(METHODS)))


def software_reasons(method: str, software: Software, imports: Importer | None) -> list[Reason]:
    """Which of the method's packages are missing, too old or broken, one reason each."""
    reasons = []
    for package in METHODS[method_name(method)].packages:
        finding = _examine(package, software, imports)
        if finding is not None:
            reasons.append(_package_reason(method, package, finding))
    return reasons


@lru_cache(maxsize=64)
def _requirements(specs: str) -> tuple[Requirement, ...]:
    from packaging.requirements import Requirement

    return tuple(Requirement(spec) for spec in specs.split("|"))


def _examine(package: Package, software: Software, imports: Importer | None) -> Finding | None:
    findings = []
    for requirement in _requirements(package.specs):
        finding = packages.examine(requirement, software, imports, package.module)
        if finding is None:
            return None
        findings.append(finding)
    return min(findings, key=lambda f: list(State).index(f.state))


_CODES = {State.MISSING: "quant-package", State.VERSION: "quant-version", State.BROKEN: "quant-broken"}


def _package_reason(method: str, package: Package, finding: Finding) -> Reason:
    spec = str(_requirements(package.specs)[0])
    who = "" if plain(method) in plain(spec) else f"{method} "
    need = f"{method} must import" if finding.state is State.BROKEN else f"{who}needs {spec}"
    return packages.package_reason(_CODES[finding.state], need, finding, f"Run pip install '{spec}'.")


def device_reasons(method: str, device: CudaDevice | None) -> list[Reason]:
    """Why the device (None: the CPU) does not compute in this method."""
    found = METHODS[method_name(method)]
    if device is None or not found.runs_on_cuda:
        return _kind_reasons(found, device)
    if found.capabilities is None:
        return []
    need = f"{found.name} needs {found.capabilities.text}"
    if device.capability is None:
        return [unknown(need, "unknown capability")]
    if device.capability in found.capabilities:
        return []
    remedy = f"Run it on such a device; elsewhere transformers refuses {found.name} or undoes it silently."
    return [brief("quant-capability", need, describe(device), remedy)]


def _kind_reasons(method: QuantMethod, device: CudaDevice | None) -> list[Reason]:
    if device is None and method.runs_on_cpu:
        return []
    wanted = "a CUDA device" if method.runs_on_cuda else "an Apple GPU"
    have = "the CPU" if device is None else describe(device)
    remedy = f"Run it on {wanted}; elsewhere transformers refuses {method.name} or undoes it silently."
    return [brief("quant-device", f"{method.name} needs {wanted}", have, remedy)]
