"""torch.cuda's questions, answered from the host's facts while collecting.

Module-level `skipif(torch.cuda.get_device_capability() < (9, 0))` and decorators that ask the device would
otherwise initialise CUDA in the pytest process: no mask could be set after that, and no process forked. The answers
are those that torch would give, so such conditions decide as before; under `--cuda-simulate` they decide as on that
host. The originals are back before the first test.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from pytest_cudaenv.host.devices import CudaDevice, Host
from pytest_cudaenv.host.mask import MaskReading
from pytest_cudaenv.host.nvml import free_memory
from pytest_cudaenv.importing import Announcer
from pytest_cudaenv.requirements.torch_build import RELEASES, release_archs

QUESTIONS = (
    "is_available",
    "device_count",
    "current_device",
    "get_device_capability",
    "get_device_properties",
    "get_device_name",
    "mem_get_info",
    "is_bf16_supported",
    "get_arch_list",
)
"""Functions of torch.cuda that are answered. https://docs.pytorch.org/docs/stable/cuda.html"""

_MODULES = ("torch.cuda", "torch.cuda.memory")

_PLUMBING = ("torch", "transformers", "accelerate", "importlib", "pytest_cudaenv", "unittest", "functools", "_pytest")
"""Packages that ask on behalf of somebody: the question is put down to the first caller outside them."""


@dataclass(frozen=True)
class Asked:
    """One question that was answered while collecting."""

    question: str
    answer: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} asked torch.cuda.{self.question}() while collecting: {self.answer}"


