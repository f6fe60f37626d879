"""A verdict as Markdown, for the summary of a GitHub step, and as the annotations of its checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pytest_cudaenv.ledger.cell_matrix import NO_CELL, Square, matrix, outside
from pytest_cudaenv.ledger.judge import KINDS, Finding, Verdict, shift_lines
from pytest_cudaenv.ledger.merge_text import BY_REASON, counted, duration, headline, plural
from pytest_cudaenv.ledger.results import id_parts

LISTED = 50
"""Findings of a kind that are listed. GitHub refuses a summary of more than 1 MiB."""

SHOWN = 10
"""Annotations of one level that GitHub shows of one step."""


def markdown(verdict: Verdict) -> str:
    """The verdict, what is red with reasons and remedies, the runners, and the matrix of cells."""
    parts = [
        f"## {'🔴' if verdict.is_red else '🟢'} pytest-cudaenv: {_text(headline(verdict))}",
        *(_section(verdict, kind, is_open=True) for kind in verdict.red),
        _table(
            ("runner", "devices", "ran", "failed", "not run", "time"),
            [
                (
                    _text(r.name),
                    _text(r.devices),
                    f"{r.ran:,}",
                    f"{r.failed:,}",
                    f"{r.not_run:,}",
                    duration(r.seconds),
                )
                for r in verdict.runners
            ],
        ),
        _matrix_table(verdict),
        _text(outside(verdict)),
    ]
    if verdict.allowed:
        parts.append(f"Allowed: {_text(counted(verdict, verdict.allowed))}.")
    parts += [f"Drift: {_text(line)}." for line in shift_lines(verdict.drift)]
    rest = [kind for kind in verdict.findings if kind not in verdict.red]
    parts += [_section(verdict, kind, is_open=False) for kind in rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(verdict: Verdict, kind: str, *, is_open: bool) -> str:
    findings = verdict.findings[kind]
    summary = f"<summary><b>{_text(KINDS[kind].title)}: {len(findings):,}</b></summary>"
    return "\n".join(
        (
            f"<details{' open' if is_open and len(findings) <= LISTED else ''}>{summary}",
            "",
            f"{_text(KINDS[kind].meaning)}.",
            "",
            *(_reasons(verdict, kind) if kind in BY_REASON and verdict.why(kind) else _items(findings)),
            "",
            "</details>",
        )
    )


def _reasons(verdict: Verdict, kind: str) -> Iterator[str]:
    groups = verdict.why(kind)
    for reason, remedy, tests in groups[:LISTED]:
        yield f"- **{len(tests):,}** {_text(reason)}" + (f" — {_text(remedy)}" if remedy else "")
        for test in tests[:3]:
            yield f"  - {_code(test)}"
        if len(tests) > 3:
            yield f"  - and {len(tests) - 3:,} more"
    if len(groups) > LISTED:
        yield f"- and {plural(len(groups) - LISTED, 'reason')} more"


def _items(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings[:LISTED]:
        yield f"- {_code(finding.subject)}" + (f": {_text(finding.text)}" if finding.text else "")
    if len(findings) > LISTED:
        yield f"- and {len(findings) - LISTED:,} more"


def _matrix_table(verdict: Verdict) -> str:
    squares = matrix(verdict)
    kinds = verdict.kinds
    rows = [
        (_text(row.backend or NO_CELL), _text(row.dtype or "-"), *(_square(row.by_kind[kind]) for kind in kinds))
        for row in squares
    ]
    return _table(("backend", "dtype", *map(_text, kinds)), rows)


def _square(square: Square) -> str:
    if not square.tests:
        return "-"
    marks = [f"{square.ran:,} of {square.tests:,}"]
    marks += [f"❌ {square.failed:,} failed"] if square.failed else []
    marks += [f"💤 {square.idle:,} idle"] if square.idle else []
    if not square.ran:
        return f"⚪ none of {square.tests:,}"
    return ("" if len(marks) > 1 else "✅ " if square.ran == square.tests else "🟡 ") + ", ".join(marks)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = "|".join("---" for _ in head)
    return "\n".join([f"| {' | '.join(head)} |", f"|{ruler}|", *(f"| {' | '.join(row)} |" for row in rows)])


_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#+!|~$&@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def _text(text: str) -> str:
    """Text that Markdown shows as it is, on one line, and in which GitHub links nothing and mentions nobody."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", _one_line(text))


def _code(text: str) -> str:
    """Text as code, whatever it holds: HTML's element, as backticks end at the first one."""
    return f"<code>{_text(text)}</code>"


def _one_line(text: str) -> str:
    """The text without what would start a new line or what no file can hold."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())


def annotation_lines(verdict: Verdict, root: Path) -> list[str]:
    """GitHub's workflow commands for what is red: an error at each test, as many as GitHub shows.

    What is wrong with runners and entries comes first, for it has no other place in a diff.
    """
    told: list[str] = []
    left = 0
    for kind in sorted(verdict.red, key=lambda kind: KINDS[kind].is_of_tests):
        for finding in verdict.findings[kind]:
            if len(told) == SHOWN - 1:
                left += 1
                continue
            told.append(_annotation(kind, finding, root))
    if left:
        told.append(command("error", {"title": "cudaenv"}, f"and {left:,} more: the step's summary has them"))
    return told


def _annotation(kind: str, finding: Finding, root: Path) -> str:
    title = f"cudaenv: {KINDS[kind].title}"
    text = f"{finding.subject}: {finding.text}" if finding.text else finding.subject
    if not KINDS[kind].is_of_tests:
        return command("error", {"title": title}, text)
    file = id_parts(finding.subject).file
    line = line_of(finding.subject, root)
    return command("error", {"file": file, **({"line": str(line)} if line else {}), "title": title}, text)


def command(name: str, properties: dict[str, str], message: str) -> str:
    """A workflow command, `::error file=a.py,line=3,title=…::message`, with all that would end a part escaped."""
    told = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {told}::{_data(message)}"


def _data(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def line_of(test: str, root: Path) -> int | None:
    """The line of a test's function in its file; None where the file is not here or has none of that name."""
    file, names, _ = id_parts(test)
    return _definitions(root / file).get(names) if names else None


@lru_cache(maxsize=64)
def _definitions(path: Path) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*names, child.name)
                found.setdefault(inner, child.lineno)
                if isinstance(child, ast.ClassDef):
                    walk(child, inner)
            else:
                walk(child, names)

    try:
        walk(ast.parse(path.read_bytes()), ())
    except (OSError, SyntaxError, ValueError):
        return {}
    return found
