"""Asks `libcuda` what it sees, and prints that as JSON.  Run by `host.driver` in a process of its own.

Only the standard library: the process starts without site-packages, in a few milliseconds.
https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import json
import os
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t, create_string_buffer
from typing import Any

WSL_LIBRARY = "/usr/lib/wsl/lib/libcuda.so.1"

ATTRIBUTES = {
    "multiprocessors": 16,
    "integrated": 18,
    "bus": 33,
    "device": 34,
    "domain": 50,
    "major": 75,
    "minor": 76,
}
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT and so on."""


def load() -> CDLL:
    """The CUDA driver's library.  Raises OSError with the loader's reason."""
    try:
        return CDLL("libcuda.so.1")
    except OSError:
        # Where Windows puts it, if the loader's configuration of this distribution does not say so.
        if os.path.exists(WSL_LIBRARY):
            return CDLL(WSL_LIBRARY)
        raise


def describe() -> dict[str, Any]:
    """`cu_init`, `version`, `error` and `devices`; what is not known is missing or None."""
    try:
        cuda = load()
    except OSError as error:
        return {"error": f"libcuda.so.1 can't be loaded ({error})"}
    version = c_int()
    cuda.cuDriverGetVersion(byref(version))
    answer: dict[str, Any] = {"version": version.value, "cu_init": cuda.cuInit(0)}
    if answer["cu_init"] != 0:
        return {**answer, "error": f"cuInit fails with {error_name(cuda, answer['cu_init'])}"}
    count = c_int()
    if code := cuda.cuDeviceGetCount(byref(count)):
        return {**answer, "error": f"cuDeviceGetCount fails with {error_name(cuda, code)}"}
    return {**answer, "devices": [describe_device(cuda, ordinal) for ordinal in range(count.value)]}


def error_name(cuda: CDLL, code: int) -> str:
    """`CUDA_ERROR_NO_DEVICE (100)`."""
    name = c_char_p()
    if not hasattr(cuda, "cuGetErrorName") or cuda.cuGetErrorName(code, byref(name)) or not name.value:
        return str(code)
    return f"{name.value.decode('ascii', 'replace')} ({code})"


def describe_device(cuda: CDLL, ordinal: int) -> dict[str, Any]:
    """What the driver says about one device; what it does not say is None."""
    device = c_int()
    if cuda.cuDeviceGet(byref(device), ordinal):
        return {}
    name = create_string_buffer(256)
    named = cuda.cuDeviceGetName(name, 256, device) == 0
    total = c_size_t()
    counted = cuda.cuDeviceTotalMem_v2(byref(total), device) == 0
    return {
        "name": name.value.decode("utf-8", "replace") if named else None,
        "total_memory": total.value if counted else None,
        # Version 1 answers the UUID of the GPU, version 2 that of the MIG instance.
        "gpu_uuid": uuid(cuda, "cuDeviceGetUuid", device),
        "uuid": uuid(cuda, "cuDeviceGetUuid_v2", device),
        **{key: attribute(cuda, number, device) for key, number in ATTRIBUTES.items()},
    }


def uuid(cuda: CDLL, function: str, device: c_int) -> str | None:
    """The 16 bytes of a UUID as NVML spells them, without prefix; None where the driver has no such function."""
    raw = create_string_buffer(16)
    if not hasattr(cuda, function) or getattr(cuda, function)(raw, device):
        return None
    digits = raw.raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def attribute(cuda: CDLL, number: int, device: c_int) -> int | None:
    """One attribute of a device, or None."""
    value = c_int()
    return value.value if cuda.cuDeviceGetAttribute(byref(value), number, device) == 0 else None


def main() -> None:
    """Writes the answer to standard output, where nothing that the library prints can get into it."""
    output = os.dup(1)
    os.dup2(2, 1)
    os.write(output, json.dumps(describe()).encode())
    # The answer is out: a driver that hangs while it is taken down must not hold it back.
    os._exit(0)


if __name__ == "__main__":
    main()
