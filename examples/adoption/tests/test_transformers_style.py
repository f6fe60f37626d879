import unittest

from accelerate.test_utils import require_cuda, require_multi_gpu, require_non_cpu, require_single_gpu
from parameterized import parameterized
from transformers.testing_utils import (
    require_cuda_capability_at_least,
    require_flash_attn_3,
    require_large_cpu_ram,
    require_natten,
    require_torch,
    require_torch_accelerator,
    require_torch_bf16,
    require_torch_fp16,
    require_torch_gpu,
    require_torch_large_accelerator,
    require_torch_large_gpu,
    require_torch_multi_gpu,
    require_torch_multi_npu,
    require_torch_n_accelerators,
    require_torch_non_multi_gpu,
    require_torch_up_to_2_accelerators,
    require_torch_xpu,
    slow,
)
from utils import visible


@require_torch
class ModelTest(unittest.TestCase):
    def test_config(self):
        pass

    @require_torch_gpu
    def test_gpu(self):
        assert visible() == 1

    @require_torch_multi_gpu
    def test_data_parallel(self):
        assert visible() == 2

    @require_torch_n_accelerators(3)
    def test_three_way(self):
        pass

    @require_torch_non_multi_gpu
    def test_one_or_none(self):
        assert visible() <= 1

    @require_torch_up_to_2_accelerators
    def test_two_at_most(self):
        assert visible() <= 2

    @require_torch_large_gpu
    def test_large(self):
        pass

    @require_torch_large_accelerator(memory=90)
    def test_larger(self):
        pass

    @require_cuda_capability_at_least(9, 0)
    def test_hopper_or_cpu(self):
        pass

    @require_torch_fp16
    @require_torch_bf16
    def test_half_precision(self):
        pass

    @parameterized.expand([("eager",), ("sdpa",)])
    @require_torch_accelerator
    def test_equivalence(self, implementation):
        assert visible() == 1

    @require_flash_attn_3
    @require_torch_gpu
    def test_flash_attention_3(self):
        pass

    @require_natten
    def test_neighbourhood(self):
        pass

    @require_torch_xpu
    def test_xpu(self):
        pass

    @require_torch_multi_npu
    def test_npu(self):
        pass

    @require_large_cpu_ram(memory=10**6)
    def test_host_memory(self):
        pass

    @slow
    @require_torch_accelerator
    def test_integration(self):
        pass

    @unittest.skip(reason="Dog uses no inputs_embeds")
    def test_inputs_embeds(self):
        pass

    def test_head_masking(self):
        if not hasattr(self, "test_head_mask"):
            self.skipTest(reason="This model does not support head masking")


@require_cuda
class TrainerTest(unittest.TestCase):
    @require_multi_gpu
    def test_ddp(self):
        assert visible() == 2

    def test_step(self):
        assert visible() == 1


class InheritedTrainerTest(TrainerTest):
    @require_single_gpu
    def test_step(self):
        assert visible() == 1


@require_non_cpu
def test_memory_is_released():
    assert visible() == 1
