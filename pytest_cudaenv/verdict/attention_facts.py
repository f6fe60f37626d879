"""What reached an attention backend: causality, window, softcap and the rest, read where the backend is called.

A fact that cannot be told is left out, which is not the same as a fact that is None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Facts = Mapping[str, Any]

_SIZES = ("heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "device")


def facts_of(backend: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """The facts of one call of an entry point, or of a registry's function (`eager` and a project's own)."""
    given = bound(function, args, kwargs)
    if backend == "sdpa":
        return _of_sdpa(given)
    if backend.startswith("flash_attention") or "softmax_scale" in given:
        return _of_flash(given)
    if backend == "flex_attention":
        return _of_flex(given)
    return _of_interface(function, given)


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; torch's own sdpa, which has no signature, included."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        return {**dict(zip(names, args, strict=False)), **kwargs}
    try:
        found = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    found.apply_defaults()
    values = dict(found.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(values.pop(name, {}))
    return values


def _sizes(query: Any, key: Any, heads: int, length: int) -> dict[str, Any]:
    if getattr(query, "dim", None) is None or query.dim() < 3 or key is None:
        return {}
    return {
        "heads": query.shape[heads],
        "kv_heads": key.shape[heads],
        "queries": query.shape[length],
        "keys": key.shape[length],
        "head_dim": query.shape[-1],
        "dtype": str(query.dtype).removeprefix("torch."),
        "device": query.device.type,
    }


def _of_sdpa(given: Mapping[str, Any]) -> Facts:
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    query, key = given.get("query"), given.get("key")
    facts = _sizes(query, key, -3, -2)
    facts |= {"scale": given.get("scale"), "dropout": given.get("dropout_p", 0.0), "softcap": None, "sinks": False}
    facts["mask"] = None if mask is None else f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
    facts |= _autocast(query)
    facts["grouped"] = bool(given.get("enable_gqa", False))
    if mask is None:
        return {**facts, "causal": causal, "window": None}
    return {**facts, **mask_facts(mask), **({"causal": True} if causal else {})}


def _autocast(query: Any) -> dict[str, str]:
    """The dtype in which sdpa computes under autocast, which casts behind the entry point."""
    import torch

    if not isinstance(query, torch.Tensor) or not query.is_floating_point() or query.dtype == torch.float64:
        return {}
    if not torch.is_autocast_enabled(query.device.type):
        return {}
    return {"dtype": str(torch.get_autocast_dtype(query.device.type)).removeprefix("torch.")}


def _of_flash(given: Mapping[str, Any]) -> Facts:
    query, key = given.get("q"), given.get("k")
    packed = query is not None and query.dim() == 3
    facts = _sizes(query, key, -2, 0 if packed else -3)
    if packed and isinstance(given.get("max_seqlen_k"), int):
        facts |= {"queries": given.get("max_seqlen_q"), "keys": given["max_seqlen_k"]}
    left = (given.get("window_size") or (-1, -1))[0]
    return {
        **facts,
        "causal": bool(given.get("causal", False)),
        "window": None if left is None or left < 0 else left + 1,
        "softcap": given.get("softcap") or None,
        "scale": given.get("softmax_scale"),
        "dropout": given.get("dropout_p", 0.0),
        "sinks": given.get("s_aux") is not None or given.get("learnable_sink") is not None,
    }


def _of_flex(given: Mapping[str, Any]) -> Facts:
    facts = _sizes(given.get("query"), given.get("key"), -3, -2)
    facts |= {"scale": given.get("scale", given.get("scaling"))}
    modifier = given.get("score_mod")
    names = getattr(getattr(modifier, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(modifier, "__closure__", None) or (), strict=False))
    if modifier is None or "softcap" in cells:
        facts["softcap"] = cells["softcap"].cell_contents if cells else None
    elif "softcap" in given:  # transformers' own function, around torch's
        facts["softcap"] = given["softcap"]
    block = given.get("block_mask", given.get("attention_mask"))
    shape = getattr(block, "shape", None)
    if block is None:
        facts |= {"causal": False, "window": None}
    elif hasattr(block, "mask_mod") and shape is not None and shape[-1] * shape[-2] <= 2**20:
        import torch
        from torch.nn.attention.flex_attention import create_mask

        with torch.no_grad():
            dense = create_mask(
                block.mask_mod, shape[0], shape[1], shape[-2], shape[-1], device=str(block.kv_indices.device)
            )
        facts |= mask_facts(dense)
    return facts


def _of_interface(function: Callable[..., Any], given: Mapping[str, Any]) -> Facts:
    facts = _sizes(given.get("query"), given.get("key"), -3, -2)
    facts |= {"scale": given.get("scaling"), "dropout": given.get("dropout", 0.0)}
    # What a function does not name, it takes with **kwargs and drops.
    facts["softcap"] = given.get("softcap") if _names(function, "softcap") else None
    facts["sinks"] = given.get("s_aux") is not None and _names(function, "s_aux")
    mask = given.get("attention_mask")
    if mask is None:
        return {**facts, "causal": False, "window": None}
    return {**facts, **mask_facts(mask)}


def _names(function: Callable[..., Any], argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def mask_facts(mask: Any) -> dict[str, Any]:
    """What a mask (…, queries, keys), boolean or additive, lets through: whether it is causal, and its window.

    The last query is taken to stand at the last key. A row of padding may see everything (transformers makes it
    so, that its softmax is a number): one whose own key no other row sees says nothing. Reads the mask's values, so
    nothing is said while a CUDA graph is captured.
    """
    import torch

    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.shape[-1] < 2 or _is_unreadable(mask):
        return {}
    with torch.no_grad():
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        queries, keys = allowed.shape[-2:]
        rows = torch.arange(keys - queries, keys, device=mask.device)
        distance = rows[:, None] - torch.arange(keys, device=mask.device)[None, :]
        sees_all = allowed.all(-1, keepdim=True)
        others_see = (allowed & ~sees_all).any(-2)[..., rows]
        is_padding = sees_all & ~sees_all.all() & ~others_see[..., None] & (rows[:, None] < keys - 1)
        seen = (allowed & ~is_padding).reshape(-1, queries, keys).any(0)
        if not bool(seen.any()):
            return {}
        reach = int(distance[seen].max()) + 1
        facts: dict[str, Any] = {"window": reach if reach < keys else None}
        if queries > 1:
            facts["causal"] = not bool(seen[distance < 0].any())
        return facts


def _is_unreadable(mask: Any) -> bool:
    import torch

    if mask.is_meta or type(mask) not in (torch.Tensor, torch.nn.Parameter):
        return True
    return bool(mask.is_cuda and torch.cuda.is_current_stream_capturing())
