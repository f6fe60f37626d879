"""Tiny models of transformers, one of each kind of attention, and FlashAttention packages that are not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
IDS = torch.arange(1, 25).reshape(2, 12) % 64


def build(model_class: Any, config: Any, backend: str) -> Any:
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=backend).eval()


def llama(backend: str, **changes: Any) -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**TEXT, **changes}), backend)


def grouped(backend: str) -> Any:
    return llama(backend, num_key_value_heads=2)


def mistral(backend: str, window: int = 4) -> Any:
    return build(MistralForCausalLM, MistralConfig(**TEXT, sliding_window=window), backend)


def gemma2(backend: str) -> Any:
    config = Gemma2Config(**TEXT, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=50.0)
    return build(Gemma2ForCausalLM, config, backend)


def clip(backend: Any) -> Any:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    return build(CLIPModel, config, backend)


def run(model: Any, **inputs: Any) -> Any:
    if isinstance(model, CLIPModel):
        inputs["pixel_values"] = torch.linspace(0, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return model(IDS, **inputs)


def set_backend(module: Any, backend: str) -> None:
    """Give one module a config of its own with another backend, as a lie would."""
    config = type(module.config)(**module.config.to_dict())
    config._attn_implementation = backend
    module.config = config


def flash_like(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Any:
    """Attention as a FlashAttention package computes it, by hand: (batch, length, heads, size)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None, :]
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        hidden = hidden | (distance > window_size[0])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -1e30).softmax(-1), v)


def flash_package(name: str, with_window: bool = True) -> ModuleType:
    """A module with the functions of a FlashAttention package."""
    package = ModuleType(name)
    if with_window:

        def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0) -> Any:  # fmt: skip
            return flash_like(q, k, v, causal, window_size)

    else:

        def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:  # type: ignore[misc]
            return flash_like(q, k, v, causal)

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    flash_attn_varlen_func.__wrapped__ = flash_attn_func  # type: ignore[attr-defined]  # the same keywords
    for function in (flash_attn_func, flash_attn_varlen_func):
        function.__module__ = name
        function.__qualname__ = function.__name__
        setattr(package, function.__name__, function)
    return package


def install_flash(monkeypatch: Any, packages: dict[str, ModuleType]) -> None:
    """Let transformers load these packages under these names, as if they were installed."""
    from transformers import modeling_flash_attention_utils as utils

    def lazy_imports(implementation: str, *_: Any, **__: Any) -> tuple[Any, ...]:
        package = packages[implementation]
        return package.flash_attn_func, package.flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    monkeypatch.setattr(utils, "_lazy_imports", lazy_imports)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(utils, name, None)
    for name in ("_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(utils, name, None)


def flash_llama(backend: str, make: Callable[[str], Any] = llama) -> Any:
    """A model that asks for FlashAttention, where transformers' own check would refuse it."""
    model = make("eager")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = backend
    return model


ALL = {
    "llama": llama,
    "gqa": grouped,
    "window": mistral,
    "vision": clip,
    "no kv heads": functools.partial(llama, num_attention_heads=2, num_key_value_heads=1),
}
