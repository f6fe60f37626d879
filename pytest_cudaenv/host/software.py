"""Installed distributions and the torch build, without importing any of them."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import warnings
from collections import ChainMap
from collections.abc import Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast


def canonical(distribution: str) -> str:
    """The name under which PyPI knows a distribution: `Flash_Attn.3` -> `flash-attn-3`."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    """`2.13.0+cu130`."""
    cuda: str | None = None
    """The CUDA version it was built with, `13.0`; None for CPU and ROCm builds."""
    hip: str | None = None
    """The ROCm version it was built with; None otherwise."""
    arch_list: tuple[str, ...] | None = None
    """`("sm_80", "compute_90")`; None: unknown, which is never a reason to skip."""


@dataclass(frozen=True)
class Software:
    """Installed distributions (canonical name -> version), importable modules and the torch build."""

    distributions: Mapping[str, str] = field(default_factory=dict)
    modules: Container[str] = frozenset()
    """Dotted names that would be found; nothing is imported to know."""
    torch: TorchBuild | None = None
    assumed: frozenset[str] = frozenset()
    """Distributions that `--cuda-assume` declares installed and working."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment that libraries read to decide what they do (`LOCAL_KERNELS`, `HF_HUB_OFFLINE`)."""

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or None."""
        return self.distributions.get(canonical(distribution))

    def assuming(self, assumed: Mapping[str, str]) -> Software:
        """This software with the given distributions (name -> version) taken as installed and working.

        `torch` may carry its build as a local version, as its wheels do: `2.11.0+cu130`, `2.11.0+cpu`.
        """
        names = {canonical(name): version for name, version in assumed.items()}
        torch = self.torch
        if "torch" in names:
            torch = torch_build_of(names["torch"]) or torch
        return replace(
            self,
            # A copy would look up every distribution that is installed.
            distributions=ChainMap(names, cast("MutableMapping[str, str]", self.distributions)),
            assumed=self.assumed | frozenset(names),
            torch=torch,
        )


def torch_build_of(version: str) -> TorchBuild | None:
    """The build that a wheel's local version names (`2.11.0+cu130`); None where it names none."""
    local = version.partition("+")[2]
    if match := re.fullmatch(r"cu(\d+)(\d)", local):
        return TorchBuild(version, cuda=f"{match[1]}.{match[2]}")
    if match := re.fullmatch(r"rocm([\d.]+)", local):
        return TorchBuild(version, hip=match[1])
    return TorchBuild(version) if local.startswith("cpu") else None


class InstalledDistributions(Mapping[str, str]):
    """Every installed distribution, each looked up once, when somebody asks for it."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = _installed_version(name)
        version = self._known[name]
        if version is None:
            raise KeyError(name)
        return version

    def __iter__(self) -> Iterator[str]:
        names = {_metadata(d, "Name") for d in importlib.metadata.distributions()}
        return iter({canonical(name) for name in names if name})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _installed_version(name: str) -> str | None:
    try:
        return _metadata(importlib.metadata.distribution(name), "Version")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _metadata(distribution: importlib.metadata.Distribution, key: str) -> str | None:
    """One field of a distribution's metadata; a half-removed one (no METADATA, or an unreadable one) has none."""
    with warnings.catch_warnings():
        # Python 3.12 deprecates the None that it answers for a missing field; later ones raise.
        warnings.simplefilter("ignore")
        try:
            return distribution.metadata[key] or None
        except (LookupError, OSError, ValueError, TypeError):
            return None


class InstalledModules(Container[str]):
    """Modules that the import system would find, told from files alone: no parent package is imported."""

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return find_module(name) is not None


def find_module(name: str) -> Path | None:
    """The file (or folder, for a namespace package) of a module, without importing its parents; None if absent."""
    path: list[str] | None = None
    found: Path | None = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        try:
            spec = _find_spec(".".join(parts[:depth]), path)
        except KeyError:
            # importlib asks `sys.modules` for the parent of a nested namespace package.
            spec, folders = None, [f for entry in path or () if os.path.isdir(f := os.path.join(entry, part))]
        except Exception:
            # A finder that fails, whoever wrote it, fails the import as well.
            return None
        else:
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if spec is None and not folders:
            return None
        path = folders
        found = Path(spec.origin) if spec is not None and spec.origin else Path(path[0]) if path else None
    return found


def _find_spec(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module as the import system finds it, through the finders of editable installs too."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, path) if find_spec is not None else None
        if spec is not None:
            return cast("importlib.machinery.ModuleSpec", spec)
    return None


def installed_software() -> Software:
    """What this interpreter would import, looked up lazily and never imported."""
    return Software(InstalledDistributions(), InstalledModules(), installed_torch(), environ=dict(os.environ))


def installed_torch() -> TorchBuild | None:
    """The installed torch build, read from its `version.py`; None where torch is not installed.

    The list of architectures is compiled into torch and known only once somebody has imported it.
    """
    init = find_module("torch")
    if init is None or not init.is_file():
        return None
    try:
        values = _constants((init.parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None

    def text(name: str) -> str | None:
        value = values.get(name)
        return str(value) if value else None

    return TorchBuild(text("__version__") or "unknown", text("cuda"), text("hip"))


def _constants(source: str) -> dict[str, object]:
    """The names that a module assigns a constant to at its top level, read without running it."""
    values: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values.update({t.id: node.value.value for t in targets if isinstance(t, ast.Name)})
    return values


def imported_arch_list() -> tuple[str, ...] | None:
    """Architectures compiled into the torch of this process; None unless torch is imported already.

    To be asked only once CUDA is initialised: torch takes the question itself for the end of safe forks, and every
    fork after it fails with "Cannot re-initialize CUDA in forked subprocess".
    Asks the extension directly: `torch.cuda.get_arch_list` first asks whether a device is available, which
    would initialise CUDA. https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py
    """
    extension = getattr(sys.modules.get("torch"), "_C", None)
    flags = getattr(extension, "_cuda_getArchFlags", None)
    if flags is None:
        return None
    return tuple(str(flags() or "").split()) or None
