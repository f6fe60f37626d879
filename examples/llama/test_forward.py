"""One forward pass: every cell against eager one precision higher, and proof that its backend ran in every layer."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes

pytestmark = [
    attn_backends(
        "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
        model=LlamaForCausalLM,
    ),
    dtypes("float32", "float16", "bfloat16"),
]  # fmt: skip


def test_logits(model, input_ids, assert_parity):
    assert_parity(model, input_ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, input_ids, side, assert_parity):
    """A row that is padded is judged by itself: it cannot hide in what the others are allowed."""
    mask = torch.ones_like(input_ids)
    mask[0, slice(0, 7) if side == "left" else slice(-7, None)] = 0
    assert_parity(model, input_ids * mask, attention_mask=mask)


@torch.no_grad()
def test_the_backend_runs_in_every_layer(model, cell, input_ids, attn_witness):
    """A model's config says what was asked for; the witness says what ran, and that it was causal."""
    with attn_witness(model) as seen:
        model(input_ids)
    seen.assert_ran(cell.attn_backend, causal=True)
    assert len(seen.calls) == model.config.num_hidden_layers
