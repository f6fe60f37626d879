"""How long tests took, as ledgers tell: what a matrix is balanced by. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median

from pytest_cudaenv.ledger.results import Results

UNKNOWN_SECONDS = 1.0
"""Of a test, where no ledger tells of any."""


@dataclass
class Durations:
    """Seconds of tests: on this runner, on this kind of device, or anywhere, whichever is known."""

    default: float | None = None
    """Of a test that no ledger tells of; None: the median of those that they tell of."""
    _seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(id, name of a runner, kind of a device, or nothing) -> what was measured."""
    _median: float | None = None

    def add(self, results: Results) -> None:
        """Take in what ledgers say; of tests that did not run they tell no time."""
        self._median = None
        for nodeid, by_run in results.tests.items():
            for key, result in by_run.items():
                if result.kind is None or result.seconds is None:
                    continue
                for where in {results.runs[key].runner, result.kind, ""}:
                    self._seconds.setdefault((nodeid, where), []).append(result.seconds)

    def seconds(self, nodeid: str, runner: str, kind: str) -> float:
        """The mean of the most telling measurements of a test."""
        for where in (runner, kind, ""):
            if measured := self._seconds.get((nodeid, where)):
                return fmean(sorted(measured))  # sorted: the same sum in any order of ledgers
        return self._of_unknown

    @property
    def _of_unknown(self) -> float:
        if self.default is not None:
            return self.default
        if self._median is None:
            known = [fmean(sorted(times)) for (_, where), times in self._seconds.items() if not where]
            self._median = median(known) if known else UNKNOWN_SECONDS
        return self._median

    def knows(self, nodeid: str) -> bool:
        """Whether any ledger tells how long a test took."""
        return (nodeid, "") in self._seconds
