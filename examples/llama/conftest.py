"""A tiny Llama in the test's cell, and a batch."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_cudaenv import Cell


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    """Two layers, four query and two key heads of size 64: what FlashAttention and flex_attention both take."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attention_dropout=0.0,
    )


@pytest.fixture(scope="module")
def model(cell: Cell, config: LlamaConfig) -> LlamaForCausalLM:
    """The model in this test's cell."""
    return cell.build(LlamaForCausalLM, config)


@pytest.fixture
def input_ids(cell: Cell, config: LlamaConfig) -> torch.Tensor:
    """Token ids, shape (2, 24), the same in every cell."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, config.vocab_size, (2, 24), generator=generator).to(cell.device)
