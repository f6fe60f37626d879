"""The benchmark's own check of who had which device can fail."""

from __future__ import annotations

import pytest

from benchmarks.scheduling import Event, Violation, check, makespan, suite

TOTAL = {"a": 80, "b": 80}


@pytest.mark.parametrize(
    "events",
    [
        [Event(0, 2, ("a",), None), Event(1, 3, ("a",), None)],
        [Event(0, 2, ("a", "b"), None), Event(1, 3, ("b",), 10)],
        [Event(0, 3, ("a",), 40), Event(1, 3, ("a",), 30), Event(2, 3, ("a",), 20)],
        [Event(0, 1, (), None)],
        [Event(0, 1, ("c",), None)],
    ],
    ids=["twice", "whole and part", "beyond its memory", "none", "unknown"],
)
def test_it_fails(events: list[Event]) -> None:
    with pytest.raises(Violation):
        check(events, TOTAL)


def test_it_passes() -> None:
    events = [
        Event(0, 2, ("a",), None),
        Event(2, 3, ("a", "b"), None),
        Event(3, 5, ("b",), 40),
        Event(4, 6, ("b",), 40),
    ]
    check(events, TOTAL)
    assert makespan(events) == 6


def test_the_suite_is_always_the_same() -> None:
    assert list(suite()) == list(suite())
    assert {count for _, count, _ in suite()} == {1, 2, 4}
