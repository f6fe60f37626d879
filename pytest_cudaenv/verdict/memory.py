"""How much device memory a test takes at most and keeps, and who holds what it keeps.

All of it asks an `Allocator`, which on a device is torch's; nothing here initialises CUDA or raises for its state.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_cudaenv.requirements.markers import MemoryLimit
from pytest_cudaenv.requirements.sizes import format_memory
from pytest_cudaenv.verdict.finding import Finding

THRESHOLD = 64 * 1024**2
"""Bytes that a test without the marker may keep unsaid: kernels keep workspaces, and libraries caches."""


@dataclass(frozen=True, slots=True)
class Held:
    """One piece of device memory that is alive."""

    owner: Any
    """The tensor: what is looked for among the referrers."""
    count: int
    """Bytes."""
    text: str
    """`float32 (4096, 4096) on cuda:0`."""


class Allocator(Protocol):
    """What is asked about the memory of this process's devices, by their numbers in it."""

    def is_used(self) -> bool:
        """Whether the process uses CUDA; nothing else may be asked before."""
        ...

    def allocated(self, index: int) -> int:
        """Bytes in use now."""
        ...

    def peak(self, index: int) -> int:
        """The most bytes in use since `reset_peak`."""
        ...

    def reset_peak(self, index: int) -> None:
        """Begin the peak anew."""
        ...

    def outside(self, index: int) -> int | None:
        """Bytes of the device in use by anything but this allocator, other processes too; None where unknown."""
        ...

    def empty_cache(self) -> None:
        """Give what is kept for later allocations back to the devices, all of them."""
        ...

    def drop_workspaces(self) -> None:
        """Free what libraries allocate once and keep for themselves, as cuBLAS does at the first product."""
        ...

    def summary(self) -> str:
        """The allocator's own account, as text."""
        ...

    def held(self) -> list[Held]:
        """What is alive, as far as Python knows, each storage once."""
        ...


