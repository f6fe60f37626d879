"""`--dist cuda`: xdist's tests, spread over its workers by what they lease and how long they took last.

xdist calls this; what is decided stands in `grants.scheduling`. Its hooks and what a scheduler is to it:
https://github.com/pytest-dev/pytest-xdist/tree/v3.8.0/src/xdist (newhooks.py, scheduler/protocol.py, dsession.py)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xdist.plugin
from xdist.scheduler import LoadScheduling

from pytest_cudaenv.grants.scheduling import Schedule, Work
from pytest_cudaenv.mailbox import FOLDER, heard
from pytest_cudaenv.names import DIST

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

NO_LEASES = (
    "[no-leases] --dist cuda: device tests run in the workers' own processes, all on the first devices; "
    "leave out --cuda-isolation off"
)

DURATIONS = "cudaenv/durations"
"""Key in pytest's cache: seconds of each test, in all and in setting up, by node id."""

REMEMBERED = 50_000
"""Tests whose seconds are kept, those that ran last."""


class DistCuda:
    """A plugin of xdist's controller."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self.folder: Path | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        # A worker for each core, as xdist counts them, but enough to have a test on each device and one beside.
        if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or config.getvalue("dist") != DIST:
            return None
        cores: int = xdist.plugin.pytest_xdist_auto_num_workers(config)
        return max(cores, len(self.session.reading.devices) + 1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> CudaScheduling | None:
        if config.getvalue("dist") != DIST:
            return None
        durations = Durations(config)
        config.pluginmanager.register(durations, "cudaenv-durations")
        return CudaScheduling(config, log, self, durations)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="cudaenv-"))
        node.workerinput[FOLDER] = str(self.folder)

    def pytest_unconfigure(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def works(self, ids: list[str], durations: Durations) -> list[Work]:
        """The tests that the workers have collected, in that order."""
        assert self.folder is not None
        works, leased = heard(self.folder, ids, durations.last)
        if not leased:
            self.session.warn(NO_LEASES)
        return works


class Durations:
    """How long tests take: heard from their reports, and kept in pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self.cache: Any = getattr(config, "cache", None)  # none with -p no:cacheprovider
        self.last: dict[str, tuple[float, float]] = {}
        self.now: dict[str, tuple[float, float]] = {}
        kept = self.cache.get(DURATIONS, {}) if self.cache is not None else {}
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # not as it was written
            self.last = {nodeid: (float(seconds), float(setup)) for nodeid, (seconds, setup) in kept.items()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, setup = self.now.get(report.nodeid, (0.0, 0.0))
        if report.when == "setup":
            seconds, setup = 0.0, report.duration  # also of a test that is run again
        self.now[report.nodeid] = (seconds + report.duration, setup)

    def pytest_sessionfinish(self) -> None:
        if self.cache is not None and self.now:
            kept = {nodeid: times for nodeid, times in self.last.items() if nodeid not in self.now} | self.now
            rounded = {nodeid: [round(one, 4) for one in times] for nodeid, times in kept.items()}
            self.cache.set(DURATIONS, dict(list(rounded.items())[-REMEMBERED:]))


class CudaScheduling(LoadScheduling):  # type: ignore[misc]
    """xdist's scheduler that asks `Schedule`. What the tests are, and who has which of them, is LoadScheduling's."""

    collection: list[str] | None

    def __init__(self, config: pytest.Config, log: Any, plugin: DistCuda, durations: Durations) -> None:
        super().__init__(config, log)
        self.plugin, self.durations = plugin, durations
        self.tests: Schedule[Any] | None = None

    @property
    def tests_finished(self) -> bool:
        if not self.collection_is_completed or (self.tests is not None and self.tests.unsent):
            return False
        return all(node.shutting_down or len(tests) < 2 for node, tests in self.node2pending.items())

    @property
    def has_pending(self) -> bool:
        return self.tests is not None and (self.tests.unsent or any(self.node2pending.values()))

    def schedule(self) -> None:
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = next(iter(self.node2collection.values()))
            self.tests = Schedule(self.plugin.works(self.collection, self.durations), len(self.nodes))
        assert self.tests is not None
        for node in self.nodes:
            if node not in self.node2collection:
                node.shutdown()  # it took a dead worker's place, and collected something else
            elif node not in self.tests.workers:
                self.tests.add(node)
        self.serve(self.nodes)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        assert self.tests is not None
        assert self.collection is not None
        self.node2pending[node].remove(item_index)
        # Without the wait for devices, which is part of `duration`.
        seconds, _ = self.durations.now.get(self.collection[item_index], (duration, 0.0))
        self.tests.complete(node, item_index, time.monotonic(), seconds)
        self.serve([node])
        self.serve([other for other, pending in self.node2pending.items() if not pending])

    def mark_test_pending(self, item: str) -> None:
        assert self.tests is not None
        assert self.collection is not None
        self.tests.put_back(self.collection.index(item))
        self.serve(self.nodes)

    def remove_node(self, node: Any) -> str | None:
        pending = self.node2pending.pop(node)
        if self.tests is None or node not in self.tests.workers:
            assert not pending
            return None
        begun = self.tests.remove(node, time.monotonic())
        self.serve(self.nodes)
        return None if begun is None or self.collection is None else self.collection[begun]

    def serve(self, nodes: list[Any]) -> None:
        """Send workers what they are to run next, and the end to those for which there is nothing further."""
        assert self.tests is not None
        for node in nodes:
            if node.shutting_down or node not in self.tests.workers:
                continue
            tests, ends = self.tests.give(node, time.monotonic())
            if tests:
                self.node2pending[node] += tests
                node.send_runtest_some(tests)
            if ends:
                node.shutdown()
            elif not self.node2pending[node]:
                return  # nor is there anything for the others that have nothing to do
