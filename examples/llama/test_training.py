"""One training step: loss, gradients and the updated weights of every cell."""

from __future__ import annotations

import copy

import torch
from closeness import assert_as_good_as_eager
from transformers import LlamaForCausalLM

from pytest_cudaenv import attn_backends, dtypes


def step(model: LlamaForCausalLM, input_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and gradients of one step of a copy of the model, which is then updated."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "nothing was learnt"
    return loss.detach(), gradients


# FlashAttention-3 is built with and without a backward pass, and does not say which before it is called.
@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_4", model=LlamaForCausalLM)
@dtypes("float32", "bfloat16")
def test_training_step(model, low, reference, input_ids):
    loss, gradients = step(model, input_ids)
    low_loss, low_gradients = step(low, input_ids)
    true_loss, true_gradients = step(reference, input_ids)
    assert gradients.keys() == true_gradients.keys()
    assert_as_good_as_eager(loss, low_loss, true_loss)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient"
        assert_as_good_as_eager(gradient, low_gradients[name], true_gradients[name])


def test_mixed_precision_keywords(mixed_precision, device, tmp_path):
    """The keywords fit the device that this test was given."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=device.type == "cpu", **mixed_precision
    )
    assert (arguments.bf16, arguments.fp16) == (mixed_precision["bf16"], mixed_precision["fp16"])
