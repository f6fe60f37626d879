"""How long tests took, as ledgers tell: what a matrix is balanced by. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from pytest_cudaenv.ledger.record import VERSION

RAN = frozenset({"passed", "failed", "error", "xfailed", "xpassed"})

UNKNOWN_SECONDS = 1.0
"""Of a test, where no ledger tells of any."""


class DurationsError(ValueError):
    """What was read is no ledger whose times mean anything."""


@dataclass
class Durations:
    """Seconds of tests: on this runner, on this kind of device, or anywhere, whichever is known."""

    default: float | None = None
    """Of a test that no ledger tells of; None: the median of those that they tell of."""
    _seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(id, name of a runner, kind of a device, or nothing) -> what was measured."""
    _median: float | None = None

    def add(self, lines: Iterable[str]) -> None:
        """Take in a ledger, up to its last whole line. Raises DurationsError."""
        self._median = None
        runner: str | None = None
        for number, line in enumerate(lines, start=1):
            try:
                data = json.loads(line)
                kind = data["kind"]
            except (ValueError, KeyError, TypeError):
                if number == 1:
                    raise DurationsError("it is no ledger") from None
                continue  # cut short while it was written
            if number == 1:
                if kind != "run" or data.get("ledger") != VERSION:
                    raise DurationsError(f"it is no ledger of version {VERSION}")
                if data.get("simulated"):
                    raise DurationsError(f"it is of a simulated {data['simulated']}: its times are no device's")
                runner = data.get("runner")
            elif kind == "test" and data.get("outcome") in RAN:
                seconds = float(sum(data.get("seconds", {}).values()))
                for where in {runner, data.get("ran_on"), ""} - {None}:
                    self._seconds.setdefault((data["id"], where), []).append(seconds)

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
