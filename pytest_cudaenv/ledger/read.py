"""Reads ledgers, and what earlier merges wrote; of what is neither it says in one line what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pytest_cudaenv._version import __version__
from pytest_cudaenv.ledger import merge
from pytest_cudaenv.ledger.record import VERSION
from pytest_cudaenv.ledger.results import (
    CPU,
    FAILED,
    OUTCOMES,
    RAN,
    UNKNOWN_KIND,
    UNREACHED_RESULT,
    Result,
    Results,
    Run,
    takes_device,
)
from pytest_cudaenv.requirements.reason import Reason

MERGE, LEDGER = "merge", "run"
"""Kinds of the first line of either."""


class LedgerError(Exception):
    """A file that is not counted; the message names it and says why."""


class Reading(NamedTuple):
    """A file that was read."""

    results: Results
    notes: tuple[str, ...] = ()
    """What a reader should know of it."""


def read(path: str | os.PathLike[str]) -> Reading:
    """The results in a file: of one run in a ledger, of all its runs in a merge's document.

    Raises LedgerError for what is neither, for other versions, for ledgers of simulated hosts, and for damage other
    than a last line that is not whole.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            return read_lines(file, name)
    except OSError as error:
        raise LedgerError(f"{name}: cannot be read: {error.strerror}") from None


def read_lines(lines: Iterable[bytes], name: str) -> Reading:
    """The results in a file of that name, line by line, as `read` does."""
    file = _File(lines)
    entries = file.entries()
    try:
        first = next(entries, None)
        if first is None:
            raise ValueError(
                "is cut short in its first line: the run told nothing"
                if file.torn
                else "is empty: the run ended before its tests were known"
            )
        kind = first.get("kind")
        if kind == MERGE:
            _check_version(first.get(MERGE), merge.VERSION, "merges")
            return Reading(merge.from_lines(first, entries))
        if kind != LEDGER or "ledger" not in first:
            raise ValueError("has no line of kind run at its head: it is not a ledger")
        _check_version(first["ledger"], VERSION, "ledgers")
        if first.get("simulated"):
            raise ValueError(f"is of a simulated host ({first['simulated']}): nothing in it ran on such a device")
        results = _Ledger(first, name).read(entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LedgerError(f"{name}: {_described(error, file.number)}") from None
    note = f"{name}: its last line is cut short; the {file.number} lines before it count"
    return Reading(results, (note,) if file.torn else ())


def _check_version(version: Any, mine: int, what: str) -> None:
    if version != mine:
        older = isinstance(version, int) and version < mine
        remedy = (
            "write it again with a newer pytest-cudaenv" if older else "merge with the pytest-cudaenv that wrote it"
        )
        raise ValueError(f"is of version {version}; {__version__} reads {what} of version {mine}: {remedy}")


def _described(error: Exception, line: int) -> str:
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, KeyError):
        return f"line {line} has no {error.args[0]}: it is not a line of a ledger"
    return f"line {line} has something where a ledger has something else: {error}"


_decode = json.JSONDecoder().raw_decode


def _decoded(text: str) -> Any:
    """As `json.loads`, which takes twice as long over a short line."""
    value, end = _decode(text)
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


