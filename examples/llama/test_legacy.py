"""A suite's old tests: unittest classes and conditions at module level go on working, and see the right device."""

from __future__ import annotations

import unittest

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pytest_cudaenv
from pytest_cudaenv import requires_bf16, requires_cuda, requires_flash_attn3

# Answered from the host's facts while collecting: no CUDA context comes of it.
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class LlamaModelTest(unittest.TestCase):
    def setUp(self) -> None:
        self.config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )  # fmt: skip

    def test_config_round_trip(self) -> None:
        self.assertEqual(LlamaConfig.from_dict(self.config.to_dict()).hidden_size, 64)

    @requires_bf16
    def test_bf16_forward_on_the_granted_device(self) -> None:
        device = pytest_cudaenv.current().device
        model = LlamaForCausalLM(self.config).to(device, torch.bfloat16)
        logits = model(torch.ones(1, 8, dtype=torch.long, device=device)).logits
        self.assertEqual((logits.device, logits.dtype), (device, torch.bfloat16))

    @pytest.mark.usefixtures("device")
    def test_cells_as_subtests(self) -> None:
        """A TestCase takes no fixtures: it goes through its cells; one that cannot run here is a skipped subtest."""
        running = pytest_cudaenv.current()
        for cell in running.cells("eager", "sdpa", "flash_attention_2", dtypes=("float32", "bfloat16")):
            with self.subTest(cell=cell.id):
                model = cell.build(LlamaForCausalLM, self.config)
                tokens = model.generate(
                    torch.ones(1, 4, dtype=torch.long, device=cell.device), max_new_tokens=2, do_sample=False
                )
                self.assertEqual(tokens.shape, (1, 6))

    @requires_flash_attn3
    def test_flash_attention_3(self) -> None:
        model = LlamaForCausalLM._from_config(
            self.config, attn_implementation="flash_attention_3", dtype=torch.bfloat16
        )
        model.to(pytest_cudaenv.current().device)
        self.assertEqual(model.config._attn_implementation, "flash_attention_3")


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@requires_cuda
def test_hopper_is_hopper(cuda_device):
    assert cuda_device.capability == (9, 0)
    assert torch.zeros(1, device=cuda_device).device == torch.device("cuda", cuda_device.index)


@requires_cuda(devices=2)
def test_two_devices_are_two(cuda_devices):
    first, second = (torch.full((4,), float(i), device=d) for i, d in enumerate(cuda_devices))
    assert first.device != second.device
    assert torch.equal(first + 1, second.to(first.device))
