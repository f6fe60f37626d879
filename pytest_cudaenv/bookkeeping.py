"""What a run accounts for: its ledger, and its contract. One for each run; under xdist the controller's."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv._version import __version__
from pytest_cudaenv.ledger.contract import CODE, Contract, Promise, Runner, read_promise, read_runners
from pytest_cudaenv.ledger.record import Ledger, Report, run_facts
from pytest_cudaenv.options import RUNNERS

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession


def contract_of(session: CudaSession) -> Contract:
    """What the runner of a run promises. Raises pytest.UsageError, with the grammar."""
    settings = session.settings
    try:
        promises: list[Promise] = [read_promise(text) for text in settings.require]
    except ValueError as error:
        raise pytest.UsageError(f"--cuda-require: {error}") from None
    if settings.runner is not None:
        promises += runner_of(session.config, settings.runner).promises()
    return Contract(tuple(dict.fromkeys(promises)), settings.min_ran)


def runner_of(config: pytest.Config, name: str) -> Runner:
    """A profile by its name. Raises pytest.UsageError that names the choices."""
    try:
        runners = read_runners(config.getini(RUNNERS))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if name not in runners:
        choices = f"choose from {', '.join(sorted(runners))}" if runners else f"the ini key {RUNNERS} has no profile"
        raise pytest.UsageError(f"--cuda-runner: {name!r}: {choices}")
    return runners[name]


class Bookkeeping:
    """Keeps the ledger, and holds the run to its contract."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self.ledger: Ledger | None = None
        self._is_told = False
        self._held: dict[str, list[pytest.TestReport]] = {}
        """Of tests whose last report is still to come."""
        self._deselected: list[tuple[str, dict[str, Any]]] = []
        self._refused: dict[str, dict[str, Any]] = {}
        """Modules that skipped themselves for something promised."""
        self.ran = 0
        """Tests whose body ran."""
        self.ran_on_cuda = 0
        """Those of them that held a CUDA device."""
        self.verdict: str | None = None
        """Why the run as a whole fails, where no test of it does."""

    def check(self) -> None:
        """Before anything is collected: refuse a host that lacks what was promised, and a ledger that can't be kept.

        Raises pytest.UsageError with need, have and remedy of each.
        """
        broken = self.session.contract.broken(self.session.unmet)
        if broken:
            raise pytest.UsageError(*(str(one) for one in broken))
        path = self._path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        except OSError as error:
            raise pytest.UsageError(
                f"--cuda-ledger {path}: {error.strerror}: name a file that can be written"
            ) from None

    @cached_property
    def _path(self) -> Path | None:
        text = self.session.settings.ledger
        return None if text is None else self.session.config.invocation_params.dir / os.path.expanduser(text)

    def start(self, ids: Sequence[str]) -> None:
        """Once it is known which tests are selected; more can be told of later."""
        if self._path is None:
            return
        if self.ledger is None:
            session, contract = self.session, self.session.contract
            run = run_facts(
                session.host,
                session.reading,
                os.environ,
                plugin=__version__,
                python=platform.python_version(),
                pytest=pytest.__version__,
                provenance=session.settings.provenance,
                promises=[promise.text for promise in contract.promises],
                runner=session.settings.runner,
                arguments=[str(argument) for argument in session.config.invocation_params.args],
            )
            self.ledger = Ledger(self._path.open("w", encoding="utf-8"), run)
            for nodeid, record in self._deselected:
                self.ledger.unrun(nodeid, "deselected", record)
            for nodeid, record in self._refused.items():
                self.ledger.unrun(nodeid, "error", record)
        self.ledger.collected(ids)

    def start_once(self, ids: Sequence[str]) -> None:
        """The same from one of xdist's workers, all of which have selected the same."""
        if not self._is_told:
            self._is_told = True
            self.start(ids)

    def add(self, report: pytest.TestReport) -> None:
        """Take in one of pytest's reports."""
        # A test is written with its last report: all at once costs half of what each in turn does.
        self._held.setdefault(report.nodeid, []).append(report)
        if report.when not in {"setup", "call"}:
            self._take_in(self._held.pop(report.nodeid))

    def _take_in(self, reports: Sequence[pytest.TestReport]) -> None:
        for report in reports:
            if compat.is_subtest(report) and report.outcome != "failed":
                continue  # a part: what becomes of the test is told by its own report
            record: dict[str, Any] = getattr(report, "cudaenv", None) or {}
            is_test = not compat.is_subtest(report)
            if report.when == "call" and report.outcome in {"passed", "failed"} and "breach" not in record and is_test:
                self.ran += 1
                self.ran_on_cuda += record.get("ran_on") not in {None, "CPU"}
            if self.ledger is not None:
                self.ledger.add(
                    Report(
                        report.nodeid,
                        str(report.when),
                        report.outcome,
                        report.duration,
                        message=_message(report),
                        xfail=hasattr(report, "wasxfail"),
                        worker=getattr(report, "worker_id", None),
                        record=record,
                    )
                )

    def deselect(self, nodeid: str, record: dict[str, Any]) -> None:
        """A test that was left out because its needs are not met."""
        self._deselected.append((nodeid, record))

    def refuse(self, nodeid: str, record: dict[str, Any]) -> None:
        """A module that skipped itself for something promised: the run goes on, and fails."""
        if nodeid not in self._refused:
            self._refused[nodeid] = record
            if self.ledger is not None:
                self.ledger.unrun(nodeid, "error", record)

    def end(self, status: int) -> int:
        """After the last test: the exit status that the contract leaves of pytest's own."""
        for reports in self._held.values():
            self._take_in(reports)
        self._held.clear()
        contract = self.session.contract
        has_contract = bool(contract.promises) or contract.min_ran is not None or self.session.allows_no_skip
        if status in {0, int(pytest.ExitCode.NO_TESTS_COLLECTED)} and has_contract:
            if contract.min_ran is not None and self.ran_on_cuda < contract.min_ran:
                self.verdict = (
                    f"[{CODE}] needs {contract.min_ran} tests that ran on a CUDA device (--cuda-min-ran); "
                    f"have {self.ran_on_cuda}"
                )
            elif self._refused:
                count = len(self._refused)
                modules = f"{count} module{'s' if count > 1 else ''}"
                names = ", ".join(self._refused)
                self.verdict = f"[{CODE}] needs what was promised to run; have {modules} that skipped for it: {names}"
            elif not self.ran:
                self.verdict = f"[{CODE}] needs a test that ran; have none: a run that tests nothing is no success"
        if self.verdict is not None:
            status = int(pytest.ExitCode.TESTS_FAILED)
        if self.ledger is not None:
            self.ledger.end(status, time.monotonic() - self.session.began)
            self.ledger = None
        return status


def _message(report: pytest.TestReport) -> str | None:
    """The first line of a failure, or the text of a skip; None for what passed."""
    if report.outcome == "passed":
        return None
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "").strip()
    return text.partition("\n")[0][:300] or None
