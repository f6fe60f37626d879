"""The contract: what a runner promises, and may therefore neither lack nor skip; pure functions of host and reasons."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pytest_cudaenv.host.catalog import UnknownDeviceError, simulated_host
from pytest_cudaenv.requirements.attention_backends import registered
from pytest_cudaenv.requirements.markers import (
    requires_attn_backend,
    requires_cuda,
    requires_dtype,
    requires_hub_kernels,
    requires_nccl,
    requires_package,
    requires_quantization,
)
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement

CODE = "contract"

Unmet = Callable[[Requirement], Sequence[Reason]]

GRAMMAR = (
    "devices>=2, capability>=9.0, memory>=80GB, driver>=12.4, bf16, fp8, flash_attention_3, nccl, hub_kernels, "
    "org/kernel, a quantization method, or a package: peft>=0.18"
)

_COMPARED = re.compile(r"(devices|capability|memory|driver)\s*(>=|==|~=|!=|<=|<|>)\s*(\S.*)")


@dataclass(frozen=True)
class Promise:
    """One thing that a runner promises, as it was written and as a requirement that it must meet."""

    text: str
    requirement: Requirement


@dataclass(frozen=True)
class Broken:
    """A promise that this host does not keep."""

    promise: Promise
    reason: Reason

    def __str__(self) -> str:
        r = self.reason
        return f"[{CODE}] {self.promise.text} is promised: {r.need}; have {r.have} [{r.code}]. {r.remedy}"


def read_promise(text: str) -> Promise:
    """What a promise means. Raises ValueError, with the grammar."""
    text = text.strip()
    try:
        return Promise(text, _requirement(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; write {GRAMMAR}") from None


def _requirement(text: str) -> Requirement:
    if compared := _COMPARED.fullmatch(text):
        return _compared(*compared.groups())
    if text in _NAMED:
        return _NAMED[text]()
    for read in (requires_dtype, requires_attn_backend, requires_quantization, requires_package):
        with suppress(ValueError):
            return requires_hub_kernels(text) if "/" in text and " " not in text else read(text)
    raise ValueError("is neither a need nor a package")


_NAMED: dict[str, Callable[[], Requirement]] = {
    "cuda": requires_cuda,
    "nccl": requires_nccl,
    "hub_kernels": requires_hub_kernels,
    "hub-kernels": requires_hub_kernels,
}


def _compared(what: str, operator: str, value: str) -> Requirement:
    if what == "capability":
        return requires_cuda(capability=operator + value)
    if what == "driver":
        return requires_cuda(driver=operator + value)
    if operator != ">=":
        raise ValueError(f"{what} is promised as {what}>=…")
    if what == "memory":
        return requires_cuda(memory=value)
    if not value.isdecimal():
        raise ValueError(f"{value!r} is no number of devices")
    return requires_cuda(devices=int(value))


@dataclass(frozen=True)
class Runner:
    """A profile of a CI runner: what it has, what must run there, and what a minute of it costs."""

    name: str
    devices: str | None = None
    """In the spelling of the catalogue: `h100:2`; None: no GPU."""
    packages: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    cost: float = 1.0
    labels: tuple[str, ...] = ()
    """`runs-on` of a CI system."""

    def promises(self) -> tuple[Promise, ...]:
        """Everything that it promises: its devices, their capability and memory, its packages, its requires."""
        texts = [*self.requires]
        found: list[Promise] = []
        if self.devices is not None:
            host = simulated_host(self.devices)
            device = host.devices[0]
            texts.insert(0, f"devices>={len(host.devices)}")
            if device.capability is not None:
                texts.insert(1, "capability>={}.{}".format(*device.capability))
            if device.total_memory is not None:
                found.append(Promise(f"memory of {self.devices}", Requirement(devices=1, memory=device.total_memory)))
        return (*(read_promise(text) for text in texts), *found, *(read_promise(text) for text in self.packages))


def read_runners(lines: Iterable[str]) -> dict[str, Runner]:
    """Profiles from ini lines: `h100x2: devices=h100:2 package=flash-attn-3 requires=flash_attention_3 cost=8`.

    Raises ValueError that names the line.
    """
    runners: dict[str, Runner] = {}
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, rest = line.partition(":")
        name = name.strip()
        try:
            if not colon or not name or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError("a line begins with NAME:")
            if name in runners:
                raise ValueError("the name is there twice")
            runners[name] = _runner(name, shlex.split(rest))
        except ValueError as error:
            raise ValueError(
                f"cuda_runners: {line.strip()!r}: {error}; write NAME: devices=h100:2 package=peft requires=bf16 cost=8"
            ) from None
    return runners


def _runner(name: str, words: Sequence[str]) -> Runner:
    values: dict[str, list[str]] = {"devices": [], "package": [], "requires": [], "cost": [], "label": []}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in values or not value:
            raise ValueError(f"{word!r}: choose from {', '.join(f'{k}=' for k in values)}")
        values[key].append(value)
    for key in ("devices", "cost"):
        if len(values[key]) > 1:
            raise ValueError(f"{key}= is there twice")
    devices = values["devices"][0] if values["devices"] else None
    if devices is not None:
        try:
            simulated_host(devices)
        except UnknownDeviceError as error:
            raise ValueError(str(error)) from None
    try:
        cost = float(values["cost"][0]) if values["cost"] else 1.0
    except ValueError:
        raise ValueError(f"cost={values['cost'][0]!r} is no number") from None
    if not 0 <= cost < float("inf"):
        raise ValueError(f"cost={cost:g} is no price")
    runner = Runner(name, devices, tuple(values["package"]), tuple(values["requires"]), cost, tuple(values["label"]))
    runner.promises()
    return runner


@dataclass(frozen=True)
class Contract:
    """What a run's runner promises."""

    promises: tuple[Promise, ...] = ()
    min_ran: int | None = None
    """Tests that must have run on a CUDA device."""

    def broken(self, unmet: Unmet) -> list[Broken]:
        """The promises that a host does not keep, with what it lacks."""
        return [Broken(promise, reason) for promise in self.promises for reason in unmet(promise.requirement)]

    def breach(self, reasons: Iterable[Reason], unmet: Unmet) -> Promise | None:
        """The promise that a skip for these reasons breaks; None where nothing promised is missing.

        A test may need more than was promised: only what keeps the promise itself from being met is a breach.
        """
        kept_from = {(r.code, r.need) for r in reasons}
        for promise in self.promises:
            if kept_from & {(r.code, r.need) for r in unmet(promise.requirement)}:
                return promise
        return None

    def denied(self, claim: Requirement, unmet: Unmet) -> str | None:
        """The promises, as written, that a skip denies which claims to lack this; None where it may be lacking.

        The suite's own checks may be wrong, so that a claim is held against what was promised first, and then, as
        any skip, against what keeps the host from a promise.
        """
        asked = replace(claim, device_if_any=False, exclusive=False, isolated=False)
        if asked == Requirement():
            return None
        if covers([promise.requirement for promise in self.promises], asked):
            kept = list(self.promises)
            for promise in self.promises:  # those that it takes
                fewer = [other for other in kept if other is not promise]
                if covers([other.requirement for other in fewer], asked):
                    kept = fewer
            return " and ".join(promise.text for promise in kept)
        broken = self.breach(unmet(claim), unmet)
        return None if broken is None else broken.text


