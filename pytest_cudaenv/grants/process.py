"""What a process needs to be forked and to be ended: OpenMP's pool, the parent's death, and what makes forks unsafe."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_POOLS = re.compile(r"PTThreadPool|pt_autograd|polars|tokio|rayon|ThreadPoolExec|grpc|cuda-EvtHandlr")
"""Names of threads, in /proc/self/task/*/comm, whose pools do not survive a fork: what is given to them hangs."""


def fork() -> int:
    """`os.fork` without the warning of Python 3.12, which `-W error` would make an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that forked it, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent ends, so that they can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def pause_openmp() -> None:
    """Drop the thread pools of libgomp: a forked child that computes on one that it does not have hangs."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for library in sorted(set(re.findall(r"(/\S*libgomp\S*\.so\S*)", maps))):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_pause_resource_all(2)  # omp_pause_hard


def fork_hazards() -> list[str]:
    """Threads that make a fork unsafe, by name; empty where it is safe. Those that `pause_openmp` ends are none."""
    names: set[str] = set()
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.add(comm.read_text().strip())
    found = {name for name in names if _POOLS.search(name)}
    found |= {t.name for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")}
    return sorted(found)


def end(status: int, before: Callable[[], None] | None = None) -> NoReturn:
    """End a forked process: what its own tests registered with `atexit` runs, what it inherited does not."""
    try:
        if before is not None:
            before()
    except ConnectionError:
        pass  # whom it served has ended
    except BaseException:
        status = 70  # EX_SOFTWARE
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        _end_multiprocessing()
    os._exit(status)


def _end_multiprocessing() -> None:
    """As at the end of any interpreter; but no worker is waited for that nobody has told to end.

    https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/util.py (_exit_function)
    """
    if (util := sys.modules.get("multiprocessing.util")) is None:
        return
    for worker in sys.modules["multiprocessing"].active_children():
        worker.terminate()
    util._exit_function()


def forget_inherited() -> None:
    """Drop the handlers and the workers that a fork has inherited: they are the parent's to run, and to end.

    `_children`, as multiprocessing does in its own forks:
    https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/process.py (BaseProcess._bootstrap)
    """
    atexit._clear()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process._children.clear()