class TorchQuestions:
    """Answers torch.cuda's questions from `facts` between `install` and `remove`."""

    def __init__(self, facts: Callable[[], tuple[Host, MaskReading]]) -> None:
        self._facts = facts
        self._finder = Announcer(_MODULES, self._patch)
        self._patched: list[tuple[ModuleType, str, Any, Any]] = []
        self.active = False
        self.log: list[Asked] = []

    def install(self) -> None:
        """Answer from now on, in a torch that is imported already or will be."""
        if self.active:
            return
        self.active = True
        for name in _MODULES:
            if (module := sys.modules.get(name)) is not None:
                self._patch(module)
        self._finder.install()

    def remove(self) -> None:
        """Put torch's own functions back; copies that were taken meanwhile ask torch from now on."""
        if not self.active:
            return
        self.active = False
        self._finder.remove()
        for module, name, original, ours in reversed(self._patched):
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        self._patched.clear()
        _forget_cached_answers()

    def _patch(self, module: ModuleType) -> None:
        if getattr(sys.modules.get("torch.version"), "hip", None):
            return  # ROCm answers for itself; its devices are not CUDA devices
        for name in QUESTIONS:
            found: Any = getattr(module, name, None)
            if found is None:
                continue
            # torch.cuda takes some of these from torch.cuda.memory, where they may be ours already.
            is_ours = getattr(found, "__cudaenv__", None) is self
            original = found.__wrapped__ if is_ours else found
            ours = found if is_ours else self._wrapped(name, original)
            setattr(module, name, ours)
            self._patched.append((module, name, original, ours))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            answer = self._answer(name, original, *args, **kwargs)
            self._note(name, answer)
            return answer

        ask.__cudaenv__ = self  # type: ignore[attr-defined]
        return ask

    def _answer(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        host, reading = self._facts()
        devices = visible_to_torch(host, reading)
        if name == "is_available":
            return bool(devices)
        if name == "device_count":
            return len(devices)
        if name == "get_arch_list":
            return self._arch_list(host, original)
        if name == "is_bf16_supported":
            emulated = kwargs.get("including_emulation", args[0] if args else True)
            return bool(devices) and bool((devices[0].capability or (8, 0)) >= (8, 0) or emulated)
        if not devices:
            if host.software.torch is not None and host.software.torch.cuda is None and host.simulated is None:
                return original(*args, **kwargs)  # a CPU build says so itself, and has no CUDA to initialise
            raise RuntimeError("No CUDA GPUs are available")
        if name == "current_device":
            return 0
        device = _chosen(devices, kwargs.get("device", args[0] if args else None))
        if name == "get_device_name":
            return device.name
        if name == "get_device_capability":
            return device.capability if device.capability is not None else original(*args, **kwargs)
        if name == "mem_get_info":
            free = device.total_memory if host.simulated else free_memory(device.uuid)
            known = free is not None and device.total_memory is not None
            return (free, device.total_memory) if known else original(*args, **kwargs)
        return DeviceProperties(device, None if host.simulated else functools.partial(original, device.index))

    @staticmethod
    def _arch_list(host: Host, original: Callable[..., Any]) -> Any:
        torch = host.software.torch
        if torch is not None and host.simulated:
            return list(RELEASES.get((torch.cuda or "", "x86_64"), ()))
        # torch takes this question for the end of safe forks, so a table answers where there is one.
        told = release_archs(torch) if torch is not None else None
        return list(told) if told is not None else original()

    def _note(self, name: str, answer: Any) -> None:
        frame = _asker()
        if frame is not None:
            shown = repr(answer) if not isinstance(answer, DeviceProperties) else answer.name
            asked = Asked(name, shown, frame.f_code.co_filename, frame.f_lineno)
            if asked not in self.log:
                self.log.append(asked)


def visible_to_torch(host: Host, reading: MaskReading) -> Sequence[CudaDevice]:
    """The devices that torch could use: none for a CPU build of it, or where the host has a problem."""
    build = host.software.torch
    if host.problem is not None or (build is not None and build.cuda is None):
        return ()
    return reading.devices


def _chosen(devices: Sequence[CudaDevice], device: Any) -> CudaDevice:
    """The device that torch's `device` argument (None, index, string, torch.device) names; fails as torch does."""
    index = getattr(device, "index", device) if not isinstance(device, str) else device.partition(":")[2] or None
    if callable(index):  # `str.index` of a string that is not a device
        index = None
    number = 0 if index is None else int(index)
    if not 0 <= number < len(devices):
        raise AssertionError("Invalid device id")
    return devices[number]


class DeviceProperties:
    """What `torch.cuda.get_device_properties` answers while collecting.

    An attribute that the host's facts do not hold is asked of torch itself, which initialises CUDA; a simulated
    host has no torch to ask.
    """

    def __init__(self, device: CudaDevice, real: Callable[[], Any] | None) -> None:
        self._device = device
        self._real = real
        self.name = device.name
        self.is_integrated = int(device.unified_memory)
        self.is_multi_gpu_board = 0
        self.warp_size = 32

    @property
    def uuid(self) -> str:
        return self._device.uuid.removeprefix("GPU-").removeprefix("MIG-")

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Any] = {
            "major": self._device.capability and self._device.capability[0],
            "minor": self._device.capability and self._device.capability[1],
            "total_memory": self._device.total_memory,
            "multi_processor_count": self._device.multiprocessors,
        }
        if known.get(name) is not None:
            return known[name]
        if self._real is None or name.startswith("__"):
            raise AttributeError(f"{name!r} of a simulated {self.name} is not known")
        return getattr(self._real(), name)

    def __repr__(self) -> str:
        return f"DeviceProperties(name={self.name!r}, answered by pytest-cudaenv while collecting)"


def _asker() -> FrameType | None:
    """The frame that asked, outside the libraries that pass questions on."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _PLUMBING and _is_file(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def _is_file(code: CodeType) -> bool:
    return Path(code.co_filename).suffix == ".py"


def _forget_cached_answers() -> None:
    """Drop what transformers remembers of answers that were given for the whole mask, or for a simulated host."""
    module = sys.modules.get("transformers.utils.import_utils")
    for value in list(vars(module).values()) if module is not None else []:
        if callable(clear := getattr(value, "cache_clear", None)):
            clear()
