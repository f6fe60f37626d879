"""What makes the pytest process unsafe to fork, and after which file of the suite that was first seen."""

from __future__ import annotations

from pytest_cudaenv.grants.process import fork_hazards
from pytest_cudaenv.host.driver import is_cuda_initialised, seems_initialised

OF_CUDA = "cuda-EvtHandlr"
"""The thread that comes with every CUDA context, and is no second finding."""


class Poison:
    """Looks after each file that is collected; a look costs some 50 microseconds."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        """What was found -> the file after whose import it was there; empty: before the first test file."""

    def look(self, where: str) -> None:
        """Note what has come up with the import of a file."""
        for what in _found(seems_initialised()):
            self._seen.setdefault(what, where)

    def why_not_forked(self) -> str | None:
        """Why this process cannot be forked safely any more; None where it can."""
        by_file: dict[str, list[str]] = {}
        for what in _found(bool(is_cuda_initialised())):
            by_file.setdefault(self._seen.get(what, ""), []).append(what)
        files = ((_listed(found), f" {where}" if where else "") for where, found in by_file.items())
        return "; ".join(f"{found} while collecting{where}" for found, where in files) or None


def _found(is_initialised: bool) -> list[str]:
    """What makes this process unsafe to fork now, in words; `is_initialised` is CUDA's part."""
    threads = fork_hazards()
    if not is_initialised:
        return [f"thread {thread} was started" for thread in threads]
    return ["CUDA was initialised", *(f"thread {thread} was started" for thread in threads if thread != OF_CUDA)]


def _listed(found: list[str]) -> str:
    return " and ".join(found) if len(found) < 4 else f"{found[0]} and {len(found) - 1} more"
