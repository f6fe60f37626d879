"""Mappings of layers to kernels, as `kernels` takes them; each function imports it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_cudaenv.requirements.kernel_sources import (
    GRAMMAR,
    Given,
    HubLayer,
    LocalLayer,
    LockedLayer,
    Source,
    mode_name,
    source,
)


def of_kernels(wanted: Source) -> Any:
    """The object of `kernels` that names a layer of a kernel."""
    from kernels import LayerRepository, LocalLayerRepository, LockedLayerRepository

    if isinstance(wanted, LocalLayer):
        # `kernels` takes one folder under two spellings for two kernels.
        return LocalLayerRepository(wanted.path.expanduser().resolve(), layer_name=wanted.layer)
    trust = {"trust_remote_code": wanted.trust_remote_code}
    if isinstance(wanted, LockedLayer):
        return LockedLayerRepository(wanted.repo, lockfile=wanted.lockfile, layer_name=wanted.layer, **trust)
    at = {"version": wanted.version} if wanted.version is not None else {"revision": wanted.revision}
    return LayerRepository(wanted.repo, layer_name=wanted.layer, **trust, **at)


def mode_named(mode: Any) -> Any:
    """A mode of `kernels`, from itself or from its name: `training`, `inference|torch_compile`.

    Raises ValueError that names them.
    """
    from kernels import Mode

    if not isinstance(mode, str):
        return mode
    if mode.lower() == "fallback":
        return Mode.FALLBACK
    first, *rest = (Mode[part.upper()] for part in mode_name(mode).split("|"))
    return first | rest[0] if rest else first


def mode_text(mode: Any) -> str:
    """A mode as reports write it: `TRAINING|TORCH_COMPILE`."""
    names = [name for name in ("TRAINING", "INFERENCE", "TORCH_COMPILE", "FALLBACK") if type(mode)[name] in mode]
    return "|".join(names)


def mapping_of(given: Given, device_type: str, root: Path) -> dict[str, dict[Any, Any]]:
    """A mapping as `kernels` takes it; what names no device is for `device_type`. Raises ValueError and TypeError."""
    return {name: _by_device(name, value, device_type, root) for name, value in given.items()}


def _by_device(name: str, value: Any, device_type: str, root: Path) -> dict[Any, Any]:
    from kernels import Device

    if isinstance(value, Mapping) and value and all(_is_device(key, Device) for key in value):
        return {key: _by_mode(name, inner, root) for key, inner in value.items()}
    return {device_type: _by_mode(name, value, root)}


DEVICE_TYPES = frozenset({"cpu", "cuda", "mps", "neuron", "npu", "rocm", "tpu", "xpu"})


def _is_device(key: Any, device_class: type) -> bool:
    return isinstance(key, device_class) or key in DEVICE_TYPES


def _by_mode(name: str, value: Any, root: Path) -> Any:
    if isinstance(value, Mapping):
        return {mode_named(mode): _repository(name, inner, root) for mode, inner in value.items()}
    return _repository(name, value, root)


def _repository(name: str, value: Any, root: Path) -> Any:
    if isinstance(value, str):
        value = source(value, root)
    if isinstance(value, (LocalLayer, HubLayer, LockedLayer)):
        return of_kernels(value)
    if hasattr(value, "load"):
        return value
    raise TypeError(f"{name}: {value!r} is no kernel's layer: write {GRAMMAR}, hub_kernels.local(…) or .hub(…)")
