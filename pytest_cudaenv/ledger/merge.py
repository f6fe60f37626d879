"""The document that a merge writes for the next one: what all its ledgers say, as JSON lines.

The first line has the runs and what many results share; each test has a line; the last tells how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_cudaenv._version import __version__
from pytest_cudaenv.ledger.results import UNREACHED, UNREACHED_RESULT, Result, Results, Run, takes_device
from pytest_cudaenv.requirements.reason import Reason

VERSION = 1
"""Of the document."""


def to_lines(results: Results) -> Iterator[str]:
    """The document's lines, without their ends: the same for the same results, however these came together."""
    runs = sorted(results.runs.values(), key=lambda run: (run.runner, run.started, run.key))
    places = [(run.key, str(n)) for n, run in enumerate(runs)]
    reasons = _Table(r.reasons for by_run in results.tests.values() for r in by_run.values() if r.reasons)
    needs = _Table(r.needs for by_run in results.tests.values() for r in by_run.values() if r.needs is not None)
    yield _line(
        {
            "kind": "merge",
            "merge": VERSION,
            "plugin": __version__,
            "runs": [_run_data(run) for run in runs],
            "reasons": [[[r.code, r.need, r.have, r.remedy] for r in told] for told in reasons.rows],
            "needs": [json.loads(text) for text in needs.rows],
        }
    )
    for test in sorted(results.tests):
        by_run = results.tests[test]
        told = {n: _result_data(by_run[key], reasons, needs) for key, n in places if key in by_run}
        yield _line({"kind": "merged", "id": test, "results": told})
    yield _line({"kind": "merge-end", "tests": len(results.tests)})


_line = json.JSONEncoder(separators=(",", ":")).encode


class _Table:
    """Values that many results share, in an order that is the same for the same values."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.rows = sorted(set(values), key=repr)
        self.number = {value: n for n, value in enumerate(self.rows)}


def _run_data(run: Run) -> dict[str, Any]:
    data = {"facts": run.facts, "tells_selected": run.tells_selected, "sources": sorted(run.sources)}
    return data if run.end is None else {**data, "end": run.end}


def _result_data(result: Result, reasons: _Table, needs: _Table) -> dict[str, Any]:
    (
        outcome, kind, cell, need, _, told, skip, breach, message, seconds, memory, parity, attempts, idle, unmarked,
        findings,
    ) = result  # fmt: skip
    data: dict[str, Any] = {"outcome": outcome}
    if kind is not None:
        data["ran_on"] = kind
    if cell is not None:
        data["cell"] = cell
    if need is not None:
        data["needs"] = needs.number[need]
    if told:
        data["reasons"] = reasons.number[told]
    if seconds is not None:
        data["seconds"] = seconds
    if memory is not None:
        data["memory"] = memory
    if attempts != 1:
        data["attempts"] = attempts
    for name, value in (("skip", skip), ("breach", breach), ("message", message), ("parity", parity)):
        if value is not None:
            data[name] = value
    if idle:
        data["idle"] = True
    if unmarked:
        data["unmarked"] = True
    if findings:
        data["findings"] = list(findings)
    return data


def from_lines(head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> Results:
    """The results of a document whose first line is `head`. Raises ValueError, KeyError and the like for damage."""
    runs = [
        Run(run["facts"], run.get("end"), bool(run["tells_selected"]), frozenset(map(str, run["sources"]))).checked()
        for run in head["runs"]
    ]
    keys = {str(n): run.key for n, run in enumerate(runs)}
    reasons = [
        tuple(Reason(str(code), str(need), str(have), str(remedy)) for code, need, have, remedy in told)
        for told in head["reasons"]
    ]
    needs = [(json.dumps(fields, sort_keys=True), fields) for fields in head["needs"]]
    texts: dict[str, str] = {}
    tests: dict[str, dict[str, Result]] = {}
    expected = None
    for line in lines:
        if line["kind"] == "merge-end":
            expected = line["tests"]
            continue
        tests[line["id"]] = {
            keys[number]: _result(data, reasons, needs, texts) for number, data in line["results"].items()
        }
    if expected != len(tests):
        raise ValueError("is cut short: merge its ledgers again")
    return Results({run.key: run for run in runs}, tests)


def _result(
    data: Mapping[str, Any],
    reasons: list[tuple[Reason, ...]],
    needs: list[tuple[str, Mapping[str, Any]]],
    texts: dict[str, str],
) -> Result:
    if data["outcome"] == UNREACHED:
        return UNREACHED_RESULT
    get = data.get
    number = get("needs")
    text, fields = (None, {}) if number is None else needs[number]

    def shared(name: str) -> str | None:
        value = get(name)
        return None if value is None else texts.setdefault(value, value)

    cell = shared("cell")
    return Result(
        texts.setdefault(data["outcome"], data["outcome"]),
        shared("ran_on"),
        cell,
        text,
        takes_device(fields, cell),
        reasons[data["reasons"]] if "reasons" in data else (),
        shared("skip"),
        shared("breach"),
        shared("message"),
        get("seconds"),
        get("memory"),
        get("parity"),
        get("attempts", 1),
        get("idle", False),
        get("unmarked", False),
        tuple(texts.setdefault(text, text) for text in get("findings", ())),
    )
