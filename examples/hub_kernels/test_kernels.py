"""Kernels from a folder in a real model: replaced, executed, equal, and gone after each test."""

from pathlib import Path

import pytest
import torch

from pytest_cudaenv import hub_kernels as uses_kernels

REPOSITORY = Path(__file__).parent / "kernels" / "tiny-layers"
LAYERS = {
    "RMSNorm": f"{REPOSITORY}:RMSNorm",
    "SiLU": f"{REPOSITORY}:SiLU",
    "rotary_pos_emb": f"{REPOSITORY}:Rotary",
}


def test_everything_is_replaced_and_runs(hub_kernels, model, ids):
    with hub_kernels.on(model, LAYERS) as report, torch.no_grad():
        model(ids)
    report.assert_replaced("RMSNorm", "SiLU", "rotary_pos_emb")
    report.assert_no_fallback()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_numbers_and_gradients(hub_kernels, model, ids, dtype):
    hub_kernels.compare(model.to(dtype).train(), lambda m: m(ids, labels=ids), backward=True, mapping=LAYERS)


@uses_kernels(LAYERS, use="both")
def test_generate(hub_kernels, model, ids):
    with hub_kernels.on(model):
        made = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 16)


@uses_kernels({"RMSNorm": LAYERS["RMSNorm"]})
def test_training_and_inference_are_chosen_for(hub_kernels, model, ids):
    with hub_kernels.on(model) as report:
        model(ids)
        model.train()
        model(ids, labels=ids).loss.backward()
    assert report.modes == ["INFERENCE", "TRAINING"]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("layer", ["RMSNorm", "SiLU"])
def test_claims(hub_kernels, model, layer):
    like = {"RMSNorm": model.model.norm, "SiLU": model.model.layers[0].mlp.act_fn}[layer]
    x = torch.randn(5, 64, device=model.device)
    claims = hub_kernels.check_layer(LAYERS[layer], like, x, backward=True)
    assert claims["has_backward"]


def test_nothing_is_left(model):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    assert "forward" not in apply_rotary_pos_emb.__dict__
