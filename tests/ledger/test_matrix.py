"""A matrix: every test in one job, of a runner that can run it, in jobs of about one length, whatever the order."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cudaenv.host.software import Software, TorchBuild
from pytest_cudaenv.ledger.contract import Runner, read_runners
from pytest_cudaenv.ledger.durations import UNKNOWN_SECONDS, Durations
from pytest_cudaenv.ledger.matrix import Matrix, cheapest, matrix_of, nearest
from pytest_cudaenv.ledger.read import read_lines
from pytest_cudaenv.ledger.results import Results
from pytest_cudaenv.ledger.runners import RunnerHost
from pytest_cudaenv.ledger.suite import SuiteTest
from pytest_cudaenv.requirements.markers import (
    requires_attn_backend,
    requires_bf16,
    requires_cuda,
    requires_fp8,
    requires_hub_kernels,
    requires_package,
)
from pytest_cudaenv.requirements.requirement import Requirement, with_cell

TORCH = Software({"torch": "2.13.0"}, torch=TorchBuild("2.13.0+cpu"))

PROFILES = """
    cpu: cost=0.1 label=ubuntu-latest
    t4: devices=t4 cost=0.5
    h100: devices=h100 package=flash-attn-3 cost=4
    h100x2: devices=h100:2 cost=8 package=peft>=0.18
