"""Operators' names, masks: what they say of the attention that they belong to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cudaenv.requirements.attention import AttnBackend, with_backends
from pytest_cudaenv.verdict.attention_facts import mask_facts
from pytest_cudaenv.verdict.attention_ops import Operator, canonical, entry_points, of_module, operator_of


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("aten::_scaled_dot_product_flash_attention", Operator("sdpa", "flash")),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", Operator("sdpa", "flash", True)),
        ("aten::_scaled_dot_product_efficient_attention", Operator("sdpa", "efficient")),
        ("aten::_scaled_dot_product_cudnn_attention_backward", Operator("sdpa", "cudnn", True)),
        ("aten::_scaled_dot_product_fused_attention_overrideable", Operator("sdpa", "overrideable")),
        ("aten::_flash_attention_backward", Operator("sdpa", "flash", True)),
        ("flex_attention", Operator("flex_attention")),
        ("flex_attention_backward", Operator("flex_attention", None, True)),
        ("flash_attn::_flash_attn_forward", Operator("flash_attention_2")),
        ("flash_attn::_flash_attn_varlen_backward", Operator("flash_attention_2", None, True)),
        ("flash_attn_3::fwd", Operator("flash_attention_3")),
        ("flash_attn_3::_flash_attn_forward", Operator("flash_attention_3")),
        ("_flash_attn2_1a2b3c4::varlen_fwd", Operator("flash_attention_2")),
        ("_flash_attn_3a2b3c4::fwd", Operator("flash_attention_2")),
        ("_vllm_flash_attn3_0c1d::fwd", Operator("flash_attention_3")),
        ("_flash_attn4_20260101::_flash_attn_fwd", Operator("flash_attention_4")),
        ("aten::_native_multi_head_attention", Operator("native_mha")),
        ("flash_attn_3::get_scheduler_metadata", None),
        ("aten::softmax", None),
        ("aten::_softmax_backward_data", None),
        ("my_flash::fwd", None),
    ],
)
def test_operators(name: str, operator: Operator | None) -> None:
    assert operator_of(name) == operator


def test_torch_has_the_operators_of_the_table() -> None:
    """Names that this torch does not know would never be seen."""
    from pytest_cudaenv.verdict.attention_ops import _SDPA_KERNELS

    known = [name for name in _SDPA_KERNELS if hasattr(torch.ops.aten, name.removeprefix("aten::"))]
    of_cuda = {"aten::_flash_attention", "aten::_efficient_attention", "aten::_cudnn_attention"}  # with `_backward`
    assert set(_SDPA_KERNELS) - set(known) <= of_cuda
    assert all(hasattr(torch.ops.aten, f"{name.removeprefix('aten::')}_backward") for name in of_cuda)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("fa3", "flash_attention_3"),
        ("kernels-community/vllm-flash-attn3", "flash_attention_3"),
        ("kernels-community/flash-attn2@main", "flash_attention_2"),
        ("kernels-community/flash-attn2:flash_attn_func", "flash_attention_2"),
        ("org/other@v1", "org/other"),
        ("paged|eager", "eager"),
        ("mine", "mine"),
    ],
)
def test_one_name_for_each_backend(name: str, backend: str) -> None:
    assert canonical(name) == backend


@pytest.mark.parametrize(
    ("module", "backend"),
    [
        ("flash_attn.flash_attn_interface", "flash_attention_2"),
        ("flash_attn", "flash_attention_2"),
        ("flash_attn.cute.interface", "flash_attention_4"),
        ("flash_attn_interface", "flash_attention_3"),
        ("flash_attn_3.flash_attn_interface", "flash_attention_3"),
        ("torch.nn.functional", None),
        ("flash_attnetion", None),
    ],
)
def test_packages_by_their_modules(module: str, backend: str | None) -> None:
    assert of_module(module) == backend


def test_a_projects_own_backend_says_how_it_is_known() -> None:
    with_backends({"ring": AttnBackend("ring", entry_points=("rings:attend",), operators=("ring::*",))})
    try:
        assert ("rings", "attend", "ring") in entry_points()
        assert operator_of("ring::attend_bwd", [("ring::*", "ring")]) == Operator("ring", None, True)
        assert of_module("rings.kernels") == "ring"
    finally:
        with_backends({})


@given(
    queries=st.integers(2, 9),
    past=st.integers(0, 5),
    window=st.one_of(st.none(), st.integers(1, 8)),
    is_causal=st.booleans(),
    is_boolean=st.booleans(),
    padding=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_a_masks_window_and_causality(
    queries: int, past: int, window: int | None, is_causal: bool, is_boolean: bool, padding: int
) -> None:
    """As the mask was made: with rows of padding on the left that see everything, as transformers makes them."""
    keys = queries + past
    distance = torch.arange(past, keys)[:, None] - torch.arange(keys)[None, :]
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= (distance if is_causal else distance.abs()) < window
    batch = allowed.expand(2, 1, queries, keys).clone()
    padding = min(padding, queries - 1)
    if is_causal and past == 0:
        batch[0, :, :, :padding] = False
        batch[0, :, :padding] = True
    mask = batch if is_boolean else torch.zeros(batch.shape).masked_fill(~batch, torch.finfo(torch.float32).min)
    facts = mask_facts(mask)
    assert facts["causal"] is (is_causal or window == 1)
    assert facts["window"] == (window if window is not None and window < keys else None)
