"""The quarantine: tests that may fail for a while, each with an owner, a reason and a date, as a TOML file."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

EXCUSABLE = ("failed", "breach", "never-ran", "cpu-only", "idle", "lost")
"""Findings of single tests that an entry can excuse."""

GRAMMAR = (
    "write [[quarantine]] with tests (a glob or several; * and ? only), owner, until (YYYY-MM-DD), reason or issue, "
    f"and where wanted runners, flaky = true, excuses (of {', '.join(EXCUSABLE)})"
)


class QuarantineError(ValueError):
    """A quarantine that cannot be read; the message is one line."""


@dataclass(frozen=True)
class Entry:
    """Tests that may fail until a date."""

    tests: tuple[str, ...]
    """Globs over whole ids: `*` is any text and `?` any character; brackets are brackets."""
    owner: str
    until: datetime.date
    """The last day on which it excuses anything."""
    reason: str = ""
    issue: str = ""
    runners: tuple[str, ...] = ()
    """Excuses failures on these alone; empty: on every runner."""
    flaky: bool = False
    """Its tests fail now and then: that they pass does not make it stale."""
    excuses: tuple[str, ...] = ("failed",)

    def __str__(self) -> str:
        return f"{', '.join(self.tests)} ({self.owner}, until {self.until}{'; ' if self.why else ''}{self.why})"

    @property
    def why(self) -> str:
        return " ".join(text for text in (self.reason, self.issue) if text)

    def is_expired(self, today: datetime.date) -> bool:
        return today > self.until

    def covers_runner(self, runner: str) -> bool:
        return not self.runners or runner in self.runners

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(_regular(glob) for glob in self.tests), re.DOTALL)

    def matching(self, tests: Mapping[str, object]) -> list[str]:
        """Those of the tests that it means."""
        if not any(set("*?") & set(glob) for glob in self.tests):
            return [test for test in dict.fromkeys(self.tests) if test in tests]
        matches = self._pattern.fullmatch
        return [test for test in tests if matches(test)]


def _regular(glob: str) -> str:
    # Not fnmatch: ids are full of brackets, which mean themselves here.
    return "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in glob)


def parse_quarantine(text: str) -> tuple[Entry, ...]:
    """The entries of a quarantine file. Raises QuarantineError, with the grammar."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pytest itself depends on it there
        import tomli as tomllib
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise QuarantineError(f"is not TOML: {error}") from None
    if set(data) - {"quarantine"} or not isinstance(data.get("quarantine", []), list):
        raise QuarantineError(f"has something other than [[quarantine]]: {GRAMMAR}")
    return tuple(_entry(number, entry) for number, entry in enumerate(data.get("quarantine", []), start=1))


def _entry(number: int, data: Any) -> Entry:
    def wrong(what: str) -> QuarantineError:
        return QuarantineError(f"entry {number}: {what}: {GRAMMAR}")

    if not isinstance(data, dict):
        raise wrong("is not a table")
    known = {"tests", "owner", "until", "reason", "issue", "runners", "flaky", "excuses"}
    if unknown := sorted(set(data) - known):
        raise wrong(f"unknown {', '.join(unknown)}")
    until = data.get("until")
    if isinstance(until, str):
        try:
            until = datetime.date.fromisoformat(until)
        except ValueError:
            raise wrong(f"until = {until!r} is no date") from None
    elif isinstance(until, datetime.datetime):
        until = until.date()
    if not isinstance(until, datetime.date):
        raise wrong("no until")
    owner, reason, issue = (data.get(name, "") for name in ("owner", "reason", "issue"))
    if not all(isinstance(text, str) for text in (owner, reason, issue)):
        raise wrong("owner, reason and issue are texts")
    tests = _texts(data.get("tests", ()))
    runners = _texts(data.get("runners", ()))
    excuses = _texts(data.get("excuses", ("failed",)))
    if tests is None or runners is None or excuses is None:
        raise wrong("tests, runners and excuses are a text or a list of texts")
    if not tests:
        raise wrong("no tests")
    if not owner.strip():
        raise wrong("no owner")
    if not (reason.strip() or issue.strip()):
        raise wrong("neither reason nor issue")
    if bad := [name for name in excuses if name not in EXCUSABLE]:
        raise wrong(f"excuses {bad[0]!r}")
    if not isinstance(data.get("flaky", False), bool):
        raise wrong("flaky is true or false")
    return Entry(tests, owner, until, reason, issue, runners, data.get("flaky", False), excuses)


def _texts(value: Any) -> tuple[str, ...] | None:
    """A text or a list of texts, as a tuple; None for anything else."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
        return None
    return tuple(values)
