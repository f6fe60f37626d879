"""Numbers of the backends on a device, against eager in higher precision, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pytest_cudaenv import attn_backends, dtypes, requires_cuda

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pytest_cudaenv.verdict.parity_numbers import ParityError  # noqa: E402

SEEDS = range(5)

CONFIG = transformers.LlamaConfig(
    vocab_size=99,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,
)


def inputs(device: Any, seed: int, length: int = 130) -> dict[str, Any]:
    """Seven rows, the last one padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (7, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, :31] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def is_for_inference(cell: Any) -> bool:
    """Whether the cell's backend is a build of FlashAttention without a backward."""
    if not str(cell.attn_backend).startswith("flash"):
        return False
    model = cell.build(transformers.LlamaForCausalLM, CONFIG)
    try:
        model(**inputs(cell.device, 0)).logits.sum().backward()
    except RuntimeError as error:
        if "does not support backward" not in str(error):
            raise
        return True
    return False


@requires_cuda
@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
@dtypes("float16", "bfloat16", "float32")
def test_honest_cells_pass(cell: Any, assert_parity: Any) -> None:
    backward = not is_for_inference(cell)
    for seed in SEEDS:
        model = cell.build(transformers.LlamaForCausalLM, CONFIG, seed=seed)
        assert_parity(model, **inputs(cell.device, seed), backward=backward)


@requires_cuda
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@attn_backends("sdpa")
@dtypes("float16", "bfloat16")
def test_each_kernel_of_sdpa_passes(cell: Any, assert_parity: Any, kernel: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = copy.deepcopy(CONFIG)
    config.num_key_value_heads = config.num_attention_heads  # torch 2.11's memory-efficient kernel shares none
    model = cell.build(transformers.LlamaForCausalLM, config)
    # Flash takes no mask: without padding transformers leaves it to `is_causal`.
    ids = inputs(cell.device, 0)["input_ids"]
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        assert_parity(model, ids, backward=True)


@requires_cuda
@attn_backends("sdpa", "flash_attention_3")
@dtypes("bfloat16")
def test_one_scaled_layer_is_caught(cell: Any, assert_parity: Any) -> None:
    model = cell.build(transformers.LlamaForCausalLM, CONFIG)
    model.model.layers[2].self_attn.scaling *= 1.5
    with pytest.raises(ParityError) as caught:
        assert_parity(model, **inputs(cell.device, 0))
    assert caught.value.code == "parity"
