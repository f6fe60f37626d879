"""A CI matrix: each test to the cheapest runner that can run it, and the tests of a runner over jobs. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaenv.ledger.runners import RunnerHost
from pytest_cudaenv.ledger.suite import SuiteTest
from pytest_cudaenv.requirements.reason import Reason
from pytest_cudaenv.requirements.requirement import Requirement

Seconds = Callable[[SuiteTest, RunnerHost], float]


@dataclass(frozen=True)
class Job:
    """Tests that one machine runs."""

    runner: str
    number: int
    """From 1."""
    tests: tuple[SuiteTest, ...]
    """As they were collected."""
    seconds: float
    """Of its tests, one after the other."""

    @property
    def name(self) -> str:
        """`h100x2-1`."""
        return f"{self.runner}-{self.number}"


@dataclass(frozen=True)
class NoRunner:
    """A test that no runner can run."""

    test: SuiteTest
    nearest: str
    """The runner that lacks the least."""
    reasons: tuple[Reason, ...]
    """What that one lacks."""


@dataclass(frozen=True)
class Matrix:
    """Where each test of a suite runs."""

    jobs: tuple[Job, ...] = ()
    none: tuple[NoRunner, ...] = ()
    cpu_only: tuple[SuiteTest, ...] = ()
    """Tests that take a device where there is one, and that no runner with a device can run."""


def matrix_of(
    tests: Sequence[SuiteTest],
    runners: Sequence[RunnerHost],
    seconds: Seconds,
    *,
    shards: Mapping[str, int] | None = None,
    max_seconds: float | None = None,
) -> Matrix:
    """Every test to exactly one job of the cheapest runner that can run it, whatever their order.

    `shards` says how many jobs a runner gets; for one that it does not name, `max_seconds` of tests fill a job, and
    without either it gets one. Tests of a file stay together, unless they alone are more than a job's share.
    Raises ValueError where there is no runner.
    """
    if not runners:
        raise ValueError("a matrix needs a runner")
    chosen: dict[Requirement, RunnerHost | None] = {}
    of_runner: dict[str, list[SuiteTest]] = {runner.name: [] for runner in runners}
    none: list[NoRunner] = []
    cpu_only: list[SuiteTest] = []
    for test in tests:
        requirement = test.requirement
        if requirement not in chosen:
            chosen[requirement] = cheapest(requirement, runners)
        runner = chosen[requirement]
        if runner is None:
            near = nearest(requirement, runners)
            none.append(NoRunner(test, near.name, near.lacks(requirement)))
            continue
        of_runner[runner.name].append(test)
        if requirement.asks_for_device and runner.runner.devices is None:
            cpu_only.append(test)
    jobs: list[Job] = []
    for runner in runners:
        jobs += _jobs(runner, of_runner[runner.name], seconds, (shards or {}).get(runner.name), max_seconds)
    return Matrix(tuple(jobs), tuple(none), tuple(cpu_only))


def cheapest(requirement: Requirement, runners: Iterable[RunnerHost]) -> RunnerHost | None:
    """The runner for a test; None where no runner can run it.

    A test that takes a device where there is one goes to a runner that has one: passing on the CPU proves nothing of
    a device. Of equal prices fewer devices win, then the name.
    """
    able = [runner for runner in runners if not runner.lacks(requirement)]
    if requirement.asks_for_device:
        able = [runner for runner in able if runner.runner.devices is not None] or able
    return min(able, key=_price, default=None)


def nearest(requirement: Requirement, runners: Iterable[RunnerHost]) -> RunnerHost:
    """The runner that lacks the least for a test, the cheapest of those; of too few devices the most are nearest."""

    def distance(runner: RunnerHost) -> tuple[int, int]:
        return (len(runner.lacks(requirement)), max(0, requirement.device_count - len(runner.host.devices)))

    return min(runners, key=lambda runner: (*distance(runner), *_price(runner)))


def _price(runner: RunnerHost) -> tuple[float, int, str]:
    return (runner.runner.cost, len(runner.host.devices), runner.name)


@dataclass(frozen=True)
class _Unit:
    """Tests that stay together."""

    tests: tuple[SuiteTest, ...]
    seconds: float

    @property
    def key(self) -> tuple[float, str]:
        """The longest first; the id makes it the same in any order."""
        return (-self.seconds, min(test.id for test in self.tests))


def _jobs(
    runner: RunnerHost, tests: Sequence[SuiteTest], seconds: Seconds, shards: int | None, max_seconds: float | None
) -> list[Job]:
    if not tests:
        return []
    time = {test.id: seconds(test, runner) for test in tests}
    # fsum: the same in any order.
    total = math.fsum(time.values())
    if shards is not None:
        loads = _balanced(_units(tests, time, total / shards), shards)
    elif max_seconds is not None:
        loads = _within(_units(tests, time, max_seconds), total, max_seconds)
    else:
        loads = [_units(tests, time, math.inf)]
    place = {test.id: n for n, test in enumerate(tests)}
    jobs = [sorted((t for unit in load for t in unit.tests), key=lambda t: place[t.id]) for load in loads if load]
    return [
        Job(runner.name, number, tuple(held), math.fsum(time[t.id] for t in held))
        for number, held in enumerate(jobs, start=1)
    ]


def _units(tests: Iterable[SuiteTest], time: Mapping[str, float], limit: float) -> list[_Unit]:
    """The tests by file; those of a file that is longer than the limit in pieces of at most that, cell by cell."""
    by_file: dict[str, list[SuiteTest]] = {}
    for test in tests:
        by_file.setdefault(test.file, []).append(test)
    units: list[_Unit] = []
    for held in by_file.values():
        whole = _unit(held, time)
        if whole.seconds <= limit:
            units.append(whole)
            continue
        piece: list[SuiteTest] = []
        taken = 0.0
        for test in sorted(held, key=lambda t: (t.cell or "", t.id)):
            if piece and taken + time[test.id] > limit:
                units.append(_unit(piece, time))
                piece, taken = [], 0.0
            piece.append(test)
            taken += time[test.id]
        units.append(_unit(piece, time))
    return units


def _unit(tests: Sequence[SuiteTest], time: Mapping[str, float]) -> _Unit:
    return _Unit(tuple(tests), math.fsum(time[test.id] for test in tests))


def _balanced(units: Iterable[_Unit], count: int) -> list[list[_Unit]]:
    """The units over so many jobs, the longest first, each to the job that has least: the LPT rule.

    No job is longer than an equal share and the longest unit together.
    """
    loads: list[list[_Unit]] = [[] for _ in range(count)]
    heap = [(0.0, 0, place) for place in range(count)]
    for unit in sorted(units, key=lambda u: u.key):
        load, held, place = heapq.heappop(heap)
        loads[place].append(unit)
        heapq.heappush(heap, (load + unit.seconds, held + len(unit.tests), place))
    return loads


def _within(units: Sequence[_Unit], total: float, limit: float) -> list[list[_Unit]]:
    """As few jobs as the LPT rule can do with, none longer than the limit, or than a test that alone is longer."""
    limit = max(limit, *(unit.seconds for unit in units)) * (1 + 1e-9)
    count = max(1, math.ceil(total / limit))
    while True:
        loads = _balanced(units, count)
        if count >= len(units) or max(math.fsum(u.seconds for u in load) for load in loads) <= limit:
            return loads
        count += 1
