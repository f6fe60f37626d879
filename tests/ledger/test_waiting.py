"""When a summary tells of waiting for devices, and what it advises."""

from __future__ import annotations

import pytest

from pytest_cudaenv.ledger.summary import Summary


def summary(*waits: tuple[float, bool, str]) -> Summary:
    found = Summary()
    for number, (seconds, whole, worker) in enumerate(waits):
        record = {"cell": None, "ran_on": "NVIDIA H200"}
        waited = {"seconds": seconds, "whole": whole, "worker": worker}
        found.add(f"test_{number}", "setup", "passed", {**record, "waited": waited})
        found.add(f"test_{number}", "call", "passed", record)
    return found


@pytest.mark.parametrize("waits", [(), [(4, True, "gw0")], [(60, True, "gw0"), (9, False, "gw1")]])
def test_short_waits_are_not_worth_a_line(waits: list[tuple[float, bool, str]]) -> None:
    assert summary(*waits).waiting.lines(elapsed=600.0) == []


def test_long_ones_say_how_long_and_what_to_declare() -> None:
    waits = [(100.0, True, "gw0"), (20.4, True, "gw1"), (30.0, False, "gw1")]
    assert summary(*waits).waiting.lines(elapsed=300.0) == [
        "waited for devices: 150 s in 3 tests, 25 % of the time of 2 workers",
        "       2 of them declare no memory= and take devices whole: "
        "declare it, or set cuda_default_memory, so that more share a device.",
    ]


def test_where_all_declare_memory_the_advice_is_another() -> None:
    first, second = summary((30.0, False, "")).waiting.lines(elapsed=60.0)
    assert first == "waited for devices: 30 s in 1 test, 50 % of the run"
    assert "less memory=" in second


def test_a_test_that_waited_twice_is_one_test() -> None:
    found = Summary()
    for _ in range(2):
        found.add("test_a", "setup", "rerun", {"waited": {"seconds": 10.0, "whole": False, "worker": ""}})
    assert found.waiting.lines(elapsed=40.0)[0] == "waited for devices: 20 s in 1 test, 50 % of the run"