"""


def hosts(lines: str = PROFILES, software: Software = TORCH) -> dict[str, RunnerHost]:
    return {name: RunnerHost(runner, software) for name, runner in read_runners(lines.splitlines()).items()}


ALL = hosts()

CPU_CELL = with_cell(Requirement(), ("eager",), "float32")
FA3_CELL = with_cell(Requirement(), ("flash_attention_3",), "bfloat16")

NEEDS = [
    Requirement(), requires_cuda(), requires_cuda(devices=2), requires_cuda(devices=4), requires_bf16(),
    requires_fp8(), requires_package("peft>=0.18"), CPU_CELL, FA3_CELL, requires_cuda(memory="60GB"),
]  # fmt: skip


# Who runs what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "runner"),
    [
        (Requirement(), "cpu"),
        (requires_cuda(), "t4"),
        (requires_cuda(memory="60GB"), "h100"),
        (requires_cuda(capability=">=9.0"), "h100"),
        (requires_bf16(), "h100"),
        (requires_fp8().merged(requires_cuda(devices=2)), "h100x2"),
        (requires_cuda(devices=2), "h100x2"),
        (requires_cuda(devices=4), None),
        (FA3_CELL, "h100"),
        # A cell would pass on the CPU, which says nothing of a device.
        (CPU_CELL, "t4"),
        (requires_package("peft>=0.18"), "h100x2"),
        (requires_package("peft>=0.19"), None),
        (requires_package("no-such-package"), None),
    ],
)
def test_the_cheapest_that_can(requirement: Requirement, runner: str | None) -> None:
    found = cheapest(requirement, ALL.values())
    assert (found and found.name) == runner


def test_a_cell_runs_on_the_cpu_where_no_runner_has_a_device_and_it_is_said() -> None:
    cell, plain = SuiteTest("t.py::cell", "t.py", CPU_CELL), SuiteTest("t.py::plain", "t.py")
    found = matrix_of([cell, plain], [ALL["cpu"]], lambda *_: 1.0)
    assert [job.tests for job in found.jobs] == [(cell, plain)]
    assert found.cpu_only == (cell,)
    assert matrix_of([cell, plain], list(ALL.values()), lambda *_: 1.0).cpu_only == ()


def test_equal_prices_go_to_fewer_devices_and_then_by_name() -> None:
    same = hosts("b: devices=h100\n a: devices=h100\n two: devices=h100:2\n cpu:")
    for order in (list(same.values()), list(same.values())[::-1]):
        assert cheapest(requires_cuda(), order) is same["a"]
        assert cheapest(Requirement(), order) is same["cpu"]


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        (requires_cuda(devices=4), "h100x2"),
        (requires_package("peft>=0.19"), "cpu"),
        # h100 lacks a device, h100x2 a package: software is sooner there.
        (requires_cuda(devices=2).merged(requires_attn_backend("fa3")), "h100x2"),
    ],
)
def test_the_nearest_lacks_the_least(requirement: Requirement, name: str) -> None:
    assert nearest(requirement, ALL.values()).name == name


def test_what_a_profile_promises_is_there_and_hardware_is_no_promise() -> None:
    promising = hosts("a: devices=a100 requires=flash_attention_2 requires=hub_kernels requires=fp8")["a"]
    silent = hosts("a: devices=a100")["a"]
    for requirement in (requires_attn_backend("fa2"), requires_hub_kernels()):
        assert silent.lacks(requirement)
        assert not promising.lacks(requirement)
    assert [reason.code for reason in promising.lacks(requires_fp8())] == ["dtype-native"]
    assert [reason.code for reason in promising.lacks(requires_attn_backend("fa3"))][:1] == ["attn-missing"]


@pytest.mark.parametrize(
    ("package", "needed", "runs"),
    [
        ("peft", "peft>=0.18", True),
        ("peft>=0.18", "peft>=0.18", True),
        ("peft>=0.18", "peft>=0.19", False),
        ("peft==0.18.*", "peft>=0.18,<0.19", True),
        ("peft~=0.18.2", "peft>=0.18.2", True),
        ("peft>0.18", "peft>0.18", True),
        ("peft>=0.18,>=0.20", "peft>=0.20", True),
        ("peft<1", "peft>=0.1", False),
        ("torch==2.11.0+cu126", "torch==2.11.0", True),
        ("peft | unsloth", "peft | unsloth", True),
        ("peft | unsloth", "peft", False),
    ],
)
def test_packages_are_there_in_the_oldest_version_that_the_profile_allows(
    package: str, needed: str, runs: bool
) -> None:
    runner = RunnerHost(Runner("r", packages=(package,)), TORCH)
    assert (not runner.lacks(requires_package(needed))) is runs


def test_a_runner_without_gpu_needs_no_cuda_build_and_one_with_has_it() -> None:
    built = Software({"torch": "2.13.0"}, torch=TorchBuild("2.13.0+cu130", cuda="13.0"))
    assert not RunnerHost(Runner("cpu"), built).lacks(CPU_CELL)
    assert not ALL["h100"].lacks(requires_cuda())


# Jobs ------------------------------------------------------------------------------------------------------------

TESTS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from(NEEDS), st.sampled_from([None, "a", "b"]),
        st.floats(0, 100, allow_subnormal=False),
    ),
    max_size=40,
)  # fmt: skip

SHARDS = st.dictionaries(st.sampled_from(list(ALL)), st.integers(1, 6))


def suite(drawn: list[tuple[int, Requirement, str | None, float]]) -> tuple[list[SuiteTest], dict[str, float]]:
    tests = [
        SuiteTest(f"test_{file}.py::test[{n}]", f"test_{file}.py", needed, cell=cell)
        for n, (file, needed, cell, _) in enumerate(drawn)
    ]
    return tests, {test.id: seconds for test, (*_, seconds) in zip(tests, drawn, strict=True)}


def partition(found: Matrix) -> set[tuple[str, frozenset[str]]]:
    return {(job.name, frozenset(test.id for test in job.tests)) for job in found.jobs}


@settings(deadline=None, max_examples=60)
@given(TESTS, SHARDS, st.none() | st.floats(1, 300), st.randoms(use_true_random=False))
def test_every_test_has_one_job_that_can_run_it_whatever_the_order(
    drawn: list[tuple[int, Requirement, str | None, float]], shards: dict[str, int], limit: float | None, random: object
) -> None:
    tests, seconds = suite(drawn)
    runners = list(ALL.values())
    found = matrix_of(tests, runners, lambda test, _: seconds[test.id], shards=shards, max_seconds=limit)
    told = Counter(test.id for job in found.jobs for test in job.tests) + Counter(one.test.id for one in found.none)
    assert told == Counter(test.id for test in tests)
    for job in found.jobs:
        assert job.tests
        assert not [test for test in job.tests if ALL[job.runner].lacks(test.requirement)]
        assert job.seconds == math.fsum(seconds[test.id] for test in job.tests)
        assert [tests.index(test) for test in job.tests] == sorted(tests.index(test) for test in job.tests)
    for one in found.none:
        assert one.reasons
        assert all(runner.lacks(one.test.requirement) for runner in runners)
    for name, count in Counter(job.runner for job in found.jobs).items():
        assert count <= shards.get(name, math.inf if limit is not None else 1)
    names = [job.name for job in found.jobs]
    assert len(set(names)) == len(names)

    random.shuffle(tests)  # type: ignore[attr-defined]
    random.shuffle(runners)  # type: ignore[attr-defined]
    again = matrix_of(tests, runners, lambda test, _: seconds[test.id], shards=shards, max_seconds=limit)
    assert partition(again) == partition(found)
    assert {one.test.id for one in again.none} == {one.test.id for one in found.none}


PLAIN = TESTS.map(lambda drawn: [(file, Requirement(), cell, seconds) for file, _, cell, seconds in drawn])


@settings(deadline=None, max_examples=100)
@given(PLAIN, st.integers(1, 8))
def test_jobs_are_about_as_long_as_each_other(
    drawn: list[tuple[int, Requirement, str | None, float]], count: int
) -> None:
    """No job is longer than twice the larger of an equal share and the longest test."""
    tests, seconds = suite(drawn)
    found = matrix_of(tests, [ALL["cpu"]], lambda test, _: seconds[test.id], shards={"cpu": count})
    share = max([math.fsum(seconds.values()) / count, *seconds.values()])
    for job in found.jobs:
        assert job.seconds <= 2 * share * (1 + 1e-9) + 1e-9
    files = Counter(file for job in found.jobs for file in {test.file for test in job.tests})
    for file, jobs in files.items():
        total = math.fsum(seconds[test.id] for test in tests if test.file == file)
        assert jobs == 1 or total > math.fsum(seconds.values()) / count, (
            "a file that is no longer than a share stays whole"
        )


@settings(deadline=None, max_examples=100)
@given(PLAIN, st.floats(1, 300))
def test_no_job_is_longer_than_the_limit_or_than_one_test(
    drawn: list[tuple[int, Requirement, str | None, float]], limit: float
) -> None:
    tests, seconds = suite(drawn)
    found = matrix_of(tests, [ALL["cpu"]], lambda test, _: seconds[test.id], max_seconds=limit)
    for job in found.jobs:
        assert job.seconds <= max(limit, *(seconds[test.id] for test in tests)) * (1 + 1e-6)
    total = math.fsum(seconds.values())
    # Two jobs that fit into one are one: so each pair is longer than the limit, but for what rounding takes.
    assert len(found.jobs) <= max(1, 2 * total / limit + 2)


def test_files_stay_together_and_cells_in_what_is_divided() -> None:
    tests = [SuiteTest(f"a.py::t[{c}-{n}]", "a.py", cell=c) for n in range(4) for c in ("eager", "sdpa")]
    tests += [SuiteTest(f"b.py::t[{n}]", "b.py") for n in range(2)]
    found = matrix_of(tests, [ALL["cpu"]], lambda *_: 60.0, max_seconds=240)
    held = [{(test.file, test.cell) for test in job.tests} for job in found.jobs]
    assert held == [{("a.py", "eager")}, {("a.py", "sdpa")}, {("b.py", None)}]


def test_no_runner_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="needs a runner"):
        matrix_of([], [], lambda *_: 1.0)
    assert matrix_of([], [ALL["cpu"]], lambda *_: 1.0) == Matrix()


# Durations -------------------------------------------------------------------------------------------------------


def results(*tests: dict[str, object], runner: str | None = None) -> Results:
    host = {"devices": [], "visible": []}
    head: dict[str, object] = {"kind": "run", "ledger": 1, "plugin": "1", "started": "2026-01-01", "host": host}
    head |= {"software": {"python": "3", "pytest": "9", "distributions": {}}} | ({"runner": runner} if runner else {})
    lines = [head, *({"kind": "test", "outcome": "passed", "ran_on": "CPU", **test} for test in tests)]
    return read_lines([json.dumps(line).encode() + b"\n" for line in lines], "ledger.json").results


def test_the_most_telling_measurement_counts() -> None:
    durations = Durations()
    durations.add(results({"id": "a", "seconds": {"setup": 1, "call": 7.5}}, runner="cpu"))
    durations.add(results({"id": "a", "ran_on": "NVIDIA H200", "seconds": {"call": 2}}, runner="h200"))
    durations.add(results({"id": "a", "ran_on": "NVIDIA H200", "seconds": {"call": 4}}, runner="h200x2"))
    assert durations.seconds("a", "h200x2", "NVIDIA H200") == 4
    assert durations.seconds("a", "new", "NVIDIA H200") == 3
    assert durations.seconds("a", "cpu", "CPU") == 8.5
    assert durations.seconds("a", "t4", "Tesla T4") == pytest.approx(14.5 / 3)
    assert (durations.knows("a"), durations.knows("b")) == (True, False)


def test_what_is_not_known_takes_the_median_and_skips_tell_nothing() -> None:
    assert Durations().seconds("x", "r", "CPU") == UNKNOWN_SECONDS
    durations = Durations()
    for number, seconds in enumerate((1, 2, 30)):
        durations.add(results({"id": f"t{number}", "seconds": {"call": seconds}}))
    durations.add(results({"id": "s", "outcome": "skipped", "ran_on": None, "seconds": {"setup": 0}}))
    assert durations.seconds("s", "r", "CPU") == 2
    durations.add(results({"id": "t4", "seconds": {"call": 40}}))
    assert durations.seconds("s", "r", "CPU") == 16
    assert Durations(default=9.0).seconds("x", "r", "CPU") == 9.0
