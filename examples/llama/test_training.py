"""One training step: loss, gradients and the updated weights of every cell."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes


# FlashAttention-3 is built with and without a backward pass, and does not say which before it is called.
@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_4", model=LlamaForCausalLM)
@dtypes("float32", "bfloat16")
def test_training_step(model, input_ids, assert_parity):
    assert_parity(model, input_ids, labels=input_ids, backward=True)
    learner = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    learner(input_ids, labels=input_ids).loss.backward()
    optimizer.step()
    after = zip(learner.parameters(), model.parameters(), strict=True)
    assert any(not torch.equal(p, old) for p, old in after), "nothing was learnt"


def test_mixed_precision_keywords(mixed_precision, device, tmp_path):
    """The keywords fit the device that this test was given."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=device.type == "cpu", **mixed_precision
    )
    assert (arguments.bf16, arguments.fp16) == (mixed_precision["bf16"], mixed_precision["fp16"])
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    weight = torch.ones(8, 8, device=device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        product = weight @ weight
    assert (product.dtype, product[0, 0].item()) == (dtype, 8)
