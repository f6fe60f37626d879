"""A verdict as one page of HTML that needs nothing else: no network, no other file.

The data is embedded as columns over the tests, with everything that repeats in tables; `page/page.js` reads it. The
page forbids itself, by a policy with the digests of its own style and script, to load or run anything else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from pytest_cudaenv._version import __version__
from pytest_cudaenv.ledger.cell_matrix import matrix, outside
from pytest_cudaenv.ledger.judge import KINDS, Judged, Verdict, shift_lines
from pytest_cudaenv.ledger.merge_text import headline
from pytest_cudaenv.ledger.results import Result, cell_parts

TOLD = frozenset({"quarantined", "lost", "drift-time", "drift-memory", "drift-parity"})
"""Kinds of findings whose text does not follow from the results."""

LETTERS = {
    "passed": "p", "failed": "f", "error": "e", "skipped": "s", "xfailed": "x", "xpassed": "X", "deselected": "d",
    "unreached": "u",
}  # fmt: skip
NOTHING = "."
"""A runner that says nothing of a test."""


def page(verdict: Verdict) -> Iterator[str]:
    """The page, in pieces."""
    style, script = _asset("page.css"), _asset("page.js")
    head, _, tail = _asset("page.html").partition("{{data}}")
    values = {
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_digest(style)}; script-src {_digest(script)}",
        "title": html.escape(("red: " if verdict.is_red else "fine: ") + "where the tests ran"),
        "style": style,
        "script": script,
        "version": __version__,
    }
    for name, value in values.items():
        head, tail = head.replace(f"{{{{{name}}}}}", value), tail.replace(f"{{{{{name}}}}}", value)
    yield head
    # `</script>` in an id would end the element; JSON can spell `<` otherwise.
    yield json.dumps(page_data(verdict), separators=(",", ":")).replace("<", "\\u003c")
    yield tail


def _asset(name: str) -> str:
    return (resources.files("pytest_cudaenv.ledger") / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _Table:
    """Values that repeat, by number in the order in which they were first seen."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def rows(self, shown: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        return [shown(value) for value in self.numbers]


def page_data(verdict: Verdict) -> dict[str, Any]:
    """What `page.js` reads. A column is a text with a number for each test, separated by commas; empty for none."""
    kinds = verdict.kinds
    files, cells, needs, sides = _Table(), _Table(), _Table(), _Sides(len(verdict.tests), kinds)
    finding_kinds = list(KINDS)
    bit = {kind: 1 << n for n, kind in enumerate(finding_kinds)}
    told: dict[int, list[tuple[int, str]]] = {}
    names: list[str] = []
    columns: dict[str, list[str]] = {"file": [], "cell": [], "needs": [], "findings": []}
    for n, (test, judged) in enumerate(verdict.tests.items()):
        file, separator, name = test.partition("::")
        names.append(name if separator else "")
        columns["file"].append(str(files(file)))
        cell = judged.cell
        columns["cell"].append("" if cell is None else str(cells(cell)))
        need = next((result.needs for _, result in judged.results if result.needs is not None), None)
        columns["needs"].append("" if need is None else str(needs(need)))
        columns["findings"].append(str(sum([bit[kind] for kind in judged.findings])) if judged.findings else "0")
        sides.add(n, judged)
    place = {test: n for n, test in enumerate(verdict.tests)}
    for kind in TOLD & verdict.findings.keys():
        for finding in verdict.findings[kind]:
            told.setdefault(place[finding.subject], []).append((finding_kinds.index(kind), finding.text))
    counts = sides.counts
    return {
        "headline": headline(verdict),
        "isRed": verdict.is_red,
        "findings": [
            {
                "name": kind,
                "title": KINDS[kind].title,
                "meaning": KINDS[kind].meaning,
                "isRed": kind in verdict.red,
                "isAllowed": kind in verdict.allowed,
                "ofTests": KINDS[kind].is_of_tests,
                "count": len(verdict.findings.get(kind, ())),
                "others": []
                if KINDS[kind].is_of_tests
                else [[finding.subject, finding.text] for finding in verdict.findings.get(kind, ())],
            }
            for kind in finding_kinds
        ],
        "shifts": shift_lines(verdict.drift),
        "runners": [_runner(runner) for runner in verdict.runners],
        "kinds": kinds,
        "matrix": [
            {
                "backend": row.backend,
                "dtype": row.dtype,
                "squares": [[s.tests, s.ran, s.failed, s.idle] for s in (row.by_kind[kind] for kind in kinds)],
            }
            for row in matrix(verdict)
        ],
        "outside": outside(verdict),
        "files": files.rows(),
        "cells": cells.rows(cell_parts),
        "needs": needs.rows(json.loads),
        "whys": sides.whys.rows(
            lambda told: [[code, text, remedy, counts[code, text, remedy]] for code, text, remedy in told]
        ),
        "texts": sides.texts.rows(),
        "letters": {letter: outcome for outcome, letter in LETTERS.items()},
        "names": names,
        "columns": {name: ",".join(column) for name, column in columns.items()},
        "sides": sides.rows(),
        "told": {str(n): several for n, several in sorted(told.items())},
    }


