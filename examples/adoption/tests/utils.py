"""Helpers as a serving engine's suite has them: a platform, and marks made of it."""

import functools
import os

import pytest
import torch


class Platform:
    """What the engine runs on."""

    def is_cuda(self):
        return torch.cuda.is_available()

    def is_rocm(self):
        return torch.version.hip is not None

    def device_count(self):
        return torch.cuda.device_count()

    def has_device_capability(self, wanted):
        if not torch.cuda.is_available():
            return False
        major, minor = torch.cuda.get_device_capability()
        return major * 10 + minor >= wanted

    def memory_gb(self):
        return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0


current_platform = Platform()


def multi_gpu_marks(*, num_gpus):
    few = pytest.mark.skipif(
        current_platform.device_count() < num_gpus, reason=f"Need at least {num_gpus} GPUs to run the test."
    )
    return [pytest.mark.distributed(num_gpus=num_gpus), few]


def multi_gpu_test(*, num_gpus):
    def decorate(function):
        for mark in reversed(multi_gpu_marks(num_gpus=num_gpus)):
            function = mark(function)
        return function

    return decorate


def large_gpu_mark(min_gb):
    return pytest.mark.skipif(
        current_platform.memory_gb() < min_gb, reason=f"Need at least {min_gb}GB GPU memory to run the test."
    )


def with_clean_environment(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        before = dict(os.environ)
        try:
            return function(*args, **kwargs)
        finally:
            os.environ.clear()
            os.environ.update(before)

    return run


def visible():
    """How many devices this process may see."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([part for part in mask.split(",") if part and part != "-1"])
