"""Drift: tests that became slower, larger or less exact than an earlier merge tells.

A difference counts where it is large both as a ratio and as an amount, so that neither 2 ms for 1 ms nor 61 s for 60 s
is told. Times also move together, with another machine or a busier one: each test's time is compared after the
median of its kind of device has been taken out, and that median is told on its own where it moved.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pytest_cudaenv.requirements.sizes import format_memory


class Measured(NamedTuple):
    """What was measured of a test on one kind of device, where it passed."""

    seconds: float | None = None
    """The least of its runs: noise only adds."""
    memory: int | None = None
    """The most of its runs, in bytes."""
    parity: float | None = None
    """The most of its runs; 1.0 is what is allowed."""

    def joined(self, other: Measured) -> Measured:
        """What two runs on the same kind of device measured."""
        return Measured(
            min(_known(self.seconds, other.seconds), default=None),
            max(_known(self.memory, other.memory), default=None),
            max(_known(self.parity, other.parity), default=None),
        )


_N = TypeVar("_N", int, float)


def _known(*values: _N | None) -> list[_N]:
    return [value for value in values if value is not None]


class Threshold(NamedTuple):
    """Both must be exceeded."""

    ratio: float
    amount: float


TIME = Threshold(1.5, 1.0)
"""Seconds."""
MEMORY = Threshold(1.1, 64 * 1024**2)
"""Bytes: what torch allocates hardly varies."""
PARITY = Threshold(1.25, 0.1)
"""Parts of the allowed distance."""

MEDIAN_TIME = 1.25
"""The ratio from which a shift of all times is told."""

SHORT = 0.1
"""Seconds under which a test's time tells nothing of the machine's speed."""

ENOUGH = 20
"""Tests that it takes to know a median."""


@dataclass(frozen=True)
class Change:
    """A test whose number grew."""

    what: str
    """time, memory or parity."""
    test: str
    kind: str
    before: float
    now: float

    @property
    def ratio(self) -> float:
        return self.now / self.before if self.before else float("inf")

    def __str__(self) -> str:
        shown = _SHOWN[self.what]
        return f"{self.test} on {self.kind}: {shown(self.before)} -> {shown(self.now)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _bytes(count: float) -> str:
    return format_memory(int(count))


_SHOWN = {"time": _seconds, "memory": _bytes, "parity": "{:.2f}".format}


@dataclass
class Drift:
    """How a merge differs from an earlier one."""

    changes: list[Change] = field(default_factory=list)
    """The largest ratio first."""
    shifts: dict[str, float] = field(default_factory=dict)
    """Kind of device -> median ratio of its tests' times, where enough of them ran in both."""


Numbers = Mapping[tuple[str, str], Measured]
"""(test, kind of device) -> what was measured there."""


def drift(before: Numbers, now: Numbers) -> Drift:
    """What grew between two merges."""
    shifts = dict(_shifts(before, now))
    changes = [change for key in now.keys() & before.keys() for change in _changes(key, before[key], now[key], shifts)]
    return Drift(sorted(changes, key=lambda c: (-c.ratio, c.what, c.test, c.kind)), shifts)


def _shifts(before: Numbers, now: Numbers) -> Iterator[tuple[str, float]]:
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for key in now.keys() & before.keys():
        old, new = before[key].seconds, now[key].seconds
        if old is not None and new is not None and old >= SHORT:
            ratios[key[1]].append(new / old)
    for kind in sorted(ratios):
        if len(ratios[kind]) >= ENOUGH:
            yield kind, statistics.median(ratios[kind])


def _changes(key: tuple[str, str], before: Measured, now: Measured, shifts: Mapping[str, float]) -> Iterator[Change]:
    test, kind = key
    if before.seconds is not None and now.seconds is not None:
        # A slower machine explains what all tests share; a faster one accuses none that merely kept its time.
        expected = before.seconds * max(shifts.get(kind, 1.0), 1.0)
        if _exceeds(TIME, expected, now.seconds):
            yield Change("time", test, kind, before.seconds, now.seconds)
    if before.memory is not None and now.memory is not None and _exceeds(MEMORY, before.memory, now.memory):
        yield Change("memory", test, kind, before.memory, now.memory)
    if before.parity is not None and now.parity is not None and _exceeds(PARITY, before.parity, now.parity):
        yield Change("parity", test, kind, before.parity, now.parity)


def _exceeds(threshold: Threshold, before: float, now: float) -> bool:
    return now > before * threshold.ratio and now - before > threshold.amount
