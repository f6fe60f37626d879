"""What holds for every test: how many processes run them, and how many threads each computes on."""

from __future__ import annotations

import os

import pytest

# Tiny models compute in microseconds; threads that wait for each other, on cores that other workers use, take ten times
# as long. The test whose subject is OpenMP's pool asks for its threads itself. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: half as many workers again as cores, for many tests wait: for deadlines, deaths and processes."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2
