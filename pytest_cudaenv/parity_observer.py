"""Puts on a test's report what `assert_parity` found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pytest_cudaenv.fixtures.verdict import PARITY
from pytest_cudaenv.observers import Observer
from pytest_cudaenv.verdict.finding import Finding


class ParityObserver(Observer):
    """The worst of a test's comparisons, also of a test that failed."""

    def note(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        record: dict[str, Any],
        call: pytest.CallInfo[None],  # noqa: ARG002  # the observer's interface
    ) -> Iterable[Finding]:
        """See `Observer`."""
        compared = item.stash.get(PARITY, None) if report.when == "call" else None
        if compared is not None and (found := compared.summary()) is not None:
            record["parity"] = found
        return ()
