"""dtypes: their names, the short ids that test ids use, and the devices on which they are native.

Rules: https://nvidia.github.io/TransformerEngine/support_matrix.html and torch's own tests,
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/testing/_internal/common_cuda.py
"""

from __future__ import annotations

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.names import DTYPES
from pytest_cudaenv.requirements.capability import Capabilities, at_least, describe, exactly
from pytest_cudaenv.requirements.names import plain, spelled, unknown_name
from pytest_cudaenv.requirements.reason import Reason, brief, unknown

FORMATS = frozenset({"tf32", "fp8_block", "mxfp8"})
"""What can be required but is no dtype of a tensor: a way to multiply float32, and two ways to scale fp8."""

ALIASES: dict[str, str] = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "nvfp4": "float4_e2m1fn_x2",
    "float4": "float4_e2m1fn_x2",
}

_SPELLINGS = spelled([*((n, n) for n in DTYPES), *((short, n) for n, short in DTYPES.items()), *ALIASES.items()])

NATIVE: dict[str, Capabilities] = {
    # float64, float32 and float16 are computed on everything that torch still has code for. bfloat16 below 8.0 is
    # emulated, which torch.cuda.is_bf16_supported() counts as support.
    "bfloat16": at_least(8, 0),
    "tf32": at_least(8, 0),
    "float8_e4m3fn": at_least(8, 9),
    "float8_e5m2": at_least(8, 9),
    "fp8_block": at_least(9, 0),
    # Here a newer family does not follow from an older one. 12.0 multiplies fp4 (TensorRT-RTX lists it, Transformer
    # Engine calls it partial) and not mxfp8. For 11.0 and 12.1 no source says anything: they do not count until one
    # does, because these names promise what is known to be native. Whoever knows better writes a capability.
    "float4_e2m1fn_x2": exactly("10.0, 10.3 or 12.0", (10, 0), (10, 3), (12, 0)),
    "mxfp8": exactly("10.0 or 10.3", (10, 0), (10, 3)),
}


class UnknownDtypeError(ValueError):
    """A dtype that nobody knows; the text names the choices."""


def dtype_name(text: object) -> str:
    """The canonical name of `"bf16"`, `"bfloat16"`, `"torch.bfloat16"` or `torch.bfloat16` itself.

    Raises UnknownDtypeError, with the choices, for anything else.
    """
    name = plain(str(text).strip().removeprefix("torch."))
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    raise UnknownDtypeError(unknown_name("dtype", text, _SPELLINGS, ", ".join(DTYPES.values())))


def dtype_id(name: str) -> str:
    """The id of a dtype, `bf16`: the one that test ids and messages use."""
    return DTYPES[dtype_name(name)]


def cell_dtype(text: object) -> str:
    """The canonical name of a dtype that tensors can have.

    Raises UnknownDtypeError for a format that is none (tf32 is a way to multiply float32).
    """
    name = dtype_name(text)
    if name in FORMATS:
        choices = ", ".join(n for n in DTYPES if n not in FORMATS)
        raise UnknownDtypeError(f"{name} is no dtype of a tensor; choose from {choices}")
    return name


def dtype_reasons(name: str, device: CudaDevice) -> list[Reason]:
    """Why a dtype is not native on the device; empty where it is."""
    native = NATIVE.get(dtype_name(name))
    if native is None:
        return []
    need = f"{dtype_id(name)} needs {native.text}"
    if device.capability is None:
        return [unknown(need, "unknown capability")]
    if device.capability in native:
        return []
    remedy = f"Run it where {dtype_id(name)} is native; an emulated pass would prove nothing."
    return [brief("dtype-native", need, describe(device), remedy)]
