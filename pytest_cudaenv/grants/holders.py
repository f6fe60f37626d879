"""Which processes somebody still holds: a fixture of a wider scope, or a module, that started them within a test.

A pool in a session fixture starts its workers when the first test needs one, torch's compiler its own likewise. They
are not the test's, and are told from what it has forgotten by what Python's objects refer to.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterable
from types import FrameType, ModuleType, TracebackType

import pytest

MOST = 20_000
"""Objects that are looked at for one process; what has more of them around it is held."""

BOOKKEEPERS = {
    "sys", "builtins", "gc", "subprocess", "multiprocessing", "threading", "weakref", "asyncio", "concurrent", "atexit",
    "_pytest", "pytest", "pluggy", "pytest_cudaenv", "pytest_timeout", "xdist", "execnet",
}  # fmt: skip
"""Modules that know of every process, thread or failure, which tells nothing of who needs it."""


def held(pids: Iterable[int]) -> set[int]:
    """Those of the processes whose `Popen` or `Process` can be reached from a live fixture or from a module."""
    wanted = set(pids)
    if not wanted:
        return set()
    gc.unfreeze()  # or who stems from the zygote, as fixtures do, is no referrer of anything
    kinds: tuple[type, ...] = (subprocess.Popen,)
    if (process := getattr(sys.modules.get("multiprocessing.process"), "BaseProcess", None)) is not None:
        kinds += (process,)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    ends = {id(vars(module)): module.__name__.partition(".")[0] not in BOOKKEEPERS for module in modules}
    found: set[int] = set()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kinds):
            pid = _pid(candidate)
            if pid in wanted and pid not in found and _is_reached(candidate, ends):
                found.add(pid)
    return found


def _pid(handle: object) -> int:
    try:
        return int(getattr(handle, "pid", None) or 0)
    except Exception:  # one that was closed, or that another process made
        return 0


def _is_reached(start: object, ends: dict[int, bool]) -> bool:
    """Follow who refers to whom, upwards; frames are not followed, as those of a failure outlive the test."""
    seen, level = {id(start)}, [start]
    ours = {id(seen), id(level), id(ends)}
    while level and len(seen) < MOST:
        above: list[object] = []
        ours.add(id(above))
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or id(referrer) in ours:
                continue
            seen.add(id(referrer))
            if (is_holder := ends.get(id(referrer))) is not None:
                if is_holder:
                    return True
            elif issubclass(type(referrer), pytest.FixtureDef):
                return True
            elif not issubclass(type(referrer), (FrameType, TracebackType, BaseException, ModuleType, pytest.Item)):
                above.append(referrer)
        level = above
    return bool(level)
