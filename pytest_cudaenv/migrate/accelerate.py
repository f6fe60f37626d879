"""`from pytest_cudaenv.migrate.accelerate import require_cuda`, for `from accelerate.test_utils.testing import …`.

As `pytest_cudaenv.migrate.transformers`: what asks for CUDA devices and packages is made of this plugin's markers,
every other name is accelerate's own, imported when it is asked for.
"""

from __future__ import annotations

from typing import Any

from pytest_cudaenv.ledger.adopt import ACCELERATE
from pytest_cudaenv.migrate.decorators import Marks, cuda, lookup, marker, package, versioned

LIBRARY = "accelerate.test_utils.testing"

_SPECIAL: dict[str, Marks] = {
    "require_cuda": cuda(),
    "require_non_cpu": cuda(),
    "require_cuda_or_hpu": cuda(),
    "require_cuda_or_xpu": cuda(),
    # A grant is exactly one device, on any host.
    "require_single_gpu": cuda(),
    "require_single_device": cuda(),
    "require_multi_gpu": cuda(2),
    "require_multi_device": cuda(2),
    "require_multi_gpu_or_xpu": cuda(2),
    "require_fp16": marker("requires_dtype", "float16"),
    "require_fp8": marker("requires_fp8"),
    "require_bnb": marker("requires_quantization", "bitsandbytes"),
    "require_torchao": marker("requires_quantization", "torchao"),
    "require_torch_min_version": versioned("torch"),
}

MARKS: dict[str, Marks] = _SPECIAL | {
    name: package(*known.needs.packages)
    for name, rule in ACCELERATE.items()
    if name not in _SPECIAL and (known := rule()).needs.packages
}
"""The decorators that this module makes; the rest is accelerate's own."""


def __getattr__(name: str) -> Any:
    return lookup(name, MARKS, __name__, LIBRARY)


def __dir__() -> list[str]:
    return sorted(MARKS)
