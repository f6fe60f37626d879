"""What runs in a model where a kernel could: read off the modules themselves, never off a setting.

`model.use_kernels` is true where nothing was replaced, and a fallback binds a layer's own forward anew, so that
neither it nor the presence of a forward proves anything.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaenv.verdict.kernel_report import Replacement


@dataclass(frozen=True)
class Place:
    """A layer, or a function, that a kernel can replace."""

    name: str
    layer_name: str
    module: Any
    is_function: bool


def places(model: Any) -> Iterator[Place]:
    """What `kernels.kernelize` visits in a model; a function once, wherever it is attached."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for function_name, function in getattr(module, "_kernel_funcs", {}).items():
            if id(function) not in seen:
                seen.add(id(function))
                where = f"{name}.{function_name}" if name else function_name
                yield Place(where, str(type(function).kernel_layer_name), function, True)
        if hasattr(type(module), "kernel_layer_name"):
            yield Place(name, str(type(module).kernel_layer_name), module, False)


def row(
    place: Place,
    *,
    layer: type | None = None,
    origin: Any = None,
    mode: str | None = None,
    calls: int = 0,
    reason: str | None = None,
) -> Replacement:
    """What runs in one place now; `layer` is the class whose forward it was given last, `origin` where that is from."""
    module = place.module
    forward = module.__dict__.get("forward")
    facts: dict[str, Any] = {"is_function": place.is_function, "calls": calls, "mode": mode}
    if forward is None:
        facts["mode"] = None
        return Replacement(place.name, place.layer_name, "untouched", reason=reason, **facts)
    function = getattr(forward, "__func__", forward)
    if function is type(module).forward:
        return Replacement(place.name, place.layer_name, "original", reason=reason, **facts)
    if layer is None or layer.__dict__.get("forward") is not function:
        layer = origin = None  # somebody else replaced it since
    file = file_of(function)
    repository, revision = described(origin)
    loaded = _loaded(file)
    if loaded is not None and loaded.repo_info is not None:
        repository, revision = loaded.repo_info.repo_id, revision or loaded.repo_info.revision
    return Replacement(
        place.name,
        place.layer_name,
        "kernel",
        repository or (str(loaded.metadata.name) if loaded is not None else None),
        revision,
        Path(str(loaded.module.__file__)).parent.name if loaded is not None else None,
        file,
        has_backward=None if layer is None else bool(getattr(layer, "has_backward", True)),
        can_torch_compile=None if layer is None else bool(getattr(layer, "can_torch_compile", False)),
        **facts,
    )


def file_of(function: Any) -> str | None:
    """The file of the code that a forward runs."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else str(code.co_filename)


def described(repository: Any) -> tuple[str | None, str | None]:
    """(`org/name` or a folder, revision) of an object of `kernels` that names a layer."""
    if repository is None:
        return None, None
    if (path := getattr(repository, "_repo_path", None)) is not None:
        return str(path), None
    repo_id = getattr(repository, "_repo_id", None)
    if (version := getattr(repository, "_version", None)) is not None:
        return repo_id, f"v{version}"
    if (locks := getattr(repository, "kernel_locks", None)) is not None:
        return repo_id, str(locks[repository.kernel_dep].commit)
    return repo_id or type(repository).__name__, getattr(repository, "_revision", None)


def _loaded(file: str | None) -> Any:
    """The loaded kernel that a file belongs to."""
    importer = sys.modules.get("kernels.importer")
    if importer is None or file is None:
        return None
    return next((k for p, k in importer._loaded_kernels.items() if Path(file).is_relative_to(p)), None)
