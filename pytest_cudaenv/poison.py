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
        if seems_initialised():
            self._seen.setdefault("CUDA was initialised", where)
        for thread in fork_hazards():
            self._seen.setdefault(f"thread {thread} was started", where)

    def why_not_forked(self) -> str | None:
        """Why this process cannot be forked safely any more; None where it can. Ask once OpenMP is paused."""
        now = [f"thread {thread} was started" for thread in fork_hazards()]
        if is_cuda_initialised():
            now = ["CUDA was initialised", *(what for what in now if OF_CUDA not in what)]
        if not now:
            return None
        by_file: dict[str, list[str]] = {}
        for what in now:
            by_file.setdefault(self._seen.get(what, ""), []).append(what)
        files = ((_listed(found), f" {where}" if where else "") for where, found in by_file.items())
        return "; ".join(f"{found} while collecting{where}" for found, where in files)


def _listed(found: list[str]) -> str:
    return " and ".join(found) if len(found) < 4 else f"{found[0]} and {len(found) - 1} more"
