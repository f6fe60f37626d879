"""What ledgers say, as data: runs, and each test's result in each run; united, they are what a merge judges.

Uniting is a union of sets of facts, so the order of ledgers does not matter and the same ledger twice is that ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pytest_cudaenv.names import DTYPES
from pytest_cudaenv.requirements.reason import Reason

CPU = "CPU"
UNKNOWN_KIND = "unknown device"
"""Where a test ran of which its ledger does not say it."""

UNREACHED = "unreached"
"""Outcome of a test that a run had selected and tells no more of: the run ended before it."""

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected")
RAN = frozenset({"passed", "failed", "xfailed", "xpassed"})
"""Outcomes of a test that ran; an error has run if it got as far as its body."""

FAILED = frozenset({"failed", "error"})

_BADNESS = ("passed", "xfailed", "xpassed", "deselected", "skipped", "failed", "error")


class Result(NamedTuple):
    """What one run says of one test."""

    outcome: str
    kind: str | None = None
    """The kind of device that it ran on; None if, and only if, its body did not run."""
    cell: str | None = None
    needs: str | None = None
    """The requirement's fields, as JSON with sorted keys."""
    takes_device: bool = False
    """Whether its requirement or its cell takes a device where there is one."""
    reasons: tuple[Reason, ...] = ()
    skip: str | None = None
    breach: str | None = None
    message: str | None = None
    seconds: float | None = None
    """Of set-up, call and teardown together, without the waiting for devices."""
    memory: int | None = None
    parity: float | None = None
    """Distance from the reference as a part of what is allowed: 1.0 is the limit."""
    attempts: int = 1
    idle: bool = False
    unmarked: bool = False
    findings: tuple[str, ...] = ()
    """What is wrong with it, even if it passed: `[state-leak] needs …`."""

    @property
    def is_failure(self) -> bool:
        """Whether it failed; a skip that a contract turned into an error is no failure of the test."""
        return self.outcome in FAILED and self.breach is None

    @property
    def why(self) -> str:
        """Why it did not run, in a line."""
        if self.reasons:
            return " | ".join(str(reason) for reason in self.reasons)
        return self.skip or self.message or _WITHOUT_REASON.get(self.outcome, "no reason given")


_WITHOUT_REASON = {UNREACHED: "its run ended before it", "error": "its set-up failed"}

UNREACHED_RESULT = Result(UNREACHED)


def _weight(result: Result) -> tuple[bool, int, int, str]:
    """Of two things that copies of one ledger say, the heavier counts: what was told later, else the worse."""
    badness = _BADNESS.index(result.outcome) if result.outcome in _BADNESS else -1
    return result.outcome != UNREACHED, result.attempts, badness, repr(result)


@dataclass(frozen=True)
class Run:
    """One run of pytest: the first and the last line of its ledger."""

    facts: Mapping[str, Any]
    """The line of kind `run`."""
    end: Mapping[str, Any] | None = None
    """The line of kind `end`; None where the ledger was cut short."""
    tells_selected: bool = False
    """Whether it tells which tests were selected."""
    sources: frozenset[str] = frozenset()
    """The files that it was read from."""

    @cached_property
    def key(self) -> str:
        """What tells this run from others: a digest of its facts."""
        return hashlib.sha256(_canonical(self.facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def runner(self) -> str:
        """The profile's name; where none was given, the visible devices: `2 x NVIDIA H200`, or `CPU`."""
        name = self.facts.get("runner")
        return str(name) if name else self.devices

    @cached_property
    def devices(self) -> str:
        """`2 x NVIDIA H200`, or `CPU`."""
        return ", ".join(f"{count} x {kind}" for kind, count in Counter(self._visible).items()) or CPU

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the visible devices."""
        return tuple(dict.fromkeys(self._visible))

    @cached_property
    def _visible(self) -> list[str]:
        host = self.facts["host"]
        names = {device["uuid"]: str(device["name"]) for device in host["devices"]}
        return [names.get(uuid, UNKNOWN_KIND) for uuid in host["visible"]]

    @property
    def started(self) -> str:
        """UTC, ISO 8601."""
        return str(self.facts["started"])

    def checked(self) -> Run:
        """This run. Raises KeyError or TypeError where its facts are not what every run tells."""
        host, software = self.facts["host"], self.facts["software"]
        shapes = [
            (self.facts["started"], str), (self.facts.get("runner", ""), str), (self.facts.get("promises", []), list),
            (host["devices"], list), (host["visible"], list), (software["distributions"], dict),
        ]  # fmt: skip
        for device in host["devices"]:
            shapes += [(device["uuid"], str), (device["name"], str)]
        shapes += [(uuid, str) for uuid in host["visible"]]
        for value, shape in shapes:
            if not isinstance(value, shape):
                raise TypeError(f"{value!r} is no {shape.__name__}")
        return self

    def joined(self, other: Run) -> Run:
        """What two copies of this run's ledger say together."""
        ends = [end for end in (self.end, other.end) if end is not None]
        return Run(
            self.facts,
            max(ends, key=_canonical) if ends else None,
            self.tells_selected or other.tells_selected,
            self.sources | other.sources,
        )


def _canonical(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


@dataclass
class Results:
    """Everything that a number of ledgers say."""

    runs: dict[str, Run] = field(default_factory=dict)
    """Key -> run."""
    tests: dict[str, dict[str, Result]] = field(default_factory=dict)
    """Test id -> key of a run -> what that run says of it."""


def united(several: Iterable[Results]) -> Results:
    """What several ledgers say together."""
    union = Results()
    for results in several:
        for key, run in results.runs.items():
            mine = union.runs.get(key)
            union.runs[key] = run if mine is None else mine.joined(run)
        for test, theirs in results.tests.items():
            ours = union.tests.get(test)
            if ours is None:
                union.tests[test] = dict(theirs)
                continue
            for key, result in theirs.items():
                present = ours.get(key)
                ours[key] = result if present is None else max(present, result, key=_weight)
    return union


class IdParts(NamedTuple):
    """A test's id by its parts: `tests/a.py::TestX::test_y[1::2]`."""

    file: str
    names: tuple[str, ...]
    parameters: str
    """With their brackets; empty where there are none."""


def id_parts(test: str) -> IdParts:
    """The parts of an id; what stands in brackets is the suite's own."""
    head, bracket, parameters = test.partition("[")
    file, *names = head.split("::")
    return IdParts(file, tuple(names), bracket + parameters)


class CellParts(NamedTuple):
    """A cell's id by its two axes; empty where the test has none of that axis."""

    backend: str
    dtype: str


_DTYPE_IDS = frozenset(DTYPES.values())


def cell_parts(cell: str | None) -> CellParts:
    """`flash_attention_2-bf16` -> (`flash_attention_2`, `bf16`)."""
    if not cell:
        return CellParts("", "")
    if cell in _DTYPE_IDS:
        return CellParts("", cell)
    backend, _, dtype = cell.rpartition("-")
    return CellParts(backend, dtype) if backend and dtype in _DTYPE_IDS else CellParts(cell, "")


def takes_device(needs: Mapping[str, Any], cell: str | None) -> bool:
    """Whether a test runs on a device where there is one: its requirement says so, or its cell has a backend."""
    return bool(needs.get("devices") or needs.get("device_if_any") or cell_parts(cell).backend)
