"""Device memory without a device: objects that count as long as they are alive, and the allocator that counts them."""

from __future__ import annotations

import gc
from typing import Any

from pytest_cudaenv.verdict.memory import Held

MIB = 1024**2

COUNTS: dict[str, Any] = {"used": False, "now": {}, "peak": {}, "emptied": 0, "asked": 0}


class OutOfMemoryError(RuntimeError):
    """As torch's is named."""


class Tensor:
    """So many MiB of a device."""

    def __init__(self, mib: float, index: int = 0) -> None:
        COUNTS["used"] = True
        if mib > 10_000:
            raise OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which "
                "1.25 GiB is free. Process 1 has 77 GiB memory in use."
            )
        self.count, self.index = int(mib * MIB), index
        COUNTS["now"][index] = COUNTS["now"].get(index, 0) + self.count
        COUNTS["peak"][index] = max(COUNTS["peak"].get(index, 0), COUNTS["now"][index])

    def __del__(self) -> None:
        if hasattr(self, "count"):
            COUNTS["now"][self.index] -= self.count


class FakeAllocator:
    """Counts them."""

    def is_used(self) -> bool:
        return bool(COUNTS["used"])

    def allocated(self, index: int) -> int:
        assert COUNTS["used"], "nothing may be asked before CUDA is in use"
        return int(COUNTS["now"].get(index, 0))

    def peak(self, index: int) -> int:
        assert COUNTS["used"]
        return int(COUNTS["peak"].get(index, 0))

    def reset_peak(self, index: int) -> None:
        assert COUNTS["used"]
        COUNTS["peak"][index] = COUNTS["now"].get(index, 0)

    def outside(self, index: int) -> int | None:
        return None if index else 7

    def empty_cache(self) -> None:
        COUNTS["emptied"] += 1

    def drop_workspaces(self) -> None:
        pass

    def summary(self) -> str:
        return "| PyTorch CUDA memory summary |"

    def held(self) -> list[Held]:
        COUNTS["asked"] += 1
        return [
            Held(o, o.count, f"float32 ({o.count // 4},) on cuda:{o.index}")
            for o in gc.get_objects()
            # Of this module: an earlier run of pytest in the same process had its own, and may hold some still.
            if type(o) is Tensor and hasattr(o, "count")
        ]
