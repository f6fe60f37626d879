"""Where a kernel's layer comes from: a folder, the Hub, or a lock; and mappings of layers to them.

Plain facts; `repository` makes of each what `kernels` takes, and imports it then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

GRAMMAR = '"org/name:Layer@v1" (a version), "org/name:Layer@main" (a branch, tag or commit), or "./folder:Layer"'

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<layer>\w+)(?:@(?P<at>[\w./-]+))?")
_FOLDER = re.compile(r"(?P<path>(?:\.{1,2}/|/|~/).*):(?P<layer>\w+)")


@dataclass(frozen=True)
class LocalLayer:
    """A layer of a kernel in a folder: its repository, its `build` folder, or one build variant."""

    path: Path
    layer: str

    def repository(self) -> Any:
        from kernels import LocalLayerRepository

        # `kernels` takes one folder under two spellings for two kernels.
        return LocalLayerRepository(self.path.expanduser().resolve(), layer_name=self.layer)

    def __str__(self) -> str:
        return f"{self.path}:{self.layer}"


@dataclass(frozen=True)
class HubLayer:
    """A layer of a kernel on the Hub, at a version or a revision."""

    repo: str
    layer: str
    version: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if (self.version is None) == (self.revision is None):
            raise ValueError(f"{self.repo}:{self.layer}: give version= or revision=, one of them")

    def repository(self) -> Any:
        from kernels import LayerRepository

        at = {"version": self.version} if self.version is not None else {"revision": self.revision}
        return LayerRepository(self.repo, layer_name=self.layer, trust_remote_code=self.trust_remote_code, **at)

    def __str__(self) -> str:
        return f"{self.repo}:{self.layer}@{f'v{self.version}' if self.version is not None else self.revision}"


@dataclass(frozen=True)
class LockedLayer:
    """A layer of a kernel on the Hub, at the commit that a lock file names."""

    repo: str
    layer: str
    lockfile: Path
    trust_remote_code: bool = False

    def repository(self) -> Any:
        from kernels import LockedLayerRepository

        return LockedLayerRepository(
            self.repo, lockfile=self.lockfile, layer_name=self.layer, trust_remote_code=self.trust_remote_code
        )

    def __str__(self) -> str:
        return f"{self.repo}:{self.layer} ({self.lockfile.name})"


Source: TypeAlias = "LocalLayer | HubLayer | LockedLayer"

Given: TypeAlias = "Mapping[str, Any]"
"""Layer name -> a source, its text, an object of `kernels`, or a dict of these by device, or by mode."""


def source(text: str, root: Path = Path()) -> LocalLayer | HubLayer:
    """The source that a text names; folders are relative to `root`. Raises ValueError, with the grammar."""
    if (local := _FOLDER.fullmatch(text)) is not None:
        return LocalLayer(root / Path(local["path"]).expanduser(), local["layer"])
    if (hub := _HUB.fullmatch(text)) is None:
        raise ValueError(f"{text!r} names no kernel's layer: write {GRAMMAR}")
    if hub["at"] is None:
        raise ValueError(f"{text!r} names neither version nor revision: write {GRAMMAR}")
    if (version := re.fullmatch(r"v(\d+)", hub["at"])) is not None:
        return HubLayer(hub["repo"], hub["layer"], version=int(version[1]))
    return HubLayer(hub["repo"], hub["layer"], revision=hub["at"])


def sources(mapping: Given) -> list[Source]:
    """Every source that a mapping names, for the needs of a test. Raises ValueError, with the grammar."""
    return [one for value in mapping.values() for one in _sources_in(value)]


def _sources_in(value: Any) -> list[Source]:
    if isinstance(value, Mapping):
        return [one for inner in value.values() for one in _sources_in(inner)]
    if isinstance(value, str):
        return [source(value)]
    return [value] if isinstance(value, (LocalLayer, HubLayer, LockedLayer)) else []


def mode_named(mode: Any) -> Any:
    """A mode of `kernels`, from itself or from its name: `training`, `inference|torch_compile`.

    Raises ValueError that names them.
    """
    from kernels import Mode

    if not isinstance(mode, str):
        return mode
    result = Mode._NONE
    for part in re.split(r"[|+]", mode):
        try:
            result = Mode[part.strip().upper()] | result
        except KeyError:
            raise ValueError(f"mode {mode!r}: write training or inference, with |torch_compile for compiled") from None
    return result


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
        return value.repository()
    if hasattr(value, "load"):
        return value
    raise TypeError(f"{name}: {value!r} is no kernel's layer: write {GRAMMAR}, hub_kernels.local(…) or .hub(…)")
