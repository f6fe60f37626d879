"""Being told that a module was imported: a finder that finds nothing itself and wraps the loader of what it knows."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType


class Announcer(importlib.abc.MetaPathFinder):
    """Calls back once one of `modules` (submodules of packages) has been executed."""

    def __init__(self, modules: Collection[str], imported: Callable[[ModuleType], None]) -> None:
        self._modules = frozenset(modules)
        self._imported = imported

    def install(self) -> None:
        """Listen from now on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Listen no more; harmless where it does not."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcing(spec.loader, self._imported)
        return spec


class _Announcing(importlib.abc.Loader):
    """A loader that executes a module as the real one does, and then says so."""

    def __init__(self, loader: importlib.abc.Loader, executed: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module's loader is the real one, for whoever asks it for source or data.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._executed(module)
