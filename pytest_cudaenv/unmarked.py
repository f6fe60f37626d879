"""Tests that declare no device and use CUDA all the same, in the pytest process and without a lease."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants.lock_folder import LeaseError, LockFile
from pytest_cudaenv.host.driver import seems_initialised
from pytest_cudaenv.session import asks_for_device

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

CODE = "cuda-unmarked"

Use = tuple[bool, tuple[int, ...]]
"""Whether anything has initialised CUDA in this process, and how often torch has allocated on each device."""


class Unmarked:
    """Finds them by what CUDA and torch's allocator say before and after each.

    Once CUDA is initialised, a test that uses it through torch is one that allocates; others go unnoticed.
    """

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self._watched: tuple[pytest.Item, Use] | None = None
        """The test that runs, and what had been used before it; None for one that may use CUDA."""
        self._announced: LockFile | None = None
        if seems_initialised():
            self._announce()

    def begin(self, item: pytest.Item) -> None:
        """Before a test, in the process that runs it."""
        self._watched = None if asks_for_device(item) else (item, use_of_cuda())

    def judge(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Note on the report of a test's body or teardown that it used CUDA; fail it, if the run was told to."""
        if self._watched is None or self._watched[0] is not item or report.when == "setup":
            return
        before, now = self._watched[1], use_of_cuda()
        self._watched = (item, now)
        if now == before:
            return
        self._announce()
        record = getattr(report, "cudaenv", None) or {"cell": None, "ran_on": None}
        report.cudaenv = {**record, "unmarked": True}  # type: ignore[attr-defined]
        if self.session.settings.unmarked != "fail" or not compat.has_passed(report):
            return
        compat.fail(
            report,
            f"[{CODE}] needs a requirement to use CUDA; have none, and so no lease. "
            "Put @requires_cuda on the test, or request cuda_device (--cuda-unmarked=fail)",
        )

    def _announce(self) -> None:
        """Tell other processes of this run that what this one uses of the devices is no stranger's."""
        if self._announced is None and self.session.isolation is not None:
            with contextlib.suppress(LeaseError):
                self._announced = self.session.isolation.leases.announce()

    def end(self) -> None:
        """After the last test."""
        if self._announced is not None:
            self._announced.close()


def use_of_cuda() -> Use:
    """What this process has done with CUDA so far. Initialises nothing, and costs some microseconds."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    allocations: tuple[int, ...] = ()
    with contextlib.suppress(Exception):  # another torch, or a broken context: then its allocations are not known
        if cuda is not None and cuda.is_initialized():
            stats = [cuda.memory_stats(index) for index in range(cuda.device_count())]
            allocations = tuple(s.get("allocation.all.allocated", 0) for s in stats)
    return seems_initialised() or bool(allocations), allocations
