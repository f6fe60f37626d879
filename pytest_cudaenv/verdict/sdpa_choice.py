"""Why sdpa did not run a kernel: what torch itself says of a call like it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_cudaenv.verdict.attention_taps import unseen

SWITCHES = {
    "flash": "flash_sdp_enabled",
    "efficient": "mem_efficient_sdp_enabled",
    "cudnn": "cudnn_sdp_enabled",
    "math": "math_sdp_enabled",
}
"""Kernel -> the function of `torch.backends.cuda` that says whether it may be chosen; the CPU heeds them as well."""

_CAN_USE = {
    "flash": "can_use_flash_attention",
    "efficient": "can_use_efficient_attention",
    "cudnn": "can_use_cudnn_attention",
}

_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}

_TITLES = {"flash": "flash", "efficient": "memory efficient", "cudnn": "cudnn"}
"""How torch begins the title of what it says of each."""


def switches() -> frozenset[str]:
    """The kernels that are switched off now."""
    from torch.backends import cuda

    return frozenset(kernel for kernel, name in SWITCHES.items() if hasattr(cuda, name) and not getattr(cuda, name)())


@dataclass(frozen=True)
class SdpaCall:
    """A call of sdpa without its values: enough to ask torch about it again."""

    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], Any, Any, bool] | None, ...]
    """Shape, strides, dtype, device and whether a gradient is needed, of query, key, value and mask."""
    dropout: float
    is_causal: bool
    grouped: bool
    off: frozenset[str]

    @classmethod
    def of(cls, given: dict[str, Any]) -> SdpaCall | None:
        """None for tensors that have no strides, or whose numbers are symbolic."""
        try:
            tensors = tuple(
                None
                if (tensor := given.get(name)) is None
                else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
                for name in ("query", "key", "value", "attn_mask")
            )
        except (RuntimeError, AttributeError):
            return None
        dropout, causal = float(given.get("dropout_p") or 0.0), bool(given.get("is_causal"))
        return cls(tensors, dropout, causal, bool(given.get("enable_gqa")), switches())

    def why_not(self, kernel: str) -> str:
        """Why `kernel` was not the one; empty where torch does not say."""
        if kernel in self.off:
            return f"{kernel} is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda)"
        if self.tensors[0] is None:
            return ""
        return self._asked_of_cuda(kernel) if self.tensors[0][3].type == "cuda" else self._of_cpu(kernel)

    def _of_cpu(self, kernel: str) -> str:
        import torch

        if kernel not in {"flash", "math"}:
            return f"the CPU has flash and math, and no {kernel}"
        query, mask = self.tensors[0], self.tensors[3]
        assert query is not None
        dtypes = {tensor[2] for tensor in self.tensors[:3] if tensor is not None}
        allowed = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        if self.dropout > 0:
            return f"the CPU's flash takes no dropout, have {self.dropout:g}"
        if len(dtypes) > 1 or not dtypes <= allowed:
            told = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            return f"the CPU's flash takes one floating dtype, have {told}"
        if mask is not None and mask[4]:
            return "the CPU's flash takes no mask that needs a gradient"
        if len(query[0]) != 4:
            return f"the CPU's flash takes 4 dimensions, have {len(query[0])}"
        sizes = {tensor[0][-1] for tensor in self.tensors[:3] if tensor is not None}
        if len(sizes) > 1:
            return f"the CPU's flash takes one head size for query, key and value, have {sorted(sizes)}"
        return ""

    def _asked_of_cuda(self, kernel: str) -> str:
        """What torch warns of when such a call may use no other kernel; needs memory for tensors as large."""
        import torch
        from torch.backends import cuda
        from torch.nn.attention import SDPBackend, sdpa_kernel

        can_use = getattr(cuda, _CAN_USE.get(kernel, ""), None)
        if can_use is None:
            return ""
        with warnings.catch_warnings(record=True) as told, unseen(), torch.enable_grad():
            warnings.simplefilter("always")
            try:
                made = [
                    None
                    if tensor is None
                    else torch.empty_strided(tensor[0], tensor[1], dtype=tensor[2], device=tensor[3]).requires_grad_(
                        tensor[4]
                    )
                    for tensor in self.tensors
                ]
                if can_use(cuda.SDPAParams(*made, self.dropout, self.is_causal, self.grouped), False):
                    return "torch could have run it, and chose another first"
            except (RuntimeError, TypeError):
                return ""
            # The question itself can answer to stderr only; a call that fails warns in Python.
            query, key, value, mask = made
            grouped = {"enable_gqa": True} if self.grouped else {}
            with contextlib.suppress(RuntimeError), sdpa_kernel(getattr(SDPBackend, _BACKENDS[kernel])):
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, mask, dropout_p=self.dropout, is_causal=self.is_causal, **grouped
                )
        return reasons([str(warning.message) for warning in told], kernel)


def reasons(lines: Iterable[str], kernel: str) -> str:
    """Of what torch warns of where no kernel may run: what is said of this one. It tells each in turn, with a title."""
    found: dict[str, None] = {}
    is_ours = False
    for line in lines:
        said = line.split(" (Triggered internally", 1)[0].strip()
        title, is_title, _ = said.lower().partition(" kernel not used because")
        if is_title:
            is_ours = title.startswith(_TITLES[kernel])
        elif is_ours and said:
            found[said] = None
    return "; ".join(found)