class _File:
    """A file of JSON lines."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self.number = 0
        """Lines that were read and are whole."""
        self.torn = False
        """Whether its last line is not whole."""

    def entries(self) -> Iterator[dict[str, Any]]:
        """Its objects; a last line that is not whole is none of them."""
        for line in self._lines:
            if line.isspace():
                continue
            try:
                entry = _decoded(line.decode())
            except (ValueError, RecursionError):
                is_ours = self.number or line.startswith(b'{"kind"')
                # Only the last line of a file can lack its end.
                if is_ours and not line.endswith(b"\n"):
                    self.torn = True
                    return
                entry = None
            self.number += 1
            if not isinstance(entry, dict):
                raise ValueError(
                    f"line {self.number} is damaged: it is not an object in JSON"
                    if self.number > 1
                    else "is not a ledger: its first line is not an object in JSON"
                )
            yield entry


_OUTCOMES = {outcome: outcome for outcome in OUTCOMES}


class _Ledger:
    """Reads one ledger after its first line."""

    def __init__(self, facts: Mapping[str, Any], name: str) -> None:
        self.facts = facts
        self.name = name
        run = Run(facts)
        # Now, so that a run line that lacks something is told as such.
        self.kinds = run.checked().kinds
        self.selected: list[str] = []
        self.tells_selected = False
        self.end: Mapping[str, Any] | None = None
        self.results: dict[str, Result] = {}
        self._needs: dict[int, tuple[str | None, Mapping[str, Any]]] = {}
        self._taken: dict[tuple[int | None, str | None], tuple[str | None, str | None, bool]] = {}
        self._texts: dict[str, str] = {}
        self._reasons: dict[tuple[str, ...], tuple[Reason, ...]] = {}

    def read(self, entries: Iterable[Mapping[str, Any]]) -> Results:
        results = self.results
        for entry in entries:
            kind = entry["kind"]
            if kind == "test":
                test = _text(entry["id"])
                result = self._result(entry)
                earlier = results.get(test)
                if earlier is not None and earlier.outcome in FAILED and result.outcome not in FAILED:
                    # What is told later knows more, and counts; that there was a failure remains to be seen.
                    result = result._replace(attempts=max(result.attempts, 2))
                results[test] = result
            elif kind == "collected":
                self.tells_selected = True
                self.selected += [_text(test) for test in entry["ids"]]
            elif kind == "requirement":
                needs = dict(entry["needs"])
                self._needs[entry["number"]] = json.dumps(needs, sort_keys=True), needs
            elif kind == "end":
                self.end = {"finished": _text(entry["finished"]), **entry, "status": int(entry["status"])}
            elif kind == LEDGER:
                raise ValueError("holds two runs: each needs a file of its own")
        for test in self.selected:
            results.setdefault(test, UNREACHED_RESULT)
        run = Run(self.facts, self.end, self.tells_selected, frozenset({self.name}))
        return Results({run.key: run}, {test: {run.key: result} for test, result in results.items()})

    def _result(self, entry: Mapping[str, Any]) -> Result:
        get = entry.get
        outcome = entry["outcome"]
        if outcome not in _OUTCOMES:
            raise ValueError(f"has the outcome {outcome!r}, which no ledger of version {VERSION} has")
        outcome = _OUTCOMES[outcome]
        needs, cell, takes = self._needs_of(get("requirement"), get("cell"))
        seconds = get("seconds")
        unmarked = get("unmarked") is True
        breach = self._shared(get("breach")) if "breach" in entry else None
        kind = None
        # A promise that was broken is told as an error, or as a failure of the body that wanted to skip.
        if breach is None and (outcome in RAN or (outcome == "error" and seconds and "call" in seconds)):
            kind = self._shared(get("ran_on")) or self._kind(takes, unmarked)
        parity = get("parity")
        reasons = get("reasons")
        memory = get("memory")
        return Result(
            outcome,
            kind,
            cell,
            needs,
            takes,
            self._told(reasons) if reasons else (),
            self._shared(get("skip")) if "skip" in entry else None,
            breach,
            self._shared(get("message")) if "message" in entry else None,
            round(sum(seconds.values()), 4) if seconds else None,
            None if memory is None else int(memory),
            _ratio(parity) if parity else None,
            int(get("attempts") or 1),
            get("idle") is True,
            unmarked,
            self._findings(entry["findings"]) if "findings" in entry else (),
        )

    def _needs_of(self, number: int | None, cell: str | None) -> tuple[str | None, str | None, bool]:
        """(requirement as JSON, cell, whether they take a device): worked out once for all tests with the same."""
        known = self._taken.get((number, cell))
        if known is None:
            needs, fields = (None, {}) if number is None else self._needs[number]
            cell = self._shared(cell)
            known = self._taken[number, cell] = needs, cell, takes_device(fields, cell)
        return known

    def _kind(self, takes: bool, unmarked: bool) -> str:
        """Where a test ran of which the ledger does not say it."""
        if not takes and not unmarked:
            return CPU
        return self.kinds[0] if len(self.kinds) == 1 else UNKNOWN_KIND

    def _findings(self, told: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        lines = (self._shared(f"[{_text(one['code'])}] {_text(one['text'])}") for one in told)
        return tuple(dict.fromkeys(line for line in lines if line is not None))

    def _shared(self, value: Any) -> str | None:
        """A text, as the one object of all tests that have the same; None for none."""
        return None if value is None else self._texts.setdefault(_text(value), value)

    def _told(self, reasons: Iterable[Mapping[str, Any]]) -> tuple[Reason, ...]:
        key = tuple(_text(r.get(name) or "") for r in reasons for name in ("code", "need", "have", "remedy"))
        told = self._reasons.get(key)
        if told is None:
            told = self._reasons[key] = tuple(
                Reason(key[n], key[n + 1], key[n + 2], key[n + 3]) for n in range(0, len(key), 4)
            )
        return told


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _ratio(parity: Mapping[str, Any]) -> float | None:
    ratio = parity.get("ratio")
    return float(ratio) if isinstance(ratio, (int, float)) else None
