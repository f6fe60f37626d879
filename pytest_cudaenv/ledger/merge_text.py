"""A verdict as lines for a terminal: what is red, on what, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_cudaenv.ledger.judge import KINDS, Finding, Runner, Verdict, shift_lines

NAMED = 5
"""Tests that are named, of many that have the same in common."""

GROUPS = 12
"""Reasons that are told of one kind of finding."""

BY_REASON = frozenset({"never-ran", "cpu-only"})
"""Kinds of findings that have the reasons of a test that did not run: told by reason, not by test."""


def lines(verdict: Verdict) -> list[str]:
    """The verdict, its runners, what is red with reasons and remedies, and a line for all else that is worth saying."""
    told = [headline(verdict), "", *_runner_lines(verdict.runners)]
    for kind in verdict.red:
        told += ["", f"RED {KINDS[kind].title}: {len(verdict.findings[kind]):,}", *_details(verdict, kind)]
    said = [kind for kind in verdict.findings if kind not in verdict.red and kind not in verdict.allowed]
    if verdict.allowed or said or verdict.has_baseline:
        told.append("")
    if verdict.allowed:
        told.append(f"allowed: {counted(verdict, verdict.allowed)}")
    if said:
        told.append(f"also: {counted(verdict, said)}")
    told += [f"drift: {line}" for line in shift_lines(verdict.drift)]
    for kind in said:
        if kind.startswith("drift-"):
            told += _test_lines(verdict.findings[kind])
    return told if len(told) < 30 else [*told, "", headline(verdict)]


def headline(verdict: Verdict) -> str:
    """`RED: 3 failed somewhere, 12 never ran anywhere (1,240 tests, 1,102 ran; 4 runs of 3 runners)`."""
    runs = sum(len(runner.runs) for runner in verdict.runners)
    size = (
        f"{plural(len(verdict.tests), 'test')}, {verdict.ran:,} ran; "
        f"{plural(runs, 'run')} of {plural(len(verdict.runners), 'runner')}"
    )
    return f"RED: {counted(verdict, verdict.red)} ({size})" if verdict.is_red else f"fine: {size}"


def counted(verdict: Verdict, kinds: Iterable[str]) -> str:
    """`3 failed somewhere, 12 never ran anywhere`."""
    return ", ".join(KINDS[kind].counted(len(verdict.findings[kind])) for kind in kinds)


def plural(count: int, noun: str) -> str:
    """`1 test`, `1,240 tests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`41 s`, `12 min`, `3.2 h`."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _runner_lines(runners: Sequence[Runner]) -> list[str]:
    rows = [
        (
            runner.name,
            runner.devices if runner.devices != runner.name else "",
            f"{runner.ran:,} ran",
            f"{runner.failed:,} failed",
            f"{runner.not_run:,} not run",
            duration(runner.seconds),
        )
        for runner in runners
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (True, True, False, False, False, False)
    return [
        (
            "  "
            + "  ".join(t.ljust(w) if is_text else t.rjust(w) for t, w, is_text in zip(row, widths, left, strict=True))
        ).rstrip()
        for row in rows
    ]


def _details(verdict: Verdict, kind: str) -> list[str]:
    if kind not in BY_REASON:
        return _test_lines(verdict.findings[kind])
    groups = verdict.why(kind)
    told: list[str] = []
    for reason, remedy, tests in groups[:GROUPS]:
        told.append(f"  {len(tests):6,} {reason}")
        told += [f"         {line}" for line in (remedy, named(tests)) if line]
    if len(groups) > GROUPS:
        told.append(f"         and {plural(len(groups) - GROUPS, 'reason')} more")
    if not groups:  # they ran where they should not have, and nothing says why
        told += _test_lines(verdict.findings[kind])
    return told


def named(tests: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    return ", ".join(tests[:NAMED]) + (f" and {len(tests) - NAMED:,} more" if len(tests) > NAMED else "")


def _test_lines(findings: Sequence[Finding]) -> list[str]:
    told: list[str] = []
    for finding in findings[: 2 * NAMED]:
        told.append(f"         {finding.subject}")
        if finding.text:
            told.append(f"           {finding.text}")
    if len(findings) > 2 * NAMED:
        told.append(f"         and {len(findings) - 2 * NAMED:,} more")
    return told
