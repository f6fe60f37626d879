"""Option, environment and ini, resolved in one place into frozen settings that know where each came from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.options import OPTIONS, Option, given

if TYPE_CHECKING:
    from pytest_cudaenv.host.devices import Host


@dataclass(frozen=True)
class Settings:
    """What the run was told, and by whom."""

    visible: str | None = None
    unmet: str = "skip"
    unmarked: str = "keep"
    isolation: str = "session"
    wait: float = 600.0
    """Seconds that a device test waits for other runs; waiting for its own run has no limit."""
    adopt: tuple[str, ...] = ()
    """Whose words are read: transformers, accelerate, skipif."""
    default_memory: int | None = None
    """Bytes on each device of tests that declare none; None: they take their devices whole."""
    lease_dir: str | None = None
    simulate: str | None = None
    assume: tuple[str, ...] = ()
    ledger: str | None = None
    plan: str | None = None
    """Where to write what each collected test needs."""
    require: tuple[str, ...] = ()
    """What the runner promises, as it was written."""
    runner: str | None = None
    min_ran: int | None = None
    """Tests that must have run on a CUDA device."""
    strict: bool = False
    update_expectations: bool = False
    """Write into golden files what they do not expect."""
    only_attn_backends: tuple[str, ...] = ()
    """Cells of other backends are deselected; empty: none are."""
    only_dtypes: tuple[str, ...] = ()
    hub_kernels: str = "auto"
    """`on` or `off`: tests that use Hub kernels in the other state are deselected."""
    attn_backends: tuple[str, ...] | None = None
    """From ini alone, as these make ids: the backends of tests that name none; None: the plugin's default."""
    dtypes: tuple[str, ...] | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """`--cuda-simulate h100:2` -> "option", for everything that is not the default."""


def resolve(config: pytest.Config, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of a run: option over environment over ini; backends and dtypes as they were written.

    Raises pytest.UsageError that names the choices.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for option in OPTIONS:
        value, origin = _resolve_one(option, config, environ)
        for one in (value if option.repeated else (value,)) if option.choices else ():
            if one not in option.choices:
                raise pytest.UsageError(f"{option.flag}: {one!r} ({origin}): choose from {', '.join(option.choices)}")
        values[option.name] = tuple(value) if option.repeated else value
        if option.is_switch and not isinstance(value, bool):
            value = values[option.name] = _switch(option, value, origin)
        if origin and option.is_switch:
            provenance[option.flag if value else f"{option.flag} off"] = origin
        elif origin:
            shown = " ".join(value) if option.repeated else value
            provenance[f"{option.flag} {shown}"] = origin
    return Settings(
        visible=values["visible"],
        unmet=values["unmet"],
        unmarked=values["unmarked"],
        isolation=values["isolation"],
        adopt=tuple(dict.fromkeys(values["adopt"])),
        wait=_seconds(values["wait"]),
        default_memory=_bytes(values["default-memory"]),
        lease_dir=values["lease-dir"],
        simulate=values["simulate"],
        assume=values["assume"],
        ledger=values["ledger"],
        plan=values["plan"],
        require=values["require"],
        runner=values["runner"],
        min_ran=_count(values["min-ran"]),
        strict=values["strict"],
        update_expectations=values["update-expectations"],
        only_attn_backends=values["attn-backends"],
        only_dtypes=values["dtypes"],
        hub_kernels=values["hub-kernels"],
        attn_backends=_ini_list(config, "cuda_attn_backends", provenance),
        dtypes=_ini_list(config, "cuda_dtypes", provenance),
        provenance=provenance,
    )


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise pytest.UsageError(f"--cuda-min-ran: {text!r}: write a number of tests")
    return int(text)


def _switch(option: Option, text: str, origin: str) -> bool:
    word = text.strip().lower()
    if word not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
        raise pytest.UsageError(f"{option.flag}: {text!r} ({origin}): write true or false")
    return word in {"1", "true", "yes", "on"}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise pytest.UsageError(f"--cuda-wait: {text!r}: write a number of seconds")
    return seconds


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from pytest_cudaenv.requirements.sizes import parse_memory

    try:
        return parse_memory(text.strip())
    except ValueError as error:
        raise pytest.UsageError(f"--cuda-default-memory: {str(error).removeprefix('memory=')}") from None


def with_canonical_names(settings: Settings) -> Settings:
    """The settings with every backend and dtype by its canonical name, once the project's own backends are known.

    Raises pytest.UsageError that names the choices.
    """

    def named(texts: tuple[str, ...], where: str, canonical: Callable[[str], str]) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(canonical(text) for text in texts))
        except ValueError as error:
            raise pytest.UsageError(f"{where}: {error}") from None

    backends, dtypes = settings.attn_backends, settings.dtypes
    return replace(
        settings,
        only_attn_backends=named(settings.only_attn_backends, "--cuda-attn-backends", _backend_name),
        only_dtypes=named(settings.only_dtypes, "--cuda-dtypes", _dtype_name),
        attn_backends=backends and named(backends, "ini cuda_attn_backends", _backend_name),
        dtypes=dtypes and named(dtypes, "ini cuda_dtypes", _dtype_name),
    )


