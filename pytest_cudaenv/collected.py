"""`--cuda-plan PATH`: writes what a collection found, for commands that run no pytest of their own.

Registered with the option alone: no other run pays for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES
from pytest_cudaenv.ledger.suite import Suite, SuiteTest, Told, Uncollected, lines_of
from pytest_cudaenv.options import RUNNERS
from pytest_cudaenv.requirements.attention_backends import BACKENDS, registered
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession


class SuiteWriter:
    """Writes the suite of one collection, once it is known."""

    def __init__(self, session: CudaSession, path: Path) -> None:
        self.session = session
        self.path = path
        self.uncollected: list[Uncollected] = []
        self.deselected = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.uncollected.append(Uncollected(report.nodeid, _why(report), report.outcome == "failed"))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        root = self.session.config.rootpath
        settings = self.session.settings
        told = Told(
            rootdir=str(root),
            runners=tuple(self.session.config.getini(RUNNERS)),
            simulate=settings.simulate,
            assume=settings.assume,
            isolation=settings.isolation,
            default_memory=settings.default_memory,
            unmet=settings.unmet,
            mask=os.environ.get(VISIBLE_DEVICES),
            order=os.environ.get(DEVICE_ORDER),
            deselected=self.deselected,
        )
        own = tuple(backend for name, backend in registered().items() if backend is not BACKENDS.get(name))
        tests = tuple(_test_of(item, root) for item in session.items)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines_of(Suite(tests, told, own, tuple(self.uncollected))))
        except OSError as error:
            raise pytest.UsageError(
                f"--cuda-plan {self.path}: {error.strerror}: name a file that can be written"
            ) from None


def _test_of(item: pytest.Item, root: Path) -> SuiteTest:
    file = Path(os.path.relpath(item.path, root)).as_posix()
    plan = item.stash.get(PLAN, None)
    skips = compat.own_skip(item)
    if plan is None:
        return SuiteTest(item.nodeid, file, skips=skips)
    return SuiteTest(item.nodeid, file, plan.requirement, plan.sources, plan.cell.id, skips)


def _why(report: pytest.CollectReport) -> str:
    """The reason of a skip, or the last line of an error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr or "").strip().splitlines()
    return lines[-1].removeprefix("E").strip()[:300] if lines else ""
