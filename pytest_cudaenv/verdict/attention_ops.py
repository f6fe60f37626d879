"""By what each attention backend is known: its operators in a dispatch mode, and the functions that call it.

Operators' names are as torch's `OpOverload.name()` gives them, without the overload. Measured with torch 2.11 (H200)
and 2.13 (CPU); https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pytest_cudaenv.requirements.attention import AttnBackend, UnknownBackendError, backend_name, registered, stand_ins

SDPA = "aten::scaled_dot_product_attention"
"""sdpa itself: seen only where it is not taken apart first, which is in inference mode."""

KERNELS = ("flash", "efficient", "cudnn", "math", "overrideable")
"""What may run behind sdpa."""

_SDPA_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_flash_attention_forward": "flash",
    "aten::_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_efficient_attention_forward": "efficient",
    "aten::_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_cudnn_attention_forward": "cudnn",
    "aten::_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
}

_NATIVE = {"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}
"""The fast path of torch's own modules, which chooses inside and does not say what."""

_FLEX = {"flex_attention": False, "flex_attention_backward": True}

# `flash_attn`, `flash_attn_3`, and of Hub kernels `_flash_attn2_1a2b3c`, `_vllm_flash_attn3_1a2b3c`. A digit that a
# further one of a hash follows is not the version.
_FLASH_SPACE = re.compile(r"_?(?:vllm_)?flash_attn(?:_?(?P<version>[234])(?![0-9a-f]))?(?:_\w+)?")

_COMPUTES = re.compile(r"fwd|bwd|forward|backward|mha|attn_func")


@dataclass(frozen=True)
class Operator:
    """What one operator says of the attention that called it."""

    backend: str
    kernel: str | None = None
    is_backward: bool = False


def operator_of(name: str, own: Iterable[tuple[str, str]] = ()) -> Operator | None:
    """What an operator's name says; None where it is not attention. `own`: (glob of names, backend) of a project."""
    for pattern, backend in own:
        if fnmatchcase(name, pattern):
            return Operator(backend, is_backward=_is_backward(name))
    if name in _FLEX:
        return Operator("flex_attention", is_backward=_FLEX[name])
    if name in _NATIVE:
        return Operator("native_mha")
    space, _, operator = name.partition("::")
    if space == "aten":
        kernel = _SDPA_KERNELS.get(name.removesuffix("_backward"))
        return None if kernel is None else Operator("sdpa", kernel, name.endswith("_backward"))
    found = _FLASH_SPACE.fullmatch(space)
    if found is None or not _COMPUTES.search(operator):
        return None
    return Operator(f"flash_attention_{found['version'] or 2}", is_backward=_is_backward(name))


def _is_backward(name: str) -> bool:
    return "bwd" in name or "backward" in name


ENTRY_POINTS: dict[str, tuple[str, ...]] = {
    "sdpa": ("torch.nn.functional:scaled_dot_product_attention",),
    "flex_attention": ("torch.nn.attention.flex_attention:flex_attention",),
    "flash_attention_2": tuple(
        f"{module}:{name}"
        for module in ("flash_attn", "flash_attn.flash_attn_interface")
        for name in (
            "flash_attn_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
            "flash_attn_kvpacked_func",
            "flash_attn_qkvpacked_func",
            "flash_attn_varlen_kvpacked_func",
            "flash_attn_varlen_qkvpacked_func",
        )
    ),
    "flash_attention_3": tuple(
        f"flash_attn_interface:{name}"
        for name in (
            "flash_attn_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
            "flash_attn_qkvpacked_func",
        )
    ),
    "flash_attention_4": tuple(
        f"{module}:{name}"
        for module in ("flash_attn.cute", "flash_attn.cute.interface")
        for name in ("flash_attn_func", "flash_attn_varlen_func")
    ),
}
"""Backend -> the functions `module:name` by which models and tests call it."""


def entry_points() -> list[tuple[str, str, str]]:
    """(module, function, backend) of every known entry point, a project's own included."""
    found = {**ENTRY_POINTS, **{b.name: b.entry_points for b in _own()}}
    return [(*_split(point), backend) for backend, points in found.items() for point in points]


def _split(point: str) -> tuple[str, str]:
    module, _, name = point.partition(":")
    return module, name


def own_operators() -> list[tuple[str, str]]:
    """(glob of operator names, backend) that a project has declared."""
    return [(pattern, backend.name) for backend in _own() for pattern in backend.operators]


def _own() -> list[AttnBackend]:
    return [backend for backend in registered().values() if backend.entry_points or backend.operators]


def of_module(module: str) -> str | None:
    """The backend whose package a module is of: `flash_attn.cute.interface` -> FlashAttention-4."""
    known = sorted({(place, backend) for place, _, backend in entry_points()}, key=lambda pair: -len(pair[0]))
    known.append(("flash_attn_3", "flash_attention_3"))
    for place, backend in known:
        if not place.startswith("torch.") and (module == place or module.startswith(f"{place}.")):
            return backend
    return None


def canonical(name: str) -> str:
    """The one name of a backend: `fa3`, and `kernels-community/vllm-flash-attn3@main` for FlashAttention-3's own.

    A Hub kernel that stands in for no backend is its repository; what nobody knows is as it is.
    """
    name = name.removeprefix("paged|")
    if name == "eager" or name in ENTRY_POINTS:
        return name
    repo = re.split("[@:]", name, maxsplit=1)[0]
    for backend in registered():
        if repo == backend or repo in stand_ins(backend):
            return backend
    if "/" in repo:
        return repo
    try:
        return backend_name(name)
    except UnknownBackendError:
        return name