class TorchAllocator:
    """torch's caching allocator."""

    @property
    def _cuda(self) -> Any:
        return getattr(sys.modules.get("torch"), "cuda", None)

    def is_used(self) -> bool:
        with contextlib.suppress(Exception):  # another torch
            return bool(self._cuda is not None and self._cuda.is_initialized())
        return False

    def allocated(self, index: int) -> int:
        return self._count("current", index)

    def peak(self, index: int) -> int:
        return self._count("peak", index)

    def _count(self, which: str, index: int) -> int:
        # What `memory_allocated` takes from a hundred flattened numbers, asked several times for each test.
        with contextlib.suppress(Exception):  # another torch, or a broken context
            return int(self._cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"][which])
        return 0

    def reset_peak(self, index: int) -> None:
        with contextlib.suppress(Exception):
            self._cuda.reset_peak_memory_stats(index)

    def outside(self, index: int) -> int | None:
        with contextlib.suppress(Exception):
            if self._cuda.memory_reserved(index) == 0:
                return None  # a question to a device that is not in use would make a context there, which takes memory
            free, total = self._cuda.mem_get_info(index)
            return int(total - free - self._cuda.memory_reserved(index))
        return None

    def empty_cache(self) -> None:
        with contextlib.suppress(Exception):
            self._cuda.empty_cache()

    def drop_workspaces(self) -> None:
        # Not public: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/cudagraph_trees.py
        with contextlib.suppress(Exception):
            sys.modules["torch"]._C._cuda_clearCublasWorkspaces()

    def summary(self) -> str:
        with contextlib.suppress(Exception):
            return str(self._cuda.memory_summary(abbreviated=True))
        return "torch's allocator gives no summary"

    def held(self) -> list[Held]:
        torch: Any = sys.modules.get("torch")
        found: dict[Any, Held] = {}
        plain = getattr(torch.Tensor, "__torch_dispatch__", None)
        for candidate in gc.get_objects():
            # By its type: a proxy's `__class__` runs code, and warns. Fake tensors and their like have no memory, and
            # what wraps tensors (DTensor) holds others, which are found for themselves.
            kind = type(candidate)
            if not issubclass(kind, torch.Tensor) or getattr(kind, "__torch_dispatch__", plain) is not plain:
                continue
            with contextlib.suppress(Exception):
                if candidate.is_cuda:
                    storage = candidate.untyped_storage()
                    dtype = str(candidate.dtype).removeprefix("torch.")
                    text = f"{dtype} {tuple(candidate.shape)} on {candidate.device}"
                    found.setdefault(storage.data_ptr(), Held(candidate, storage.nbytes(), text))
        return list(found.values())


# One test ---------------------------------------------------------------------------------------------------------


class Meter:
    """Peak and kept memory of the devices of one test, from `reset` on."""

    def __init__(self, allocator: Allocator, indices: Sequence[int]) -> None:
        self.allocator = allocator
        self.indices = tuple(indices)
        self._base: dict[int, int] = {}
        self._outside: dict[int, int | None] = {}
        self._peak: dict[int, int] = {}
        self._highest = self._in_process = 0
        self.reset()
        self._start = dict(self._base)

    def reset(self) -> None:
        """Begin anew: what is allocated now is not counted as kept, and the peak starts from here."""
        self._highest = self.highest
        self._peak = {}
        self._base = {index: self._allocated(index) for index in self.indices}
        self._outside = {index: self._used_outside(index) for index in self.indices}
        self._reset_peaks()

    def _allocated(self, index: int) -> int:
        return self.allocator.allocated(index) if self.allocator.is_used() else 0

    def _used_outside(self, index: int) -> int | None:
        return self.allocator.outside(index) if self.allocator.is_used() else None

    def _reset_peaks(self) -> None:
        for index in self.indices if self.allocator.is_used() else ():
            self.allocator.reset_peak(index)

    def _peaks(self) -> dict[int, int]:
        used = self.allocator.is_used()
        return {i: max(self._peak.get(i, 0), self.allocator.peak(i) if used else 0) for i in self.indices}

    @property
    def peak(self) -> int:
        """The most bytes in use on one of the devices; what fixtures of a wider scope hold is among them."""
        return max(self._peaks().values(), default=0) if self._base else 0

    @property
    def in_process(self) -> int:
        """The same, with what fixtures of a wider scope took at most while they were set up or torn down meanwhile."""
        return max(self._in_process, self.highest)

    @property
    def highest(self) -> int:
        """The same since the test began, however often it has reset the meter."""
        return max(self._highest, self.peak)

    @property
    def before(self) -> int:
        """Bytes that were in use when the test began, on the device that had most; fixtures' of a wider scope since."""
        return max(self._start.values(), default=0)

    @property
    def kept(self) -> int:
        """Bytes that are in use on all devices now and were not at first; cycles that nobody uses are freed."""
        if self.growth > 0:
            gc.collect()
        return max(self.growth, 0)

    @property
    def growth(self) -> int:
        """The same without a look at cycles; below 0 where more was freed than allocated."""
        return sum(self._allocated(index) - self._base[index] for index in self.indices)

    @property
    def total_growth(self) -> int:
        """The same since the test began, however often it has reset the meter."""
        return sum(self._allocated(index) - self._start[index] for index in self.indices)

    @property
    def outside(self) -> int | None:
        """Bytes that the driver counts and torch's allocator does not, more than at first; None where unknown.

        Contexts, libraries and other processes that use the same device are among them.
        """
        known = [(self._used_outside(index), self._outside[index]) for index in self.indices]
        grown = [now - before for now, before in known if now is not None and before is not None]
        return sum(grown) if grown else None

    def pause(self) -> dict[int, int]:
        """Somebody else is going to allocate: bytes in use now, for `resume`."""
        self._peak = self._peaks()
        return {index: self._allocated(index) for index in self.indices}

    def resume(self, before: dict[int, int], grown: dict[int, int] | None = None) -> None:
        """They have: neither what they keep nor their own peak is this test's.

        `grown` is what they have allocated, or freed, where that is not what the allocator says by now.
        """
        for index, count in before.items():
            change = self._allocated(index) - count if grown is None else grown.get(index, 0)
            self._base[index] += change
            self._start[index] += change
            if self.allocator.is_used():
                self._in_process = max(self._in_process, self.allocator.peak(index))
        self._reset_peaks()


# Who holds it -----------------------------------------------------------------------------------------------------

DEPTH = 8
"""Steps from a tensor to what is named as its holder."""


class Known:
    """Tensors that were there before: they are nobody's leak now. Kept weakly, by identity, as tensors compare."""

    def __init__(self) -> None:
        self._there: dict[int, weakref.ref[Any]] = {}
        self.counted = 0
        """Bytes that were in use when all that was alive was noted last."""

    def note(self, held: Iterable[Held]) -> None:
        """All of these are there."""
        self._there = {id(one.owner): weakref.ref(one.owner) for one in held}

    def add(self, held: Iterable[Held]) -> None:
        """These as well."""
        self._there.update({id(one.owner): weakref.ref(one.owner) for one in held})

    def new(self, held: Iterable[Held]) -> list[Held]:
        """Those of them that have come since, largest first."""
        fresh = [one for one in held if (ref := self._there.get(id(one.owner))) is None or ref() is not one.owner]
        return sorted(fresh, key=lambda one: -one.count)


def holder(owner: Any, ignored: Iterable[object] = ()) -> str:
    """Who keeps an object alive, in the words of the suite: a fixture, a global, a frame, or the way to it."""
    skipped = {id(one) for one in ignored} | {id(sys._getframe()), id(sys.modules)}
    seen = {id(owner)} | skipped
    level: list[tuple[Any, str]] = [(owner, "")]
    way = ""
    for _ in range(DEPTH):
        following: list[tuple[Any, str]] = []
        seen |= {id(pair) for pair in level}
        for target, path in level:
            for referrer in gc.get_referrers(target):
                if id(referrer) in seen or referrer is level or referrer is following or _is_ours(referrer):
                    continue
                seen.add(id(referrer))
                if (named := _named(referrer, target, path)) is not None:
                    return named
                if isinstance(referrer, types.ModuleType):
                    continue
                if getattr(referrer, "__dict__", None) is target:
                    extended = _FIRST_KEY.sub(r".\1", path)
                else:
                    extended = f"{_step(referrer, target)}{path}"
                way = f"{type(referrer).__name__}{extended}"
                pair = (referrer, extended)
                seen.add(id(pair))
                following.append(pair)
        level = following[:200]
        if not level:
            break
    return f"a {way}" if way else "nothing that Python knows of (a C++ object, as autograd's are)"


def _is_ours(referrer: Any) -> bool:
    if isinstance(referrer, types.FrameType):
        return referrer.f_code.co_filename == __file__
    return isinstance(referrer, Held) or type(referrer).__name__ in {"list_iterator", "tuple_iterator"}


_FIRST_KEY = re.compile(r"^\['(\w+)'\]")
"""Of a path that begins in an object's, a class's or a frame's dict."""


def _named(referrer: Any, target: Any, path: str) -> str | None:
    """The end of the search: what a reader of the suite knows by a name."""
    if isinstance(referrer, types.FrameType):
        code, values = referrer.f_code, referrer.f_locals
        where = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{referrer.f_lineno})"
        if values is target:
            return f"the frame of {where}, local {_FIRST_KEY.sub(chr(92) + '1', path)}"
        name = next((n for n, value in values.items() if value is target), None)
        return f"the frame of {where}" + (f", local {name}{path}" if name else "")
    if type(referrer).__name__ == "FixtureDef":
        return f"the fixture {referrer.argname}"  # its value is in a tuple of it
    if isinstance(referrer, dict) and isinstance(referrer.get("__name__"), str) and "__builtins__" in referrer:
        return f"the global {referrer['__name__']}.{_key(referrer, target)}{path}"
    if isinstance(referrer, type):
        return f"the class attribute {referrer.__qualname__}{_FIRST_KEY.sub(r'.' + chr(92) + '1', path)}"
    if isinstance(referrer, types.FunctionType):
        return f"the function {referrer.__qualname__} (a default or a closure)"
    return None