def _runner(runner: Any) -> dict[str, Any]:
    def joined(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value))

    runs = runner.runs
    return {
        "name": runner.name,
        "devices": runner.devices,
        "isExpected": runner.is_expected,
        "ran": runner.ran,
        "failed": runner.failed,
        "notRun": runner.not_run,
        "seconds": round(runner.seconds, 1),
        "runs": len(runs),
        "started": runs[0].started,
        "driver": joined(run.facts["host"].get("driver") for run in runs),
        "torch": joined(run.facts["software"]["distributions"].get("torch") for run in runs),
        "build": joined(run.facts["software"].get("torch_build") for run in runs),
        "transformers": joined(run.facts["software"]["distributions"].get("transformers") for run in runs),
        "python": joined(run.facts["software"].get("python") for run in runs),
        "promises": joined(promise for run in runs for promise in run.facts.get("promises", ())),
        "sources": sorted(source for run in runs for source in run.sources),
    }


Why = tuple[tuple[str, str, str], ...]


def _why(result: Result) -> Why:
    """(code, text, remedy) of each reason that kept a test from running; without code where it is not the plugin's."""
    if result.reasons:
        return tuple((r.code, f"{r.need}; have {r.have}", r.remedy) for r in result.reasons)
    return (("", result.why, ""),)


class _Sides:
    """What each runner says of every test, as columns; several sides of one that ran tests on several kinds."""

    def __init__(self, size: int, kinds: Sequence[str]) -> None:
        self.size = size
        self.number = {kind: n for n, kind in enumerate(kinds)}
        self.whys, self.texts = _Table(), _Table()
        self.sides: dict[tuple[str, int], dict[str, Any]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._kept: Counter[frozenset[int]] = Counter()
        """Numbers of whys -> tests that these kept from running, each by some runner."""

    def add(self, n: int, judged: Judged) -> None:
        """Take in the test of that number."""
        kept: set[int] = set()
        before, side = "", 0
        for runner, result in judged.results:  # those of a runner follow each other
            side = side + 1 if runner == before else 0
            before = runner
            columns = self._side(runner, side)
            self._add(n, result, columns)
            if result.kind is None:
                why = self._why_number(result)
                columns["why"][n] = str(why)
                kept.add(why)
        if kept:
            self._kept[frozenset(kept)] += 1

    def _why_number(self, result: Result) -> int:
        key = result.reasons or result.why
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self.whys(_why(result))
        return number

    @property
    def counts(self) -> Counter[tuple[str, str, str]]:
        """Reason -> tests that it kept from running on some runner."""
        counts: Counter[tuple[str, str, str]] = Counter()
        rows = self.whys.rows()
        for numbers, tests in self._kept.items():
            for reason in {reason for number in numbers for reason in rows[number]}:
                counts[reason] += tests
        return counts

    def _side(self, runner: str, side: int) -> dict[str, Any]:
        columns = self.sides.get((runner, side))
        if columns is None:
            columns = self.sides[runner, side] = {name: [""] * self.size for name in ("kind", "ms", "mib", "why")}
            columns |= {"outcome": [NOTHING] * self.size, "more": {}}
        return columns

    def _add(self, n: int, result: Result, columns: dict[str, Any]) -> None:
        columns["outcome"][n] = LETTERS[result.outcome]
        if result.kind is not None:
            columns["kind"][n] = str(self.number[result.kind])
            if result.seconds is not None:
                columns["ms"][n] = str(round(result.seconds * 1000))
            if result.memory is not None:
                columns["mib"][n] = str(round(result.memory / 1024**2))
        if (
            result.attempts > 1 or result.idle or result.unmarked or result.parity or result.breach or result.message
            or result.findings
        ):  # fmt: skip
            more = {
                "attempts": result.attempts if result.attempts > 1 else None,
                "idle": result.idle or None,
                "unmarked": result.unmarked or None,
                "parity": result.parity,
                "breach": None if result.breach is None else self.texts(result.breach),
                "findings": [self.texts(told) for told in result.findings] or None,
                "message": None if result.message is None else self.texts(result.message),
            }
            columns["more"][str(n)] = {name: value for name, value in more.items() if value is not None}

    def rows(self) -> list[dict[str, Any]]:
        """The sides, by runner."""
        return [
            {
                "runner": runner,
                "outcome": "".join(side["outcome"]),
                **{name: ",".join(side[name]) for name in ("kind", "ms", "mib", "why")},
                "more": side["more"],
            }
            for (runner, _), side in sorted(self.sides.items())
        ]
