"""Observers: each watches every device and cell test for one thing, from its grant to the end of its fixtures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.verdict.finding import Finding

if TYPE_CHECKING:
    from pytest_cudaenv.cells import CellParameters
    from pytest_cudaenv.grants.grant import Grant
    from pytest_cudaenv.plan import Plan


class Observer(ABC):
    """Watches for one thing. Without torch imported it does nothing, and it never imports it."""

    def unwatched(self) -> None:  # noqa: B027
        """A test that nobody watches is next in this process, or none: what was put in place for others goes."""

    def before(self, item: pytest.Item) -> None:  # noqa: B027
        """A test that will be watched is next: nothing of it has run, and no other plugin's hook."""

    def begin(self, item: pytest.Item, plan: Plan, grant: Grant) -> None:  # noqa: B027
        """The test has its grant; its seed and its fixtures are next."""

    def wider_begins(self) -> None:  # noqa: B027
        """A fixture of a wider scope than a test is set up or torn down next, maybe while none is watched.

        Until `wider_ends`; such blocks may be nested.
        """

    def wider_ends(self, fixture: str, *, is_over: bool) -> None:  # noqa: B027
        """The end of that: the fixture in words, and whether it was torn down."""

    def call(self, item: pytest.Item) -> None:  # noqa: B027
        """The test's fixtures are there; its body is next."""

    def body_ends(self, item: pytest.Item) -> None:  # noqa: B027
        """The test's body has ended: reports of the phase "call" until now are of parts of it (subtests)."""

    def cell_begins(self, item: pytest.Item, cell: CellParameters) -> None:  # noqa: B027
        """In its body, a `unittest.TestCase` goes through its cells itself, and this one is next."""

    def cell_ends(self, item: pytest.Item, cell: CellParameters, *, is_over: bool) -> None:  # noqa: B027
        """The end of that; whether the test then asked for the next one, and neither raised nor left the loop."""

    @abstractmethod
    def note(
        self, item: pytest.Item, report: pytest.TestReport, record: dict[str, Any], call: pytest.CallInfo[None]
    ) -> Iterable[Finding]:
        """A phase of the test has ended: what was found, and what its ledger is to tell, into `record`.

        The teardown's comes after `end`.
        """

    def explain(self, item: pytest.Item, report: pytest.TestReport) -> None:  # noqa: B027
        """A phase has failed, maybe by what was noted: what is to be shown below the failure."""

    def end(self, item: pytest.Item) -> None:  # noqa: B027
        """The test's own fixtures are gone."""


class Observers:
    """All of them, for one run."""

    def __init__(self, observers: Sequence[Observer], *, strict: bool) -> None:
        self.observers = tuple(observers)
        self.strict = strict
        self._watched: pytest.Item | None = None

    def unwatched(self) -> None:
        for observer in self.observers:
            observer.unwatched()

    def before(self, item: pytest.Item) -> None:
        """See `Observer`; so are the others."""
        for observer in self.observers:
            observer.before(item)

    def wider_begins(self) -> None:
        for observer in self.observers:
            observer.wider_begins()

    def wider_ends(self, fixture: str = "", *, is_over: bool = False) -> None:
        for observer in reversed(self.observers):
            observer.wider_ends(fixture, is_over=is_over)

    def begin(self, item: pytest.Item, plan: Plan, grant: Grant) -> None:
        self._watched = item
        for observer in self.observers:
            observer.begin(item, plan, grant)

    def call(self, item: pytest.Item) -> None:
        for observer in self.observers if self._watched is item else ():
            observer.call(item)

    def body_ends(self, item: pytest.Item) -> None:
        for observer in self.observers if self._watched is item else ():
            observer.body_ends(item)

    def cell_begins(self, item: pytest.Item, cell: CellParameters) -> None:
        for observer in self.observers if self._watched is item else ():
            observer.cell_begins(item, cell)

    def cell_ends(self, item: pytest.Item, cell: CellParameters, *, is_over: bool) -> None:
        for observer in reversed(self.observers) if self._watched is item else ():
            observer.cell_ends(item, cell, is_over=is_over)

    def end(self, item: pytest.Item) -> None:
        for observer in reversed(self.observers) if self._watched is item else ():
            observer.end(item)

    def note(
        self, item: pytest.Item, report: pytest.TestReport, record: dict[str, Any], call: pytest.CallInfo[None]
    ) -> None:
        """Put what was found on a report, and fail it where it must not pass."""
        if self._watched is not item:
            return
        found = [f for observer in self.observers for f in observer.note(item, report, record, call)]
        if report.when == "teardown":
            self._watched = None
        if found:
            record["findings"] = [finding.as_data() for finding in found]
        fatal = [finding for finding in found if finding.is_failure or self.strict]
        if fatal and compat.has_passed(report):
            told = (f"{finding}{'' if finding.is_failure else ' (--cuda-strict)'}" for finding in fatal)
            compat.fail(report, "\n".join(told))
        if report.outcome == "failed":
            for observer in self.observers:
                observer.explain(item, report)