def _key(mapping: dict[Any, Any], target: Any) -> str:
    return str(next((name for name, value in mapping.items() if value is target), "?"))


def _step(referrer: Any, target: Any) -> str:
    """The way from a container to what it holds."""
    if isinstance(referrer, dict):
        key = next((name for name, value in referrer.items() if value is target), "?")
        return f"[{key!r}]"
    if isinstance(referrer, (list, tuple)):
        return f"[{next((i for i, value in enumerate(referrer) if value is target), '?')}]"
    names = getattr(referrer, "__dict__", None)
    if isinstance(names, dict):
        name = next((n for n, value in names.items() if value is target), None)
        return f".{name}" if name is not None else ""
    return ""


def _clear_frames(trace: types.TracebackType | None) -> None:
    traceback.clear_frames(trace)
    for frame, _ in traceback.walk_tb(trace):
        # Before Python 3.13 a frame whose locals were looked at, as pytest does, keeps them in a dict of its own. That
        # of a module's or a class's frame is no copy.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            with contextlib.suppress(Exception):
                frame.f_locals.clear()


def leak_text(kept: int, allowed: int, fresh: Sequence[Held], name: Callable[[Any], str] = holder) -> str:
    """Need and have of a leak, on one line, with the holders of its largest tensors."""
    need = f"at most {_size(allowed)}" if allowed else "all memory"
    text = f"needs {need} {'kept' if allowed else 'given back'}; have {_size(kept)} kept"
    told = [f"{one.text}, {_size(one.count)}, held by {name(one.owner)}" for one in fresh[:3]]
    rest = f" and {len(fresh) - 3} more tensors" if len(fresh) > 3 else ""
    return f"{text}: {'; '.join(told)}{rest}" if told else f"{text}, by no tensor that Python knows of"


