"""Every test is run once, what belongs together is, and the run takes little longer than it must."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cudaenv.grants.demand import Demand
from pytest_cudaenv.grants.scheduling import Schedule, Work, lower_bound
from tests.grants.runs import Ran, Run

GB = 10**9
DEVICES = tuple(f"GPU-{n}" for n in range(8))


def needs(count: int, memory: int | None = None, devices: Sequence[str] = DEVICES) -> Demand | None:
    return Demand(tuple(devices), count, memory, dict.fromkeys(devices, 80 * GB)) if count else None


def known(works: Sequence[Work], seconds: Sequence[float]) -> list[Work]:
    return [replace(work, seconds=one) for work, one in zip(works, seconds, strict=True)]


def groups_of_workers(works: Sequence[Work], ran: Ran) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for _, worker, test in ran.started:
        found.setdefault(works[test].group, set()).add(worker)
    return found


TIMES = st.floats(0.001, 60.0)

WORKS = st.lists(
    st.builds(
        lambda module, group, count, memory, last, setup: Work(
            group or module,
            group is not None,
            needs(count, memory),
            last,
            setup if last is not None else 0.0,
        ),
        st.sampled_from(["a.py", "b.py", "c.py"]),
        st.sampled_from([None, None, None, "g", "h"]),
        st.sampled_from([0, 0, 1, 1, 2, 3, 8]),
        st.sampled_from([None, None, 10 * GB, 50 * GB]),
        st.one_of(st.none(), TIMES),
        st.floats(0, 5),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=100)
@given(WORKS, st.integers(1, 12), st.data())
def test_every_test_is_run_once_and_groups_stay_together(works: list[Work], workers: int, data: st.DataObject) -> None:
    seconds = [data.draw(TIMES) for _ in works]
    run = Run(works, seconds, workers)
    ran = run.to_the_end()
    assert sorted(test for _, _, test in ran.started) == list(range(len(works)))
    assert set(ran.ended) == set(range(len(works)))
    assert run.told_to_end == set(run.queue)
    assert not run.schedule.unsent
    assert not ran.idle_with_devices
    for work in works:
        if work.together:
            assert len(groups_of_workers(works, ran)[work.group]) == 1


@settings(deadline=None, max_examples=60)
@given(WORKS, st.integers(1, 6), st.lists(st.floats(0, 100), max_size=6), st.data())
def test_a_killed_worker_costs_the_test_that_it_ran(
    works: list[Work], workers: int, kills: list[float], data: st.DataObject
) -> None:
    seconds = [data.draw(TIMES) for _ in works]
    ran = Run(works, seconds, workers, kills).to_the_end()
    assert sorted(test for _, _, test in ran.started) == list(range(len(works)))
    assert sorted([*ran.ended, *ran.lost]) == list(range(len(works)))


@settings(deadline=None, max_examples=60)
@given(WORKS, st.integers(1, 8), st.data())
def test_a_run_never_takes_longer_than_one_test_after_the_other(
    works: list[Work], workers: int, data: st.DataObject
) -> None:
    """Which a request that nobody ever served, or a device that nobody gave back, would."""
    seconds = [data.draw(TIMES) for _ in works]
    ran = Run(works, seconds, workers).to_the_end()
    assert ran.makespan <= sum(seconds) + 1e-6


def suite(seed: int, modules: int, counts: Sequence[int]) -> tuple[list[Work], list[float]]:
    """200 tests whose durations are log-normal."""
    rng = random.Random(seed)
    works = [Work(f"test_{n % modules}.py", demand=needs(rng.choice(counts))) for n in range(200)]
    return works, [rng.lognormvariate(0, 1) for _ in works]


@pytest.mark.parametrize("modules", [1, 10, 40])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 2, 2, 4), (1, 2, 4), (1,), (0,)], ids=str)
def test_known_durations_give_a_run_that_is_little_longer_than_it_must_be(
    counts: tuple[int, ...], modules: int
) -> None:
    ratios = []
    for seed in range(3):
        works, seconds = suite(seed, modules, counts)
        works = known(works, seconds)
        ratios.append(Run(works, seconds, 8).to_the_end().makespan / lower_bound(works, 8))
    assert sum(ratios) / len(ratios) <= 1.1
    assert max(ratios) <= 1.15
    assert min(ratios) >= 1  # it is a lower bound


def test_unknown_durations_give_a_run_that_is_shorter_than_with_single_workers_for_devices() -> None:
    for seed in range(3):
        works, seconds = suite(seed, 10, (1, 2, 4))
        assert Run(works, seconds, 8).to_the_end().makespan / lower_bound(works, 8, seconds) <= 1.15


def test_the_long_test_is_not_the_last_to_start() -> None:
    works = [Work("a.py", demand=needs(1)) for _ in range(100)]
    seconds = [1.0] * 99 + [13.0]
    ran = Run(known(works, seconds), seconds, 8).to_the_end()
    assert ran.makespan <= 1.1 * lower_bound(works, 8, seconds)


def test_the_largest_requests_are_first() -> None:
    works = [Work(f"{n}.py", demand=needs(count)) for n, count in enumerate([1, 1, 2, 1, 8, 1, 2, 4, 4])]
    ran = Run(known(works, [1.0] * 9), [1.0] * 9, 8).to_the_end()
    order = [works[test].demand.count for _, _, test in ran.started]  # type: ignore[union-attr]
    assert order == sorted(order, reverse=True)


def test_a_module_stays_with_one_worker_where_there_are_enough() -> None:
    works = [Work(f"{n // 20}.py", demand=needs(1)) for n in range(8 * 20)]
    seconds = [1.0 + n % 3 for n in range(len(works))]
    ran = Run(known(works, seconds), seconds, 8).to_the_end()
    workers = groups_of_workers(works, ran)
    # A test or two are taken over at the end.
    assert sum(len(found) for found in workers.values()) <= 8 + 4
    order = [test for test in ran.by_worker()[0] if works[test].group == works[ran.by_worker()[0][0]].group]
    assert order == sorted(order)


def test_a_module_that_is_long_is_divided() -> None:
    works = [Work("a.py", demand=needs(1)) for _ in range(80)]
    ran = Run(works, [1.0] * 80, 8).to_the_end()
    assert len(ran.by_worker()) == 8
    assert ran.makespan == pytest.approx(10.0, abs=1.0)


def test_a_module_is_not_divided_where_its_fixtures_take_longer_than_its_tests() -> None:
    """The first test of each module set up a model, in 60 of its 61 seconds."""
    works = [
        Work(f"{module}.py", demand=needs(1), seconds=1.0 + 60.0 * (n == 0), setup=60.0 * (n == 0))
        for module in range(2)
        for n in range(20)
    ]
    ran = Run(works, [work.seconds or 0 for work in works], 8).to_the_end()
    assert all(len(found) == 1 for found in groups_of_workers(works, ran).values())


def test_cpu_tests_fill_the_gaps() -> None:
    """One device, four workers: its tests follow each other without a gap, and the CPU's are run beside them."""
    works = [Work("gpu.py", demand=needs(1, devices=DEVICES[:1])) for _ in range(10)]
    works += [Work(f"cpu_{n % 6}.py") for n in range(30)]
    ran = Run(known(works, [1.0] * 40), [1.0] * 40, 4).to_the_end()
    assert ran.makespan == pytest.approx(10.0)
    on_device = [worker for _, worker, test in ran.started if test < 10]
    assert len(set(on_device)) == 1  # who had the device kept it


