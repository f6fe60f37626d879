"""`from pytest_cudaenv.migrate.transformers import require_torch_gpu`, for `from transformers.testing_utils import …`.

The decorators that ask for CUDA devices, attention backends, dtypes and packages are made of this plugin's markers, so
that they are decided after collection and give the test its device. Every other name (`slow`, `torch_device`, other
hardware) is transformers' own, imported when it is asked for; this module does not import transformers.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

from pytest_cudaenv.decorators import DECORATORS
from pytest_cudaenv.grants.current import current
from pytest_cudaenv.ledger.adopt import TRANSFORMERS
from pytest_cudaenv.migrate.decorators import (
    Marks,
    always,
    capability,
    counted,
    cuda,
    large,
    lookup,
    marker,
    package,
    versioned,
)

LIBRARY = "transformers.testing_utils"

_SPECIAL: dict[str, Marks] = {
    "require_torch_gpu": cuda(),
    "require_torch_accelerator": cuda(),
    "require_torch_multi_gpu": cuda(2),
    "require_torch_multi_accelerator": cuda(2),
    "require_torch_n_accelerators": counted,
    # A grant is exactly one device, on any host.
    "require_torch_non_multi_gpu": cuda(),
    "require_torch_non_multi_accelerator": cuda(),
    "require_torch_up_to_2_gpus": cuda(),
    "require_torch_up_to_2_accelerators": cuda(),
    "require_torch_large_gpu": large,
    "require_torch_large_accelerator": large,
    "require_torch_accelerator_memory": large,
    "require_cuda_capability_at_least": capability,
    "require_torch_fp16": marker("requires_dtype", "float16"),
    "require_torch_bf16": marker("requires_bf16"),
    "require_torch_tf32": marker("requires_tf32"),
    "require_fp8": marker("requires_fp8"),
    "require_flash_attn": marker("requires_flash_attn2"),
    "require_flash_attn_3": marker("requires_flash_attn3"),
    "require_flash_attn_4": marker("requires_flash_attn4"),
    "require_all_flash_attn": always(
        *(DECORATORS[name] for name in ("requires_flash_attn2", "requires_flash_attn3", "requires_flash_attn4"))
    ),
    "require_flex_attention": marker("requires_flex_attention"),
    "require_kernels": marker("requires_hub_kernels"),
    "require_bitsandbytes": marker("requires_quantization", "bitsandbytes"),
    "require_gptqmodel": marker("requires_quantization", "gptq"),
    "require_torchao": marker("requires_quantization", "torchao"),
    "require_hqq": marker("requires_quantization", "hqq"),
    "require_aqlm": marker("requires_quantization", "aqlm"),
    "require_vptq": marker("requires_quantization", "vptq"),
    "require_spqr": marker("requires_quantization", "spqr"),
    "require_auto_round": marker("requires_quantization", "auto-round"),
    "require_optimum_quanto": marker("requires_quantization", "quanto"),
    "require_compressed_tensors": marker("requires_quantization", "compressed-tensors"),
    "require_fbgemm_gpu": marker("requires_quantization", "fbgemm_fp8"),
    "require_fp_quant": marker("requires_quantization", "fp_quant"),
    "require_fouroversix": marker("requires_quantization", "fouroversix"),
    "require_quark": marker("requires_quantization", "quark"),
    "require_accelerate": versioned("accelerate", "min_version"),
    "require_gguf": versioned("gguf", "min_version"),
    "require_fsdp": versioned("torch", "min_version"),
    "require_mistral_common": versioned("mistral-common", "min_version"),
    "require_triton": versioned("triton", "min_version"),
    "require_torch_greater_or_equal": versioned("torch"),
    "require_peft_greater_or_equal": versioned("peft"),
    "require_huggingface_hub_greater_or_equal": versioned("huggingface-hub"),
    "require_torchao_version_greater_or_equal": versioned("torchao", "torchao_version"),
}

MARKS: dict[str, Marks] = _SPECIAL | {
    name: package(*known.needs.packages)
    for name, rule in TRANSFORMERS.items()
    if name not in _SPECIAL and (known := rule()).needs.packages
}
"""The decorators that this module makes; the rest is transformers' own."""


class Expectations(UserDict[Any, Any]):
    """transformers' `Expectations`, matched as the fixture `expectations` does: never by a far-away device."""

    def get_expectation(self) -> Any:
        """The value for the running test's device. Raises AssertionError where none is meant, or two are.

        NoGrantError where the test declares nothing, so that its device is not known.
        """
        return current().expectations.pick(self.data)


def __getattr__(name: str) -> Any:
    return lookup(name, MARKS, __name__, LIBRARY)


def __dir__() -> list[str]:
    return sorted([*MARKS, "Expectations"])
