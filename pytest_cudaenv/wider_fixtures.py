"""Telling what a test does from what is done while it runs: fixtures of a wider scope, and modules being collected."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat

if TYPE_CHECKING:
    from pytest_cudaenv.observers import Observers

NAME = "cudaenv-wider-fixtures"
"""Under which the plugin is registered."""


class WiderFixtures:
    """A plugin, registered where some test uses this package's: it tells observers where a test's own doing pauses."""

    def __init__(self, observers: Observers) -> None:
        self.observers = observers
        self._ending: set[int] = set()
        """Fixtures whose teardown has begun."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        self.observers.wider_begins()
        try:
            return (yield)
        finally:
            self.observers.wider_ends(_in_words(fixturedef))
            # Finalizers run last in, first out: this one is the beginning of the fixture's own teardown.
            compat.add_finalizer(fixturedef, lambda: self._begin_ending(fixturedef))

    def _begin_ending(self, fixturedef: Any) -> None:
        self._ending.add(id(fixturedef))
        self.observers.wider_begins()

    @pytest.hookimpl(trylast=True)
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        if id(fixturedef) in self._ending:
            self._ending.discard(id(fixturedef))
            self.observers.wider_ends(_in_words(fixturedef), is_over=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        self.observers.wider_begins()
        try:
            return (yield)
        finally:
            self.observers.wider_ends()


def _in_words(fixturedef: Any) -> str:
    return f"{fixturedef.scope}-scoped fixture {fixturedef.argname}"


def watch_wider_fixtures(config: pytest.Config, observers: Observers) -> None:
    """Have these observers told, in place of those of the process that this one was forked from."""
    manager = config.pluginmanager
    if manager.has_plugin(NAME):
        manager.unregister(name=NAME)
    manager.register(WiderFixtures(observers), NAME)
