"""The Triton path of the example's kernels, on a device: it runs, by kernel name, and its numbers are right."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_cudaenv import requires_cuda, requires_package
from tests.hub_kernels.tiny import FULL, tiny_llama

FORWARD = {"_rms_norm_forward", "_silu_forward", "_rotate"}
BACKWARD = {"_rms_norm_backward", "_silu_backward"}

pytestmark = [requires_cuda, requires_package("transformers", "triton")]


def on_device(device: Any, dtype: Any) -> Any:
    """No size is a power of two: the kernels' masks matter."""
    return tiny_llama(hidden_size=96, intermediate_size=160).to(device=device, dtype=dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_numbers_and_gradients(hub_kernels: Any, device: Any, name: str) -> None:
    import torch

    model = on_device(device, getattr(torch, name)).train()
    ids = torch.arange(24, device=device).view(2, 12)
    hub_kernels.compare(model, lambda m: m(ids, labels=ids), backward=True, mapping=FULL)


def test_triton_kernels_ran(hub_kernels: Any, device: Any) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = on_device(device, torch.bfloat16).train()
    ids = torch.arange(24, device=device).view(2, 12)
    with hub_kernels.on(model, FULL) as report, profile(activities=[ProfilerActivity.CUDA]) as seen:
        model(ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
    report.assert_replaced(*FULL)
    ran = {event.name for event in seen.events()}
    assert ran >= FORWARD | BACKWARD


@pytest.mark.parametrize("layer", ["RMSNorm", "SiLU"])
def test_claims(hub_kernels: Any, device: Any, layer: str) -> None:
    import torch

    model = on_device(device, torch.float32)
    like = {"RMSNorm": model.model.norm, "SiLU": model.model.layers[0].mlp.act_fn}[layer]
    hub_kernels.check_layer(FULL[layer], like, torch.randn(7, 96, device=device), backward=True)
