"""The state guard as an observer: each device and cell test starts from known global state, and gives it back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.importing import Announcer
from pytest_cudaenv.observers import Observer
from pytest_cudaenv.verdict.finding import Finding
from pytest_cudaenv.verdict.state import CODE, REMEDY, Guard, Leak, leak_text

if TYPE_CHECKING:
    from pytest_cudaenv.grants.grant import Grant
    from pytest_cudaenv.plan import Plan


class StateObserver(Observer):
    """Names what a test left changed; it is set back in any case."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.guard.look()
        self._leaks: list[Leak] = []
        self._announcer: Announcer | None = None

    def before(self, item: pytest.Item) -> None:
        self.guard.before()

    def begin(self, item: pytest.Item, plan: Plan, grant: Grant) -> None:
        self._leaks = []
        self.guard.begin()
        if sys.modules.get("torch") is None:
            self._announcer = Announcer({"torch"}, self._imported)
            self._announcer.install()

    def _imported(self, module: ModuleType) -> None:
        self.guard.imported()

    def wider_begins(self) -> None:
        self.guard.wider_begins()

    def wider_ends(self, fixture: str, *, is_over: bool) -> None:
        self.guard.wider_ends()

    def note(
        self, item: pytest.Item, report: pytest.TestReport, record: dict[str, Any], call: pytest.CallInfo[None]
    ) -> Iterable[Finding]:
        if report.when == "teardown" and self._leaks:
            yield Finding(CODE, leak_text(self._leaks), REMEDY)

    def end(self, item: pytest.Item) -> None:
        if self._announcer is not None:
            self._announcer.remove()
        self._announcer = None
        self._leaks = self.guard.end()
