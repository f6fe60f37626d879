"""Saved and loaded again, in this cell's backend and dtype, placed by `device_map`."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends


@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_3", model=LlamaForCausalLM)
@torch.no_grad()
def test_reloaded_model_is_the_same(cell, model, input_ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation=cell.attn_backend, dtype=cell.dtype, device_map={"": cell.device}
    )
    assert again.dtype is cell.dtype
    assert again.device == cell.device or again.device.type == cell.device.type == "cpu"
    assert again.config._attn_implementation == model.config._attn_implementation
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    torch.testing.assert_close(again(input_ids).logits, model(input_ids).logits)
