"""Greedy generation: the cache changes the speed, not the tokens."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes

pytestmark = [
    attn_backends(
        "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", model=LlamaForCausalLM
    ),
    dtypes("float32", "bfloat16"),
]

NEW_TOKENS = 8


def test_greedy_generation(model, input_ids, assert_parity):
    """The logits of each step are right, up to the first token where two are so near that the choice is free."""
    assert_parity(model, input_ids, attention_mask=torch.ones_like(input_ids), generate=NEW_TOKENS)


@torch.no_grad()
def test_greedy_generation_takes_the_best_token(model, input_ids):
    runs = {
        cached: model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=cached,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for cached in (True, False)
    }
    for run in runs.values():
        assert run.sequences.shape == (input_ids.shape[0], input_ids.shape[1] + NEW_TOKENS)
        chosen = run.sequences[:, input_ids.shape[1] :]
        logits = torch.stack(run.logits, dim=1)
        assert torch.equal(chosen, logits.argmax(-1)), "greedy generation took another than the best token"


@attn_backends("eager", "sdpa", model=LlamaForCausalLM)
@dtypes("float32")
@torch.no_grad()
def test_greedy_tokens(model, input_ids, expectations):
    """In float32 the best token leads by 0.002, a thousand times what devices differ by: one value for all of them.

    In bfloat16 there are ties, and each device decides them in its own way: such values would go under `(9, 0)`.
    """
    mask = torch.ones_like(input_ids)
    tokens = model.generate(input_ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = [[108, 12, 51, 108, 40, 40, 40, 40], [106, 48, 48, 48, 48, 48, 48, 111]]
    expectations.check(tokens[:, input_ids.shape[1] :], {None: expected})
