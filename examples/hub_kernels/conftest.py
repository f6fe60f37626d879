"""A tiny Llama: 5 RMSNorm, 2 SiLU, and one rotary function that every Llama of the process shares."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def model(device):
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attn_implementation="eager",
    )
    made = LlamaForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:  # weights of one would let a norm pass that forgets them
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(device)


@pytest.fixture
def ids(device):
    return torch.arange(24, device=device).view(2, 12)
