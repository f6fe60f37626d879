"""Logits of one forward pass: every cell against eager one precision higher, with and without padding."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_as_good_as_eager
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes

pytestmark = [
    attn_backends(
        "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
        model=LlamaForCausalLM,
    ),
    dtypes("float32", "float16", "bfloat16"),
]  # fmt: skip


@torch.no_grad()
def test_logits(model, low, reference, input_ids):
    assert_as_good_as_eager(model(input_ids).logits, low(input_ids).logits, reference(input_ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(model, low, reference, input_ids, side):
    """A padded row is what it is by itself, and so is the full row beside it.

    Eager gets the rows unpadded: in float64 its additive mask overflows where a whole row is masked, and NaN spreads.
    """
    padding = 7
    mask = torch.ones_like(input_ids)
    kept = slice(padding, None) if side == "left" else slice(0, -padding)
    mask[0] = 0
    mask[0, kept] = 1
    logits = model(input_ids * mask, attention_mask=mask).logits
    for candidate, row in ((logits[0, kept], input_ids[:1, kept]), (logits[1], input_ids[1:])):
        assert_as_good_as_eager(candidate, low(row).logits[0], reference(row).logits[0])