def _size(count: int) -> str:
    return format_memory(count) if count >= 1024**2 else f"{count} bytes"


def forget_failures(failures: Iterable[BaseException]) -> None:
    """Have tracebacks keep no values alive any more: those of these exceptions and of the last one of the process."""
    last = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    pending = [one for one in (*failures, *last) if isinstance(one, BaseException)]
    seen: set[int] = set()
    while pending:
        error = pending.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        _clear_frames(error.__traceback__)
        pending += [one for one in (error.__cause__, error.__context__) if one is not None]
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


# Out of memory ----------------------------------------------------------------------------------------------------

OOM = "cuda-oom"
OOM_SKIPPED = "oom-skipped"
KEPT = "memory-kept"
LEAK = "memory-leak"
PEAK = "memory-peak"


def oom_in(error: BaseException | None) -> BaseException | None:
    """torch's error of a device without memory, if it is this one, its cause, or what it was raised while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
            return error
        error = error.__cause__ or error.__context__
    return None


_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)\.")
_FREE = re.compile(r"(?:of which|capacity;?) ([\d.]+ \w+) is free")


def oom_finding(error: BaseException) -> Finding:
    """What a test that ran out of memory is told, from torch's message."""
    text = str(error)
    wanted, free = _WANTED.search(text), _FREE.search(text)
    need = f"needs {wanted[1]} more device memory" if wanted else "needs more device memory"
    have = f"have {free[1]} free" if free else f"have too little: {text.strip().partition(chr(10))[0][:100]}"
    remedy = "Declare what it uses with @requires_cuda(memory=…), so that it shares no device that is too small."
    return Finding(OOM, f"{need}; {have}", remedy)


_SAYS_OOM = re.compile(r"out of memory|\boom\b", re.IGNORECASE)


def skipped_oom(error: BaseException | None) -> Finding | None:
    """A skip for want of memory: the test has not run, and looks like one that need not."""
    if error is None or (oom_in(error) is None and not _SAYS_OOM.search(str(error))):
        return None
    remedy = "Declare @requires_cuda(memory=…): where there is less, it skips before it runs, and says so."
    return Finding(OOM_SKIPPED, "needs its device memory to have run; have skipped when it ran out", remedy)


def peak_finding(highest: int, limit: MemoryLimit, before: int = 0) -> Finding | None:
    """A test that took more than its marker says; `before` is what was in use when it began."""
    if limit.peak is None or highest <= limit.peak:
        return None
    text = f"needs a peak of at most {_size(limit.peak)} on a device; have {_size(highest)}"
    if before:
        text += f", {_size(before)} of it from before the test"
    return Finding(PEAK, text, "Let it use less, or write the new peak into @cuda_memory.", is_failure=True)


def kept_finding(kept: int, limit: MemoryLimit, fresh: Sequence[Held]) -> Finding | None:
    """A test that keeps more than its marker says, or without one more than a cache."""
    if limit.leak is not None:
        if kept <= limit.leak:
            return None
        text = leak_text(kept, limit.leak, fresh)
        return Finding(LEAK, text, "Drop what holds it when the test ends.", is_failure=True)
    if kept < THRESHOLD:
        return None
    return Finding(KEPT, leak_text(kept, 0, fresh), "Drop what holds it when the test ends; the next test has less.")
