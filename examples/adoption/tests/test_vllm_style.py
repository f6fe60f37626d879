import importlib.util

import pytest
import torch
from utils import current_platform, large_gpu_mark, multi_gpu_marks, multi_gpu_test, visible, with_clean_environment

HAS_HELION = importlib.util.find_spec("helion") is not None


@multi_gpu_test(num_gpus=2)
def test_tensor_parallel():
    assert visible() == 2


@multi_gpu_test(num_gpus=4)
@with_clean_environment
def test_pipeline_parallel():
    pass


@pytest.mark.parametrize(
    "tp", [1, pytest.param(2, marks=multi_gpu_marks(num_gpus=2)), pytest.param(8, marks=multi_gpu_marks(num_gpus=8))]
)
def test_sharding(tp):
    pass


@large_gpu_mark(min_gb=40)
def test_large_model():
    pass


@pytest.mark.large_gpu(min_gb=60)
def test_huge_model():
    assert visible() == 1


@pytest.mark.gpu_4
def test_expert_parallel():
    pass


@pytest.mark.arch("hopper")
def test_wgmma():
    assert visible() == 1


@pytest.mark.skipif(not current_platform.has_device_capability(89), reason="FP8 is not supported on this GPU type.")
def test_fp8():
    assert visible() == 1


@pytest.mark.skipif(not current_platform.is_cuda(), reason="Only CUDA is supported")
def test_cuda_graph():
    assert visible() == 1


@pytest.mark.skipif(not current_platform.is_rocm(), reason="AITER needs ROCm")
def test_aiter():
    pass


@pytest.mark.skipif(not current_platform.has_device_capability(100), reason="requires Blackwell (SM100)")
def test_cutlass_mla():
    pass


@pytest.mark.skipif(not HAS_HELION, reason="Helion is not installed")
def test_helion():
    pass


def test_deep_gemm():
    pytest.importorskip("deep_gemm_of_nobody")


@pytest.mark.optional
def test_every_model():
    pass


def test_quantized():
    if not HAS_HELION:
        pytest.skip("marlin kernel does not support this combination of group size and act order")


def test_generate(engine):
    pass


def test_gated():
    if not HAS_HELION:
        pytest.skip("HF_TOKEN not set: meta-llama is a gated repo")


@pytest.mark.skip(reason="TODO: hangs in CI since the upgrade")
def test_ray():
    pass


@pytest.mark.parametrize("backend", [])
def test_backends(backend):
    pass


def test_sleep_mode():
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 2**50:
        pytest.skip("Not enough GPU memory left for two engines")
