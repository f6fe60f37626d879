"""What CUDA itself says, asked in a child process; and whether anybody has initialised it in this one.

Asking `libcuda` anything of use takes `cuInit`, which fixes the mask for the life of a process and spoils its forks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaenv.host.devices import UNKNOWN_NAME, Capability, CudaDevice, cuda_version, renumbered

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: nobody has called `cuInit` in this process."""

CHILD = Path(__file__).with_name("driver_child.py")

_SONAME = "libcuda.so.1"

_LIBCUDA = re.compile(r"(?<= )/(?:.*/)?libcuda\.so[.0-9]*(?=$| \(deleted\)$)", re.MULTILINE)


@dataclass(frozen=True)
class DriverAnswer:
    """What CUDA says in a process with a given environment."""

    cu_init: int | None
    """`cuInit`'s return code; None where it was not reached: no library, or the child crashed or took too long."""
    error: str | None = None
    """Why there are no devices, in a few words."""
    version: Capability | None = None
    """The newest CUDA version that the driver supports, (major, minor)."""
    devices: tuple[CudaDevice, ...] = ()
    """What the environment lets CUDA see, in its order."""


def ask_driver(environ: Mapping[str, str], timeout: float = 60.0) -> DriverAnswer:
    """What CUDA says in a new process that has exactly this environment; never raises.

    `timeout` is in seconds. `cuInit` takes up to some ten of them where many GPUs have to wake up.
    """
    # Isolated and without site: nothing that the environment or a .pth file names runs before the question.
    command = [sys.executable, "-I", "-S", str(CHILD)]
    try:
        child = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as error:
        return DriverAnswer(None, f"no process could be started to ask CUDA ({error})")
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return DriverAnswer(None, f"CUDA did not answer within {timeout:g} seconds")
    if child.returncode != 0:
        return DriverAnswer(None, _death(child.returncode, errors))
    try:
        return _answer(json.loads(output))
    except (ValueError, TypeError, AttributeError) as error:
        return DriverAnswer(None, f"the process that asked CUDA gave no answer ({error})")


def _abandon(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        # Stuck inside the kernel module, where no signal reaches it; it must not hold up this process as well.
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def _death(status: int, errors: bytes) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process that asked CUDA died of {name}"
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return f"the process that asked CUDA failed ({lines[-1] if lines else f'status {status}'})"


def _answer(data: Mapping[str, Any]) -> DriverAnswer:
    described = [_device(d) for d in data.get("devices", ())]
    devices = tuple(d for d in described if d is not None)
    error = data.get("error")
    if len(devices) < len(described):
        error = "CUDA has a device that does not tell its UUID"
    return DriverAnswer(data.get("cu_init"), error, cuda_version(data.get("version")), renumbered(devices))


def _device(data: Mapping[str, Any]) -> CudaDevice | None:
    """A device as the child describes it; None where it has no UUID, by which alone it could be named."""
    whole, own = data.get("gpu_uuid"), data.get("uuid") or data.get("gpu_uuid")
    if not own:
        return None
    name = data["name"] or UNKNOWN_NAME
    is_mig = bool(whole and whole != own) or " MIG " in name
    place = (data["domain"], data["bus"], data["device"])
    return CudaDevice(
        index=0,
        uuid=f"MIG-{own}" if is_mig else f"GPU-{own}",
        name=name,
        capability=(data["major"], data["minor"]) if data["major"] and data["minor"] is not None else None,
        total_memory=data["total_memory"] or None,
        unified_memory=data["integrated"] == 1,
        pci_bus_id="{:08X}:{:02X}:{:02X}.0".format(*place) if None not in place else None,
        multiprocessors=data["multiprocessors"] or None,
        mig_parent=f"GPU-{whole}" if is_mig and whole != own else None,
    )


def is_cuda_initialised(maps: Path = Path("/proc/self/maps")) -> bool | None:
    """Whether anything has called `cuInit` in this process; None where that can't be told.

    Loads and initialises nothing. To be asked before a fork: in a child of an initialised process CUDA answers
    that it is not initialised, and is unusable all the same.
    """
    try:
        loaded = _LIBCUDA.search(maps.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if loaded is None:
        return False
    # By name first: the file may have been replaced by a driver update since it was loaded.
    for name in (_SONAME, loaded[0]):
        if (answer := _ask_loaded(name)) is not None:
            return answer
    return None


def seems_initialised() -> bool:
    """`is_cuda_initialised` in microseconds, for many calls; misses a library that was loaded under another name."""
    return bool(_ask_loaded(_SONAME))


def _ask_loaded(name: str) -> bool | None:
    try:
        cuda = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED)
    except (OSError, AttributeError):
        return None
