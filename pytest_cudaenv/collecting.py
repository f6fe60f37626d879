"""Collects a suite in a pytest of its own, for commands that ask what its tests need."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_cudaenv.ledger.suite import Suite, SuiteError, read_suite

NO_TESTS = 5
"""pytest.ExitCode.NO_TESTS_COLLECTED: importing pytest to know it would cost as much as the rest."""


class CollectionFailed(Exception):
    """There is no suite, or not a whole one; the text has what pytest printed."""


def collect(arguments: Sequence[str], simulate: str | None = None, assume: Sequence[str] = ()) -> Suite:
    """The suite that pytest collects with these arguments, in the folder and environment of this process.

    Raises CollectionFailed where a file cannot be collected: a suite that lacks its tests would seem whole.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *arguments]
    if simulate is not None:
        command += ["--cuda-simulate", simulate]
    for distribution in assume:
        command += ["--cuda-assume", distribution]
    with tempfile.TemporaryDirectory(prefix="cudaenv-") as folder:
        path = Path(folder) / "suite.jsonl"
        done = subprocess.run(
            [*command, "--cuda-plan", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        printed = done.stdout.decode(errors="replace").strip()
        if done.returncode not in {0, NO_TESTS}:
            raise CollectionFailed(f"{printed}\npytest --collect-only ended with status {done.returncode}")
        try:
            with path.open(encoding="utf-8") as file:
                suite = read_suite(file)
        except OSError:
            raise CollectionFailed(
                f"{printed}\npytest told of no suite: is pytest-cudaenv switched off (ini cuda = false, -p no:cudaenv)?"
            ) from None
        except SuiteError as error:
            raise CollectionFailed(f"{printed}\n{error}") from None
    if not suite.tests and not suite.uncollected:
        raise CollectionFailed(f"{printed}\nno tests were collected")
    return suite
