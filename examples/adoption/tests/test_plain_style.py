import os
import sys
import unittest

import pytest
import torch
from utils import visible

FOUND = os.path.exists("/nowhere/resources")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")
requires_two = unittest.skipIf(torch.cuda.device_count() < 2, "test requires multiple GPUs")


class RunIf:
    """As a trainer's suite has it: one mark for all needs."""

    def __new__(cls, min_cuda_gpus=0, bf16_cuda=False):
        needs = []
        if torch.cuda.device_count() < min_cuda_gpus:
            needs.append(f"GPUs>={min_cuda_gpus}")
        if bf16_cuda and CAPABILITY < (8, 0):
            needs.append("CUDA device bf16")
        return pytest.mark.skipif(bool(needs), reason=f"Requires: [{' + '.join(needs)}]")


@requires_gpu
def test_kernel():
    assert visible() == 1


@requires_gpu
class TestKernels:
    def test_forward(self):
        assert visible() == 1

    @pytest.mark.skipif(CAPABILITY < (9, 0), reason="Hopper only")
    def test_tma(self):
        assert visible() == 1


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_all_reduce():
    assert visible() == 2


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 * 1024**3,
    reason="not enough memory",
)
def test_big_batch():
    assert visible() == 1


@RunIf(min_cuda_gpus=2, bf16_cuda=True)
def test_fsdp():
    pass


@RunIf(bf16_cuda=True)
def test_mixed_precision():
    pass


class Legacy(unittest.TestCase):
    @requires_two
    def test_broadcast(self):
        assert visible() == 2

    @unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
    def test_pinned(self):
        assert visible() == 1

    def setUp(self):
        if self._testMethodName == "test_collectives":
            self.skipTest("Skipping test because not enough GPUs are available: 16 required")

    def test_collectives(self):
        pass


def test_triton_kernel():
    if not FOUND:
        pytest.skip("triton_of_nobody is not installed")


def test_broken_package():
    if not FOUND:
        pytest.skip("could not import 'fused_ops': /usr/lib/fused_ops.so: undefined symbol: _ZN2at")


@pytest.mark.skipif(sys.platform != "win32", reason="Windows only")
def test_paths():
    pass


@pytest.mark.skipif(sys.version_info < (3, 99), reason="requires Python 3.99")
def test_syntax():
    pass


@pytest.mark.skipif(not os.environ.get("RUN_BENCHMARKS_OF_THE_SUITE"), reason="set RUN_BENCHMARKS_OF_THE_SUITE=1")
def test_speed():
    pass


def test_flaky():
    if not FOUND:
        pytest.skip("Flaky on A100, see issue 1234")


def test_out_of_memory():
    if not FOUND:
        pytest.skip("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_launched():
    if not FOUND:
        pytest.skip("Must be run under torchrun")


def test_metal():
    if not FOUND:
        pytest.skip("MPS backend not available")


def test_old_torch():
    if not FOUND:
        pytest.skip("requires torch>=99.0")


def test_nobody_knows():
    if not FOUND:
        pytest.skip("skip for now")
