"""A pytest plugin: the median time from the end of one test to the end of the next, written to the file $GAPS.

So the start of a run and its imports are no part of it, and what else the machine does hardly is.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import pytest

HERE = os.getpid()

_ends: list[float] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _ends.append(time.perf_counter())


def pytest_sessionfinish() -> None:
    if os.getpid() == HERE and len(_ends) > 1:
        gaps = [after - before for before, after in pairwise(_ends)]
        Path(os.environ["GAPS"]).write_text(str(statistics.median(gaps)))