def covers(promised: Sequence[Requirement], need: Requirement) -> bool:
    """Whether a host that has all that is promised meets a need, whatever else it has."""
    has = Requirement()
    for requirement in promised:
        has = has.merged(requirement)
    named = (
        (need.dtypes, has.dtypes), (need.attn_backends, has.attn_backends), (need.hub_kernels, has.hub_kernels),
        (need.quantization, has.quantization),
    )  # fmt: skip
    known = registered()
    packages = has.packages + tuple(known[name].distribution for name in has.attn_backends if name in known)
    return (
        need.devices <= has.devices
        and need.memory <= has.memory
        and need.nccl <= has.nccl
        and need.needs_kernels <= (has.needs_kernels or bool(has.hub_kernels))
        and all(set(wanted) <= set(there) for wanted, there in named)
        and all(_follows(specifier, has.capability) for specifier in need.capability)
        and all(_follows(specifier, has.driver) for specifier in need.driver)
        and all(_is_among(spec, packages) for spec in need.packages)
        and need.cell_dtype is None
        and not need.model_reasons
    )


def _follows(wanted: str, promised: Iterable[str]) -> bool:
    """Whether every version that meets what is promised meets what is wanted; in doubt not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    there = [part for specifier in promised for part in SpecifierSet(specifier)]
    for part in SpecifierSet(wanted):
        if part in there:
            continue
        try:
            lowest = max((Version(p.version) for p in there if p.operator in {">=", "==", "~="}), default=None)
            least = Version(part.version)
        except InvalidVersion:  # ==2.*
            return False
        if lowest is None or not (lowest > least or (lowest == least and part.operator == ">=")):
            return False
        if part.operator not in {">=", ">"}:
            return False
    return True


def _is_among(wanted: str, promised: Iterable[str]) -> bool:
    """Whether a promised package is one of those that would do."""
    from packaging.requirements import Requirement as Package
    from packaging.utils import canonicalize_name

    there: dict[str, list[str]] = {}
    for spec in promised:
        if spec == wanted:
            return True
        if "|" not in spec:
            package = Package(spec)
            there.setdefault(canonicalize_name(package.name), []).append(str(package.specifier))
    for alternative in wanted.split("|"):
        package = Package(alternative)
        name = canonicalize_name(package.name)
        if name in there and _follows(str(package.specifier), there[name]):
            return True
    return False
