"""The right GPU, the named attention backend and no silent skip for every model test.

The public names. They are imported when first asked for: pytest loads this package at every start, also for
suites that never use it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pytest_cudaenv._version import __version__

if TYPE_CHECKING:
    from pytest_cudaenv.cells import Cell as Cell
    from pytest_cudaenv.compat import NamedMark
    from pytest_cudaenv.grants.current import Current as Current
    from pytest_cudaenv.grants.current import current as current
    from pytest_cudaenv.grants.own_process import OwnProcess as OwnProcess
    from pytest_cudaenv.grants.own_process import device_process as device_process
    from pytest_cudaenv.host.devices import CudaDevice as CudaDevice
    from pytest_cudaenv.requirements.attention import AttnBackend as AttnBackend
    from pytest_cudaenv.verdict.hub_engine import HubKernels as HubKernels
    from pytest_cudaenv.verdict.kernel_report import KernelReport as KernelReport

    attn_backends: NamedMark
    attn_sdpa_kernel: NamedMark
    attn_witness: NamedMark
    cuda_isolated: NamedMark
    cuda_memory: NamedMark
    dtypes: NamedMark
    hub_kernels: NamedMark
    requires_attn_backend: NamedMark
    requires_bf16: NamedMark
    requires_cuda: NamedMark
    requires_dtype: NamedMark
    requires_flash_attn2: NamedMark
    requires_flash_attn3: NamedMark
    requires_flash_attn4: NamedMark
    requires_flex_attention: NamedMark
    requires_fp4: NamedMark
    requires_fp8: NamedMark
    requires_hub_kernels: NamedMark
    requires_nccl: NamedMark
    requires_package: NamedMark
    requires_quantization: NamedMark
    requires_tf32: NamedMark
    xfail_cells: NamedMark

__all__ = [
    "AttnBackend",
    "Cell",
    "CudaDevice",
    "Current",
    "HubKernels",
    "KernelReport",
    "OwnProcess",
    "__version__",
    "attn_backends",
    "attn_sdpa_kernel",
    "attn_witness",
    "cuda_isolated",
    "cuda_memory",
    "current",
    "device_process",
    "dtypes",
    "hub_kernels",
    "requires_attn_backend",
    "requires_bf16",
    "requires_cuda",
    "requires_dtype",
    "requires_flash_attn2",
    "requires_flash_attn3",
    "requires_flash_attn4",
    "requires_flex_attention",
    "requires_fp4",
    "requires_fp8",
    "requires_hub_kernels",
    "requires_nccl",
    "requires_package",
    "requires_quantization",
    "requires_tf32",
    "xfail_cells",
]

_ELSEWHERE = {
    "AttnBackend": "pytest_cudaenv.requirements.attention",
    "Cell": "pytest_cudaenv.cells",
    "CudaDevice": "pytest_cudaenv.host.devices",
    "Current": "pytest_cudaenv.grants.current",
    "HubKernels": "pytest_cudaenv.verdict.hub_engine",
    "KernelReport": "pytest_cudaenv.verdict.kernel_report",
    "OwnProcess": "pytest_cudaenv.grants.own_process",
    "current": "pytest_cudaenv.grants.current",
    "device_process": "pytest_cudaenv.grants.own_process",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # A suite that asks for a name uses the plugin: from here on torch's questions are answered while collecting.
    plugin = sys.modules.get("pytest_cudaenv.plugin")
    if plugin is not None:
        plugin.suite_uses_plugin()
    if name in _ELSEWHERE:
        value = getattr(import_module(_ELSEWHERE[name]), name)
    else:
        value = import_module("pytest_cudaenv.decorators").DECORATORS[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
