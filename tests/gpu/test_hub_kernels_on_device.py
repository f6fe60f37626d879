"""The Triton path of the example's kernels, on a device: it runs, by kernel name, and its numbers are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv import requires_cuda, requires_package

TINY = Path(__file__).parents[2] / "examples" / "hub_kernels" / "kernels" / "tiny-layers"
LAYERS = {"RMSNorm": f"{TINY}:RMSNorm", "SiLU": f"{TINY}:SiLU", "rotary_pos_emb": f"{TINY}:Rotary"}
FORWARD = {"_rms_norm_forward", "_silu_forward", "_rotate"}
BACKWARD = {"_rms_norm_backward", "_silu_backward"}

pytestmark = [requires_cuda, requires_package("transformers", "triton")]


def tiny_llama(device: Any, dtype: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96,  # no power of two: the kernels' masks matter
        num_hidden_layers=2,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attn_implementation="eager",
    )
    made = LlamaForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(device=device, dtype=dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_numbers_and_gradients(hub_kernels: Any, device: Any, name: str) -> None:
    import torch

    model = tiny_llama(device, getattr(torch, name)).train()
    ids = torch.arange(24, device=device).view(2, 12)
    hub_kernels.compare(model, lambda m: m(ids, labels=ids), backward=True, mapping=LAYERS)


def test_triton_kernels_ran(hub_kernels: Any, device: Any) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = tiny_llama(device, torch.bfloat16).train()
    ids = torch.arange(24, device=device).view(2, 12)
    with hub_kernels.on(model, LAYERS) as report, profile(activities=[ProfilerActivity.CUDA]) as seen:
        model(ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
    report.assert_replaced(*LAYERS)
    ran = {event.name for event in seen.events()}
    assert ran >= FORWARD | BACKWARD


@pytest.mark.parametrize("layer", ["RMSNorm", "SiLU"])
def test_claims(hub_kernels: Any, device: Any, layer: str) -> None:
    import torch

    model = tiny_llama(device, torch.float32)
    like = {"RMSNorm": model.model.norm, "SiLU": model.model.layers[0].mlp.act_fn}[layer]
    hub_kernels.check_layer(LAYERS[layer], like, torch.randn(7, 96, device=device), backward=True)
