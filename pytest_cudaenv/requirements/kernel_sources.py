"""Where a kernel's layer comes from: a folder, the Hub, or a lock; as plain facts, and as text."""

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

    def __str__(self) -> str:
        return f"{self.repo}:{self.layer}@{f'v{self.version}' if self.version is not None else self.revision}"


@dataclass(frozen=True)
class LockedLayer:
    """A layer of a kernel on the Hub, at the commit that a lock file names."""

    repo: str
    layer: str
    lockfile: Path
    trust_remote_code: bool = False

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


MODES = frozenset({"training", "inference", "training|torch_compile", "inference|torch_compile"})


def mode_name(text: str) -> str:
    """A mode's name, in the spelling of MODES. Raises ValueError that names them."""
    parts = [part.strip().lower() for part in re.split(r"[|+]", text)]
    name = "|".join(sorted(parts, key=lambda part: part == "torch_compile"))
    if name not in MODES:
        raise ValueError(f"mode {text!r}: choose from {', '.join(sorted(MODES))}")
    return name
