"""What a run prints: the header once it is known that the suite uses the plugin, and the summary."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaenv.grants.grant import INHERITED_VARIABLE, TAG
from pytest_cudaenv.ledger.summary import Summary
from pytest_cudaenv.options import OPTIONS
from pytest_cudaenv.session import APPLIED

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that begin like this plugin's variables and are none, as a typing error makes them."""
    known = {option.variable for option in OPTIONS} | {APPLIED, INHERITED_VARIABLE, TAG}
    return sorted(name for name in environ if name.startswith("CUDAENV_") and name not in known)


class Reporting:
    """Prints for one run; under xdist in the controller, from what its workers say."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self.summary = Summary()
        self._failed_in_part: set[str] = set()
        """Tests of which a subtest has failed in this attempt."""

    def header(self) -> list[str]:
        """The header's lines; none under `-q`, whose output others read."""
        if self.session.config.get_verbosity() < 0:
            return []
        from pytest_cudaenv.host.driver import is_cuda_initialised
        from pytest_cudaenv.ledger.header import header_lines

        warnings = [f"{name} is not a variable of this plugin" for name in unknown_variables(os.environ)]
        if self.session.host.simulated is None and self.session.host.devices and is_cuda_initialised():
            warnings.append("CUDA was initialised while collecting; masks set from now on have no effect")
        lines = header_lines(
            self.session.host, self.session.reading, self.session.settings.provenance, os.environ, warnings
        )
        if self.session.config.get_verbosity() > 0 and self.session.has_questions:
            lines += [f"cudaenv: {asked}" for asked in self.session.questions.log]
        return lines

    @cached_property
    def mailbox(self) -> str:
        """Where local workers leave word for the controller; the first who has something to say makes it."""
        return str(Path(tempfile.gettempdir()) / f"cudaenv-{os.getpid()}-{os.urandom(8).hex()}")

    def tell_controller(self, mailbox: str) -> None:
        """In a worker: the suite uses the plugin."""
        with contextlib.suppress(OSError):  # another host, or a full disk: the header is not worth a failed run
            os.mkdir(mailbox, 0o700)

    def hear_worker(self) -> None:
        """In the controller: print the header once a worker has said that the suite uses the plugin."""
        if self.session.planned or not os.path.isdir(self.mailbox):
            return
        self.session.planned = True
        os.rmdir(self.mailbox)
        reporter = self.session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            for line in self.header():
                reporter.ensure_newline()
                reporter.write_line(line)

    def add(self, report: pytest.TestReport, record: Mapping[str, Any]) -> None:
        """Count one report; a subtest counts by itself where it did not run, and its test where it did."""
        from pytest_cudaenv import compat

        if not compat.is_subtest(report):
            if report.when == "setup":
                self._failed_in_part.discard(report.nodeid)
            # The report of a test of which a part has failed says that it passed.
            outcome = "failed" if report.when == "call" and report.nodeid in self._failed_in_part else report.outcome
            self.summary.add(report.nodeid, report.when, outcome, record)
            return
        if report.outcome == "failed":
            self._failed_in_part.add(report.nodeid)
        if report.outcome != "passed":
            self.summary.add(f"{report.nodeid} {compat.subtest_name(report)}", report.when, report.outcome, record)

    def print_summary(self, reporter: pytest.TerminalReporter) -> None:
        """After the run: what passed on which kind of device, and what did not run, by reason."""
        session = self.session
        if session.config.get_verbosity() < (0 if session.only_collects else -1):
            return
        simulated = session.settings.simulate
        lines = self.summary.lines("would run" if session.only_collects else "passed")
        lines += self.summary.waiting.lines(time.monotonic() - session.began)
        if session.keeps_books and session.bookkeeping.verdict is not None:
            lines.append(session.bookkeeping.verdict)
        if simulated and not session.only_collects:
            lines.insert(0, f"SIMULATED {simulated}: nothing here ran on such a device")
        if lines:
            reporter.ensure_newline()
            reporter.section(f"cudaenv: what {'would run' if session.only_collects else 'ran'} where")
            for line in lines:
                reporter.write_line(line)

    def end(self) -> None:
        """Take away what was left for workers to find."""
        if "mailbox" in self.__dict__:
            with contextlib.suppress(OSError):
                os.rmdir(self.mailbox)
            if Path(self.mailbox).name.startswith(f"cudaenv-{os.getpid()}-"):  # and not a process forked since
                shutil.rmtree(f"{self.mailbox}-kernels", ignore_errors=True)
