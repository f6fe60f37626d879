"""A fresh interpreter as a device process: pytest with the run's own arguments, collecting a file when it is needed."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

import pytest_cudaenv
from pytest_cudaenv import compat
from pytest_cudaenv.grants import coverage_data
from pytest_cudaenv.grants.device_process import DeviceProcess
from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.process import die_with_parent, end
from pytest_cudaenv.grants.remains import Remains
from pytest_cudaenv.grants.transport import Channel, Message
from pytest_cudaenv.session import INTERPRETER, SESSION

ELSEWHERE = "elsewhere"
"""Stands for a next test of another file: everything but session fixtures is torn down."""

RESET: dict[str, Any] = {
    # Who runs the tests, and which: the pytest process has decided that.
    "numprocesses": None, "maxprocesses": None, "dist": "no", "distload": False, "tx": [], "loadgroup": False,
    "looponfail": False, "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False,
    "stepwise_skip": False, "cacheclear": False, "keyword": "", "markexpr": "", "deselect": None, "collectonly": False,
    # Files that the pytest process writes; but for junitxml's, whose fixtures need to know of it.
    "htmlpath": None, "report_log": None, "json_report": False, "log_file_mode": "a",
}  # fmt: skip
"""Options that a fresh interpreter does not take from the run."""


def order(config: pytest.Config, number: int) -> Message:
    """What a fresh interpreter needs to be like this pytest process; `number` tells it from others of the run."""
    simple = (str, int, float, bool, type(None))
    options = {
        name: value
        for name, value in vars(config.option).items()
        if isinstance(value, simple) or (isinstance(value, list) and all(isinstance(v, simple) for v in value))
    }
    options |= {name: value for name, value in RESET.items() if hasattr(config.option, name)}
    if (basetemp := compat.make_basetemp(config)) is not None:
        # Not the run's own, which a pytest that is told of it clears at its start.
        options["basetemp"] = str(basetemp / f"popen-cuda{number}")
    arguments = [str(argument) for argument in config.invocation_params.args]
    if hasattr(config.option, "no_cov"):
        arguments.insert(0, "--no-cov")  # pytest-cov would write, and erase, the files of the run
    return {
        "arguments": arguments,
        "argv": sys.argv,
        "options": options,
        "workerinput": getattr(config, "workerinput", None),
        "coverage": coverage_data.settings(),
    }


def main(parent: int, channel: int, *files: int) -> NoReturn:
    """Be a device process over these open descriptors, started by the keeper `parent`."""
    die_with_parent(parent)
    for descriptor in (channel, *files):
        os.set_inheritable(descriptor, False)
    ours = Channel(socket.socket(fileno=channel))
    message = ours.receive()
    if message is None:
        os._exit(0)
    message["zygote"] = parent  # it adopts orphans
    if message["coverage"] is not None:
        coverage_data.start(message["coverage"])
    sys.argv = message["argv"]
    # Or pytest warns, under `-W error` fatally, that it has been imported too early to have its asserts rewritten.
    pytest_cudaenv.__doc__ = f"{pytest_cudaenv.__doc__}\n\nPYTEST_DONT_REWRITE"
    remains, lease = Remains.adopt(files)
    plugin = Interpreter(ours, message, remains, Lease.adopt(lease, message["devices"]))
    status = pytest.main(message["arguments"], plugins=[plugin])
    end(int(status) or 1)  # pytest itself refused to run


class Interpreter:
    """The plugin of a fresh interpreter: takes the place of pytest's own loop over the tests."""

    __name__ = INTERPRETER  # by which pluggy registers it

    def __init__(self, channel: Channel, message: Message, remains: Remains, lease: Lease) -> None:
        self.channel = channel
        self.order = message
        self.remains = remains
        self.lease = lease
        self.items: dict[str, pytest.Item] = {}
        self.errors: list[str] = []
        self.collected: set[str] = set()

    @property
    def outer(self) -> dict[str, str]:
        """The pytest process's view of the devices: what is asked of them while collecting has the same answers."""
        view: dict[str, str] = self.order["outer"]
        return view

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        vars(config.option).update(self.order["options"])
        config.args[:] = [self.order["path"]]
        self.collected.add(self.order["path"])
        if self.order["workerinput"] is not None:
            config.workerinput = self.order["workerinput"]  # type: ignore[attr-defined]
            config.workeroutput = {}  # type: ignore[attr-defined]
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if (reporter := config.pluginmanager.get_plugin("terminalreporter")) is not None:
            compat.silence(config, reporter)
        compat.silence_junit(config)
        if self.order["coverage"] is not None and getattr(config.option, "cov_context", None) == "test":
            config.pluginmanager.register(TestContexts(), "cudaenv-test-contexts")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        # Here, and not from the session: what plugins deselect is the pytest process's to decide.
        self.items.setdefault(item.nodeid, item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.errors.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        state = session.config.stash[SESSION]
        state.enter_device_process()

        def find(wanted: Any) -> pytest.Item:
            if wanted == ELSEWHERE:
                return session  # type: ignore[return-value]  # as a node, all that the next test shares with this one
            return self._find(session, wanted)

        device_process = DeviceProcess(session, self.channel, self.remains, self.lease, find)
        end(0, before=lambda: device_process.serve(self.order))

    def _find(self, session: pytest.Session, wanted: dict[str, str]) -> pytest.Item:
        state, path, nodeid = session.config.stash[SESSION], wanted["path"], wanted["nodeid"]
        if path not in self.collected:
            self.collected.add(path)
            self.errors.clear()
            with state.collecting_again(self.outer), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the pytest process has shown them
                session.perform_collect([path])
        if (item := self.items.get(nodeid)) is None:
            raise LookupError("\n".join(self.errors) or f"{nodeid} was not collected again")
        return item


class TestContexts:
    """What `--cov-context=test` does, by the same names: pytest-cov itself is kept from measuring here.

    https://pytest-cov.readthedocs.io/en/latest/contexts.html
    """

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        coverage_data.switch_context(f"{item.nodeid}|setup")

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        coverage_data.switch_context(f"{item.nodeid}|run")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        coverage_data.switch_context(f"{item.nodeid}|teardown")