_MAKES_IDS = {"attn-backends", "dtypes"}


def _resolve_one(option: Option, config: pytest.Config, environ: Mapping[str, str]) -> tuple[Any, str]:
    """A setting's value and where it came from; no origin for a default."""
    value = given(config, option)
    if value is not None:
        return value, "option"
    text = environ.get(option.variable, "")
    if text.strip():
        return (text.split() if option.repeated else text), option.variable
    # The ini twin of these two makes the ids and is read apart: it never deselects.
    value = None if option.name in _MAKES_IDS else config.getini(option.dest)
    if value:
        return value, f"ini {option.dest}"
    return option.default, ""


def _ini_list(config: pytest.Config, key: str, provenance: dict[str, str]) -> tuple[str, ...] | None:
    value = config.getini(key)
    if not value:
        return None
    provenance[f"{key} = {' '.join(value)}"] = "ini"
    return tuple(value)


def _backend_name(text: str) -> str:
    from pytest_cudaenv.requirements.attention import backend_name

    return backend_name(text)


def _dtype_name(text: str) -> str:
    from pytest_cudaenv.requirements.precision import cell_dtype

    return cell_dtype(text)


def assumed_distributions(texts: tuple[str, ...]) -> dict[str, str]:
    """`("flash-attn-3==3.0.0", "peft")` -> name and version; a version that is not given is a very large one.

    Raises pytest.UsageError with the grammar.
    """
    from packaging.version import InvalidVersion, Version

    assumed: dict[str, str] = {}
    for text in texts:
        name, equals, version = text.partition("==")
        try:
            Version(version or "0")
            usable = bool(name.strip()) and (bool(version) or not equals) and not set("<>=!~; ,") & set(name.strip())
        except InvalidVersion:
            usable = False
        if not usable:
            raise pytest.UsageError(f"--cuda-assume {text!r}: write DIST or DIST==VERSION, flash-attn-3==3.0.0")
        assumed[name.strip()] = version or "9999"
    return assumed


def host_of(settings: Settings) -> Host:
    """This machine, or the one that the settings simulate, with the distributions that they assume.

    Raises pytest.UsageError that names the choices.
    """
    from pytest_cudaenv.host.catalog import UnknownDeviceError, simulated_host
    from pytest_cudaenv.host.detect import detect_host
    from pytest_cudaenv.host.software import installed_software

    assumed = assumed_distributions(settings.assume)
    if settings.simulate is None:
        host = detect_host(os.environ)
        return replace(host, software=host.software.assuming(assumed)) if assumed else host
    try:
        return simulated_host(settings.simulate, installed_software().assuming(assumed))
    except UnknownDeviceError as error:
        raise pytest.UsageError(f"--cuda-simulate: {error}") from None
