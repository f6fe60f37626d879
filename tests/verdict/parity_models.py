"""Tiny transformers models, seeded, and attention backends that lie. Imports torch and transformers when it is used."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VOCABULARY, IMAGE_TOKEN = 99, 98


@dataclass(frozen=True)
class Tiny:
    """A model class with a config, and what it is called with."""

    name: str
    model_class: Any
    config: Any
    has_image: bool = False

    def build(self, backend: Any, dtype: Any, seed: int = 0) -> Any:
        """The same weights in every backend, rounded to the dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = self.model_class._from_config
            first = make(copy.deepcopy(self.config), attn_implementation="eager", dtype=torch.float32)
            model = make(copy.deepcopy(self.config), attn_implementation=backend, dtype=dtype)
        model.load_state_dict(first.state_dict())
        return model.eval()

    def inputs(self, seed: int = 0, batch: int = 7, length: int = 12, padding: int = 5) -> dict[str, Any]:
        """Tokens whose last row is padded on the left, as transformers' own tests have it, and an image."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, IMAGE_TOKEN, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        if padding:
            mask[-1, :padding] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.has_image:
            ids[:, -5:-1] = IMAGE_TOKEN
            inputs["pixel_values"] = torch.rand((batch, 3, 8, 8), generator=generator)
        return inputs


def _text(cls: Any = transformers.LlamaConfig, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Weights ten times larger than a new model's, whose attention is all but uniform: nothing in it would be tested.
    return cls(**({"vocab_size": VOCABULARY, "initializer_range": 0.2} | sizes | more))


def models() -> dict[str, Tiny]:
    """Llama, one with grouped queries, one with a sliding window, and one that sees images, with sub-configs."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        projection_dim=32,
    )
    llava = transformers.LlavaConfig(
        vision_config=vision,
        text_config=_text(),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=4,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    mistral = _text(transformers.MistralConfig, num_key_value_heads=2, sliding_window=4)
    found = [
        Tiny("llama", transformers.LlamaForCausalLM, _text()),
        Tiny("gqa", transformers.LlamaForCausalLM, _text(num_key_value_heads=2)),
        Tiny("window", transformers.MistralForCausalLM, mistral),
        Tiny("llava", transformers.LlavaForConditionalGeneration, llava, has_image=True),
    ]
    return {tiny.name: tiny for tiny in found}


def four_layers() -> Tiny:
    """A Llama of four layers."""
    return Tiny("four", transformers.LlamaForCausalLM, _text(num_hidden_layers=4))


def cell(backend: Any, dtype: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """A cell, on the CPU if nothing else is said."""
    return SimpleNamespace(attn_backend=backend, dtype=dtype, device=device)


@contextlib.contextmanager
def registered(name: str, function: Callable[..., Any], masks: str = "sdpa") -> Iterator[None]:
    """A backend in transformers' registries while the block runs; its masks are another backend's."""
    functions, mask_functions = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    functions.register(name, function)
    type(mask_functions).register(name, mask_functions[masks])
    try:
        yield
    finally:
        del type(functions)._global_mapping[name], type(mask_functions)._global_mapping[name]


def sdpa(*args: Any, **kwargs: Any) -> Any:
    """What transformers calls for `sdpa`."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
