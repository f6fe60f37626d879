"""Builds the fake libraries and describes machines to them.

Needs no conftest: a fixture gives a folder of its own (each xdist worker has another `tmp_path_factory`), and real
clients find the library there through `LD_LIBRARY_PATH`, in a process of their own, because ctypes and pynvml keep
what they have loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent
REPOSITORY = SOURCES.parents[1]

NVML, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


class BuildError(RuntimeError):
    """A fake library can't be built on this machine."""


def build_nvml(folder: Path, *, old: bool = False) -> Path:
    """The folder, with a fake NVML in it; an old one lacks what newer drivers brought.  Raises BuildError."""
    return _build("fake_nvml.c", folder / NVML, *(["-DOLD"] if old else []))


def build_cuda(folder: Path) -> Path:
    """The folder, with a fake CUDA driver in it.  Raises BuildError."""
    return _build("fake_cuda.c", folder / CUDA)


def _build(source: str, library: Path, *flags: str) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise BuildError(f"no C compiler (cc, gcc or clang), which the tests need to build {source}")
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler.split(), "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *flags]
    done = subprocess.run(
        [*command, "-o", str(library), str(SOURCES / source)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{compiler} can't build {source}:\n{done.stderr}")
    return library.parent


@dataclass(frozen=True)
class FakeInstance:
    """A MIG instance as the fake NVML describes it."""

    uuid: str = "MIG-5a5a5a5a-0000-4000-8000-000000000001"
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    mib: int = 4864
    ids: tuple[int, int] = (7, 0)
    slot: int = 0
    sms: int = 14
    codes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeGpu:
    """A GPU as the fake libraries describe it; None is what a query does not support."""

    uuid: str | None = "GPU-11111111-2222-4333-8444-555555555555"
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] | None = (9, 0)
    mib: int = 81559
    pci: tuple[int, int, int] | None = (0, 1, 0)
    sms: int = 132
    integrated: bool = False
    mig: Sequence[FakeInstance] | None = None
    """Its instances where it is in MIG mode."""
    events: int | None = None
    """The types of events that it supports, as bits; None: that of Xid errors."""
    codes: Mapping[str, int] = field(default_factory=dict)
    """What the named calls return: `{"mem": 3}`; see fake_nvml.c."""


def nvml_environment(gpus: Sequence[FakeGpu], **settings: object) -> dict[str, str]:
    """What the fake NVML reads: these GPUs, and `init=18` for FAKE_NVML_INIT and so on."""
    records = [_fields(_gpu_fields(gpu), gpu.codes) for gpu in gpus]
    for index, gpu in enumerate(gpus):
        records += [_fields({"parent": index, **_instance_fields(i)}, i.codes) for i in gpu.mig or ()]
    extra = {f"FAKE_NVML_{name.upper()}": str(value) for name, value in settings.items()}
    return {"FAKE_NVML": ";".join(records), **extra}


def usage_line(uuid: str, used: int, reserved: int = 0, processes: Mapping[int, int | None] | None = None) -> str:
    """A line of the file FAKE_NVML_USAGE: MiB that are used and reserved, and of each process (None: not told)."""
    listed = [f"{pid}:{'-' if mib is None else mib}" for pid, mib in (processes or {}).items()]
    return " ".join([uuid, str(used), str(reserved), *listed]) + "\n"


def _gpu_fields(gpu: FakeGpu) -> dict[str, object]:
    fields: dict[str, object] = {"name": gpu.name, "mib": gpu.mib}
    if gpu.uuid is not None:
        fields["uuid"] = gpu.uuid
    if gpu.capability is not None:
        fields["cap"] = "{}.{}".format(*gpu.capability)
    if gpu.pci is not None:
        fields["pci"] = "{:x}.{:x}.{:x}".format(*gpu.pci)
    if gpu.mig is not None:
        fields["mig"] = 1
    if gpu.events is not None:
        fields["events"] = gpu.events
    return fields


def _instance_fields(instance: FakeInstance) -> dict[str, object]:
    gi, ci = instance.ids
    slot, sms = instance.slot, instance.sms
    return {
        "uuid": instance.uuid, "name": instance.name, "mib": instance.mib, "gi": gi, "ci": ci, "slot": slot, "sms": sms
    }  # fmt: skip


def _fields(fields: Mapping[str, object], codes: Mapping[str, int]) -> str:
    every = {**fields, **{f"rc.{call}": code for call, code in codes.items()}}
    return "|".join(f"{key}={_escaped(value)}" for key, value in every.items())


def _escaped(value: object) -> str:
    if isinstance(value, bytes):
        return "".join(f"%{byte:02x}" for byte in value)
    return str(value)


def cuda_environment(gpus: Sequence[FakeGpu], **settings: object) -> dict[str, str]:
    """What the fake CUDA driver reads: these GPUs in its own order, and `init=100` for FAKE_CUDA_INIT and so on.

    Of a GPU in MIG mode it shows the first instance, as the driver does.
    """
    extra = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    return {"FAKE_CUDA": ";".join(_cuda_record(gpu) for gpu in gpus), **extra}


def _cuda_record(gpu: FakeGpu) -> str:
    whole = (gpu.uuid or "").removeprefix("GPU-")
    instance = gpu.mig[0] if gpu.mig else None
    own, name, mib, sms = whole, gpu.name, gpu.mib, gpu.sms
    if instance is not None:
        own, name, mib, sms = instance.uuid.removeprefix("MIG-"), instance.name, instance.mib, instance.sms
    major, minor = gpu.capability or (0, 0)
    place = "{:x}.{:x}.{:x}".format(*(gpu.pci or (0, 0, 0)))
    values = (own, whole, name, mib, major, minor, place, sms, int(gpu.integrated))
    return "|".join(str(value) for value in values)


def client_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that finds the libraries of these folders, and this repository's modules.

    Its own mask and order are unset, so that a test means the same on every machine.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "FAKE_", "COV_CORE_"))}
    paths = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)), "PYTHONPATH": str(REPOSITORY)}
    return {**kept, **paths, **variables}
