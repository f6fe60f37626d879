"""The matrix: attention backend x dtype x kind of device, and how many tests of each ran there."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_cudaenv.ledger.judge import Judged, Verdict
from pytest_cudaenv.ledger.results import CPU, FAILED, cell_parts
from pytest_cudaenv.names import DTYPES

NO_CELL = "no cell"


@dataclass
class Square:
    """The tests of one cell on one kind of device."""

    tests: int = 0
    """Those that belong there: on a device the ones that take one, on the CPU the ones that can do without."""
    ran: int = 0
    failed: int = 0
    """Of those that ran, those that failed on some runner."""
    idle: int = 0
    """Of those that ran, those that used no device."""


@dataclass
class Row:
    """A cell, by its two axes; both are empty for the tests that have none."""

    backend: str
    dtype: str
    by_kind: dict[str, Square] = field(default_factory=dict)


def belongs(judged: Judged, kind: str) -> bool:
    """Whether a test is meant to run on such a device, or on the CPU."""
    return not judged.must_have_device if kind == CPU else judged.takes_device


def matrix(verdict: Verdict) -> list[Row]:
    """A row per cell, that of tests without cell last; in each a square per kind of device."""
    rows: dict[tuple[str, str], Row] = {}
    kinds = verdict.kinds
    for judged in verdict.tests.values():
        parts = cell_parts(judged.cell)
        row = rows.get(parts)
        if row is None:
            row = rows[parts] = Row(*parts, {kind: Square() for kind in kinds})
        ran_on = judged.kinds
        for kind, square in row.by_kind.items():
            square.tests += kind in ran_on or belongs(judged, kind)
        for kind in ran_on:
            results = [by_kind[kind] for by_kind in judged.finals.values() if kind in by_kind]
            square = row.by_kind[kind]
            square.ran += 1
            square.failed += any(result.outcome in FAILED for result in results)
            square.idle += all(result.idle for result in results)
    return [rows[key] for key in sorted(rows, key=_order)]


def outside(verdict: Verdict) -> str:
    """A sentence on the tests that need a device where no runner had one, and so stand in no square; else empty."""
    if any(kind != CPU for kind in verdict.kinds):
        return ""
    count = sum(1 for judged in verdict.tests.values() if judged.must_have_device)
    if not count:
        return ""
    tests, stand = ("1 test", "stands") if count == 1 else (f"{count:,} tests", "stand")
    return f"No runner had a CUDA device: {tests} that cannot do without one {stand} in no square."


_DTYPES = list(DTYPES.values())


def _order(key: tuple[str, str]) -> tuple[bool, str, int]:
    """By backend, then the wider dtype first, as ids are listed elsewhere; what has no cell is last."""
    backend, dtype = key
    return key == ("", ""), backend, _DTYPES.index(dtype) if dtype in _DTYPES else -1
