"""Everything that replacing layers by Hub kernels changes in a process, kept before a test and put back after it.

What `kernels` 0.17 and transformers 5.22 change, and where: the forwards of modules, those of functions among them,
which are one object for all models; the mapping, a context variable whose default is one dictionary for the process;
the caches of layers and of the capability; the modules of loaded kernels; transformers' registries.
https://github.com/huggingface/kernels/tree/main/kernels/src/kernels (layer/layer.py, layer/globals.py, importer.py)
"""

from __future__ import annotations

import contextvars
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

UNSET: Any = object()

LATE = "/"
"""A key with it in one of transformers' registries is a kernel's, `org/name`."""

_FLASH_STATE = (
    "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
    "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip
"""Which flash attention is loaded; in transformers 5.22 a failed load is remembered as one that worked."""

_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "transformers.integrations.hub_kernels": ("_KERNEL_MAPPING_CACHE", "_KERNEL_MODULE_MAPPING", "_HUB_KERNEL_MAPPING"),
    "transformers.modeling_flash_attention_utils": _FLASH_STATE,
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS",),
    "transformers.masking_utils": ("ALL_MASK_ATTENTION_FUNCTIONS",),
    "transformers.monkey_patching": ("_monkey_patch_mapping_cache",),
    "transformers.conversion_mapping": ("_checkpoint_conversion_mapping_cache",),
    "transformers.utils.kernel_config": ("KERNELS_SUPPORTED_DEVICE_TYPES",),
}
"""Module -> its names that hold what kernels change: None, a function, a list, a dictionary, or a registry."""

_AT_IMPORT: dict[str, Any] = {
    "_KERNEL_MAPPING_CACHE": None,
    "_checkpoint_conversion_mapping_cache": None,
} | dict.fromkeys(_FLASH_STATE)
"""What a name holds in a module that the test itself imported."""


@dataclass
class Parked:
    """Kernels that earlier tests loaded, kept so that they need not be imported again.

    A kernel registers its operators with torch once and for all: importing one anew can fail.
    """

    kernels: dict[Path, tuple[Any, dict[str, ModuleType], tuple[object, ...]]] = field(default_factory=dict)
    """Folder of the variant -> the loaded kernel, its modules, and what its files were."""
    is_usable: bool = False
    """Whether `kernels` and transformers were found to fit: packages are not exchanged under a process."""


