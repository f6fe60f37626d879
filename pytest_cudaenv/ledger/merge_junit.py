"""A verdict as JUnit XML: a suite per kind of device, one of what ran nowhere, one of what else is red."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from pytest_cudaenv.ledger.judge import KINDS, Judged, Verdict
from pytest_cudaenv.ledger.results import FAILED, Result, id_parts

VERDICT, NOWHERE = "verdict", "not run anywhere"
"""Suites beside those of the kinds of devices."""


def junit(verdict: Verdict) -> Iterator[str]:
    """The document, in pieces.

    Of several runners with the same kind of device a test's worst result counts here, as for whoever reads JUnit a
    failure is a failure.
    """
    yield '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="pytest-cudaenv merge">\n'
    for kind in verdict.kinds:
        yield from _suite(kind, _cases_of_kind(verdict, kind), _host_properties(verdict, kind))
    nowhere = (_nowhere(verdict, test, judged) for test, judged in verdict.tests.items() if not judged.finals)
    yield from _suite(NOWHERE, nowhere, {})
    yield from _suite(
        VERDICT, _cases_of_verdict(verdict), {"red": " ".join(verdict.red), "allowed": " ".join(verdict.allowed)}
    )
    yield "</testsuites>\n"


class _Case(NamedTuple):
    test: str
    state: str = ""
    """failure, error or skipped; empty for what passed."""
    kind: str = ""
    message: str = ""
    seconds: float | None = None
    properties: Mapping[str, object] = {}


def _suite(name: str, cases: Iterable[_Case], properties: Mapping[str, str]) -> Iterator[str]:
    several = list(cases)
    if not several:
        return
    counts = {state: sum(case.state == state for case in several) for state in ("failure", "error", "skipped")}
    seconds = sum(case.seconds or 0.0 for case in several)
    yield (
        f'<testsuite name={_attribute(name)} tests="{len(several)}" failures="{counts["failure"]}" '
        f'errors="{counts["error"]}" skipped="{counts["skipped"]}" time="{seconds:.3f}">\n'
    )
    yield _properties({key: value for key, value in properties.items() if value})
    for case in several:
        yield _case(case)
    yield "</testsuite>\n"


def _case(case: _Case) -> str:
    classname, name = _names(case.test)
    time = "" if case.seconds is None else f' time="{case.seconds:.3f}"'
    inner = _properties(case.properties)
    if case.state:
        kind = f" type={_attribute(case.kind)}" if case.kind else ""
        inner += f"<{case.state}{kind} message={_attribute(case.message)}/>"
    return f"<testcase classname={_attribute(classname)} name={_attribute(name)}{time}>{inner}</testcase>\n"


def _properties(properties: Mapping[str, object]) -> str:
    if not properties:
        return ""
    inner = "".join(f"<property name={_attribute(k)} value={_attribute(str(v))}/>" for k, v in properties.items())
    return f"<properties>{inner}</properties>"


def _names(test: str) -> tuple[str, str]:
    """`tests/a.py::TestX::test_y[1::2]` as pytest's own JUnit files have it: `tests.a.TestX`, `test_y[1::2]`."""
    file, names, parameters = id_parts(test)
    if not names:
        return "", test
    classname = ".".join([file.removesuffix(".py").replace("/", "."), *names[:-1]])
    return classname, names[-1] + parameters


def _cases_of_kind(verdict: Verdict, kind: str) -> Iterator[_Case]:
    for test, judged in verdict.tests.items():
        on = {runner: by_kind[kind] for runner, by_kind in judged.finals.items() if kind in by_kind}
        if not on:
            continue
        failed = [result for result in on.values() if result.outcome in FAILED]
        result = failed[0] if failed else judged.kinds[kind]
        state, message = _state(result)
        if failed and "failed" not in judged.findings:
            state, message = "skipped", f"in quarantine: {message}"
        properties = {
            "runners": ", ".join(on),
            "cell": judged.cell,
            "findings": " ".join(judged.findings),
            "memory": result.memory,
            "parity": result.parity,
            "attempts": result.attempts if result.attempts > 1 else None,
            "idle": "true" if result.idle else None,
        }
        known = {key: value for key, value in properties.items() if value not in (None, "")}
        yield _Case(test, state, result.outcome if state else "", message, result.seconds, known)


def _state(result: Result) -> tuple[str, str]:
    if result.outcome in FAILED:
        return ("failure" if result.outcome == "failed" else "error"), result.message or result.outcome
    if result.outcome == "xfailed":
        return "skipped", "expected to fail, and did"
    return "", ""


def _nowhere(verdict: Verdict, test: str, judged: Judged) -> _Case:
    """A failure where that is red, else a skip."""
    is_red = "never-ran" in judged.findings and "never-ran" in verdict.red
    properties = {"cell": judged.cell, "findings": " ".join(judged.findings), "runners": ", ".join(judged.latest)}
    known = {key: value for key, value in properties.items() if value}
    state, kind = ("failure", "never-ran") if is_red else ("skipped", "")
    return _Case(test, state, kind, " | ".join(judged.reasons), None, known)


def _cases_of_verdict(verdict: Verdict) -> Iterator[_Case]:
    """What is red and has no failure in another suite."""
    for kind in verdict.red:
        for finding in verdict.findings[kind]:
            judged = verdict.tests.get(finding.subject) if KINDS[kind].is_of_tests else None
            is_told = judged is not None and (
                (kind == "never-ran" and not judged.finals)
                or (kind == "failed" and any(r.kind and r.is_failure for _, r in judged.results))
            )
            if not is_told:
                test = finding.subject if judged is not None else f"{KINDS[kind].title}::{finding.subject}"
                yield _Case(test, "failure", kind, f"{KINDS[kind].title}: {finding.text}".removesuffix(": "))


def _host_properties(verdict: Verdict, kind: str) -> dict[str, str]:
    """Software and drivers of the runs that have such devices, several values separated by commas."""
    found: dict[str, dict[str, None]] = {}
    for runner in verdict.runners:
        for run in runner.runs:
            if kind not in (run.kinds or ("CPU",)):
                continue
            host, software = run.facts["host"], run.facts["software"]
            facts = {
                "runner": runner.name,
                "driver": host.get("driver"),
                "torch": software["distributions"].get("torch"),
                "torch build": software.get("torch_build"),
                "transformers": software["distributions"].get("transformers"),
                "python": software.get("python"),
                "pytest": software.get("pytest"),
            }
            for name, value in facts.items():
                if value:
                    found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped."""


_PLAIN = re.compile(r"[ !#-%'-;=?-~]*")
"""What needs neither escaping nor a look: all that most attributes consist of."""


def _attribute(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return f'"{text}"'
    return quoteattr(_UNWRITABLE.sub(lambda match: f"#x{ord(match[0]):02X}", text))