def test_workers_beyond_the_devices_hold_none_and_wait_for_nothing() -> None:
    """A worker that waited for a device would have a test in its hands that another could have run."""
    works = [Work(f"{n}.py", demand=needs(1, devices=DEVICES[:2])) for n in range(20)]
    run = Run(works, [1.0] * 20, 8)
    assert sum(bool(queue) for queue in run.queue.values()) == 2
    assert run.to_the_end().makespan == pytest.approx(10.0)


def test_budgets_share_a_device() -> None:
    works = [Work("a.py", demand=needs(1, 9 * GB, DEVICES[:1])) for _ in range(64)]
    assert lower_bound(known(works, [1.0] * 64), 8) == pytest.approx(8.0)
    assert Run(works, [1.0] * 64, 8).to_the_end().makespan == pytest.approx(8.0)


def test_a_worker_that_comes_late_is_given_its_share() -> None:
    works = [Work("a.py") for _ in range(40)]
    schedule = Schedule[str](works, 1)
    schedule.add("first")
    assert len(schedule.give("first", 0.0).tests) == 2
    schedule.add("late")
    assert len(schedule.give("late", 0.0).tests) == 2


def test_short_tests_go_in_threes() -> None:
    """A message for each would take longer than they do."""
    works = [Work("a.py", seconds=0.01) for _ in range(100)]
    schedule = Schedule[str](works, 1)
    schedule.add("one")
    assert 10 < len(schedule.give("one", 0.0).tests) < 100


def test_a_worker_that_dies_idle_has_lost_nothing() -> None:
    works = [Work("a.py", demand=needs(1, devices=DEVICES[:1])) for _ in range(4)]
    schedule = Schedule[str](works, 2)
    for worker in ("busy", "idle"):
        schedule.add(worker)
        schedule.give(worker, 0.0)
    assert schedule.remove("idle", 0.5) is None
    assert schedule.remove("busy", 0.5) == 0
    schedule.add("new")
    assert schedule.give("new", 1.0).tests == [1, 2]


def test_a_test_can_be_put_back() -> None:
    schedule = Schedule[str]([Work("a.py")], 1)
    schedule.add("one")
    assert schedule.give("one", 0.0) == ([0], True)
    assert schedule.remove("one", 0.5) == 0
    schedule.put_back(0)
    schedule.add("two")
    assert schedule.give("two", 1.0) == ([0], True)


def test_nothing_to_run() -> None:
    schedule = Schedule[str]([], 2)
    schedule.add("one")
    assert schedule.give("one", 0.0) == ([], True)
    assert lower_bound([], 4) == 0