def _files(variant: Path) -> tuple[object, ...]:
    """Something that changes when a file below a variant does."""
    found: list[tuple[str, int, int]] = []
    for folder, folders, files in os.walk(variant):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(files):
            stat = os.stat(os.path.join(folder, name))
            found.append((os.path.join(folder, name), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _identity(variant: Path) -> str | None:
    try:
        return str(json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _modules_of(identity: str | None) -> dict[str, ModuleType]:
    """What `sys.modules` holds of a kernel: the module that is named after its id, and those below."""
    if not identity:
        return {}
    # Thousands of modules, a few times a test: the cheap half of the question first.
    named = [name for name in list(sys.modules) if name.startswith(identity)]
    return {n: sys.modules[n] for n in named if n == identity or n.startswith(f"{identity}.")}


class LoadedKernels(dict[Path, Any]):
    """In place of `kernels.importer._loaded_kernels`: one kernel's submodules are never those of another.

    Two builds with one id, as a release and a local patch of it, share their entry in `sys.modules`: without this the
    second runs the first one's code. `kernels` asks `get` before each load.
    """

    def __init__(self, loaded: dict[Path, Any], parked: Parked) -> None:
        super().__init__(loaded)
        self.parked = parked
        self.modules: dict[Path, dict[str, ModuleType]] = {}
        self.before: dict[Path, dict[str, ModuleType]] = {}
        """Modules of kernels that were loaded before, by folder."""
        for path, kernel in loaded.items():
            self.before[path] = _modules_of(kernel.metadata.id)

    def get(self, path: Path, default: Any = None) -> Any:
        if path in self:
            return super().get(path)
        identity = _identity(path)
        self._clear(identity)
        kernel, modules, files = self.parked.kernels.get(path, (None, {}, ()))
        if kernel is None or files != _files(path):
            self.parked.kernels.pop(path, None)
            return default
        sys.modules.update(modules)
        self[path] = kernel
        return kernel

    def _clear(self, identity: str | None) -> None:
        """Make room in `sys.modules` for another build with this id."""
        present = _modules_of(identity)
        for path, kernel in self.items():
            if kernel.metadata.id == identity and path not in self.modules:
                self.modules[path] = present
        for name in present:
            del sys.modules[name]

    def park(self) -> None:
        """Take what was loaded since out of the process, and keep it; what was there before is as it was."""
        ours = {path: kernel for path, kernel in self.items() if path not in self.before}
        found = {path: self.modules.get(path) or _modules_of(kernel.metadata.id) for path, kernel in ours.items()}
        for path, kernel in ours.items():
            if any(Path(str(getattr(m, "__file__", ""))).is_relative_to(path) for m in found[path].values()):
                self.parked.kernels[path] = (kernel, found[path], _files(path))
            for name in _modules_of(kernel.metadata.id):
                del sys.modules[name]
        for modules in self.before.values():
            sys.modules.update(modules)


class _Offline:
    """In place of `huggingface_hub.constants`, in modules of `kernels`."""

    HF_HUB_OFFLINE = True

    def __init__(self, constants: Any) -> None:
        self._constants = constants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constants, name)


class KernelState:
    """What a process's kernels were when it was made; `restore` puts everything back. Imports `kernels`."""

    def __init__(self, parked: Parked | None = None) -> None:
        from kernels import importer
        from kernels.layer import globals as mapping
        from kernels.layer import layer, repos

        self.forwards: dict[Any, Any] = {}
        """Module -> the forward that it had of its own, or UNSET, for each whose forward was replaced since."""
        self.layers: dict[Any, type] = {}
        """Module -> the class whose forward it was given last."""
        self.repositories: dict[Any, Any] = {}
        """Module -> the object of `kernels` that the class was taken from."""
        self._asked: Any = None
        self._models: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._mapping, self._layer, self._repos, self._importer = mapping._KERNEL_MAPPING, layer, repos, importer
        self._dictionaries = [
            (d, copy.deepcopy(d)) for d in (contextvars.Context().run(self._mapping.get), self._mapping.get())
        ]
        # A layer's arguments are checked only when it is first cached: each test checks its own.
        self._cached_layers = dict(layer._CACHED_LAYER)
        layer._CACHED_LAYER.clear()
        self.forget_answers()
        self._loaded = importer._loaded_kernels
        self.loaded = importer._loaded_kernels = LoadedKernels(self._loaded, parked or Parked())
        self._replace, self._memoize = layer._replace_forward, layer._get_layer_memoize
        layer._replace_forward, layer._get_layer_memoize = self._note_forward, self._note_repository
        self._transformers = _transformers_state()
        self._set_use_kernels = self._watch_models()
        self.local_kernels = os.environ.get("LOCAL_KERNELS")

    @contextmanager
    def offline(self) -> Iterator[None]:
        """A block in which `kernels` looks for kernels in the cache alone, and other downloads are as they were."""
        from kernels import load, variants

        modules = [module for module in (load, variants, self._layer) if hasattr(module, "constants")]
        kept = [module.constants for module in modules]
        for module in modules:
            module.constants = _Offline(module.constants)
        try:
            yield
        finally:
            for module, constants in zip(modules, kept, strict=True):
                module.constants = constants

    def forget_answers(self) -> None:
        """Have `kernels` ask again for the device's capability, and for the commits of versions: it asks only once."""
        self._repos._find_capability.cache_clear()
        self._layer.LayerRepository._resolve_revision.cache_clear()

    def _note_forward(self, module: Any, layer: type) -> None:
        # The one place where `kernels` replaces a forward, whoever asks for it.
        self.keep_forward(module)
        self.layers[module], self.repositories[module], self._asked = layer, self._asked, None
        self._replace(module, layer)

    def _note_repository(self, repository: Any, module_class: type) -> Any:
        # Two repositories may give one class, so that the class does not tell which was meant.
        self._asked = None
        layer = self._memoize(repository, module_class)
        self._asked = repository
        return layer

    def keep_forward(self, module: Any) -> None:
        """Put this module's forward back at the end, as it is now, unless it was kept before."""
        self.forwards.setdefault(module, module.__dict__.get("forward", UNSET))

    def _watch_models(self) -> Callable[..., Any] | None:
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is None:
            return None
        original: Callable[..., Any] = modeling.PreTrainedModel.set_use_kernels

        def set_use_kernels(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.keep_model(model)
            return original(model, *args, **kwargs)

        modeling.PreTrainedModel.set_use_kernels = set_use_kernels
        return original

    def keep_model(self, model: Any) -> None:
        """Put back at the end whether transformers takes this model for one with kernels."""
        own = {name: model.__dict__.get(name, UNSET) for name in ("_use_kernels", "kernel_config")}
        self._models.setdefault(id(model), (model, own))

    def restore(self) -> None:
        """Put everything back; harmless if it was done before."""
        for module, forward in self.forwards.items():
            put_back(module, "forward", forward)
        self.forwards.clear()
        self.layers.clear()
        self.repositories.clear()
        for model, own in self._models.values():
            for name, value in own.items():
                put_back(model, name, value)
        self._models.clear()
        self._restore_mapping()
        self._layer._CACHED_LAYER.clear()
        self._layer._CACHED_LAYER.update(self._cached_layers)
        self.forget_answers()
        if self._importer._loaded_kernels is self.loaded:
            self.loaded.park()
            self._importer._loaded_kernels = self._loaded
            self._layer._replace_forward, self._layer._get_layer_memoize = self._replace, self._memoize
            if self._set_use_kernels is not None:
                sys.modules["transformers.modeling_utils"].PreTrainedModel.set_use_kernels = self._set_use_kernels
        _restore_transformers(self._transformers)
        if self.local_kernels is None:
            os.environ.pop("LOCAL_KERNELS", None)
        else:
            os.environ["LOCAL_KERNELS"] = self.local_kernels

    def _restore_mapping(self) -> None:
        current = self._dictionaries[-1][0]
        if self._mapping.get() is not current:
            self._mapping.set(current)
        for dictionary, content in self._dictionaries:
            dictionary.clear()
            dictionary.update(content)


def put_back(module: Any, name: str, value: Any) -> None:
    """Give a module's own dictionary the value, or take the entry away where there was none."""
    if value is UNSET:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _transformers_state() -> dict[tuple[str, str], Any]:
    """Copies of what transformers holds; of modules that are not imported, nothing."""
    state: dict[tuple[str, str], Any] = {}
    for module_name, names in _TRANSFORMERS.items():
        if (module := sys.modules.get(module_name)) is None:
            continue
        for name in names:
            state[module_name, name] = _copied(getattr(module, name, UNSET))
    return state


def _copied(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return (value, value.copy())
    if hasattr(value, "_global_mapping"):
        return (value, dict(value._local_mapping), dict(type(value)._global_mapping))
    return value


def _restore_transformers(state: dict[tuple[str, str], Any]) -> None:
    for module_name, names in _TRANSFORMERS.items():
        if (module := sys.modules.get(module_name)) is None:
            continue
        for name in names:
            if (kept := state.get((module_name, name), UNSET)) is not UNSET:
                _put(module, name, kept)
            elif (module_name, name) not in state:
                _put_late(module, name)


def _put(module: Any, name: str, kept: Any) -> None:
    if not isinstance(kept, tuple):
        setattr(module, name, kept)
        return
    value = kept[0]
    if hasattr(value, "_global_mapping"):
        for current, content in ((value._local_mapping, kept[1]), (type(value)._global_mapping, kept[2])):
            current.clear()
            current.update(content)
        return
    if isinstance(value, list):
        value[:] = kept[1]
    else:
        value.clear()
        value.update(kept[1])
    setattr(module, name, value)


def _put_late(module: Any, name: str) -> None:
    """What a name held when its module was imported, which was after the state was kept."""
    value = getattr(module, name, UNSET)
    if name in _AT_IMPORT and value is not UNSET:
        setattr(module, name, _AT_IMPORT[name])
    elif name == "_KERNEL_MODULE_MAPPING":
        value.clear()
    elif hasattr(value, "_global_mapping"):
        for mapping in (value._local_mapping, type(value)._global_mapping):
            for key in [key for key in mapping if LATE in str(key)]:
                del mapping[key]
