"""A device process: forked with its mask set, it runs whole tests and streams their reports back."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.grants.family import Family
from pytest_cudaenv.grants.handover import hand_over
from pytest_cudaenv.grants.lease import Lease
from pytest_cudaenv.grants.own_process import become
from pytest_cudaenv.grants.remains import Remains
from pytest_cudaenv.grants.transport import Channel, Message
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES

MUTED = ("pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish", "pytest_warning_recorded")
"""Hooks by which others report. They are called in the pytest process, which is sent what they need."""


def _mask() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in (VISIBLE_DEVICES, DEVICE_ORDER)}


def uses_cuda() -> bool:
    """Whether torch has initialised CUDA in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def broken_context() -> str | None:
    """The error that every further CUDA call of this process would raise; None where CUDA is well, or not in use."""
    if not uses_cuda():
        return None
    try:
        torch = sys.modules["torch"]
        for index in range(torch.cuda.device_count()):
            if _has_context(torch, index):
                torch.cuda.synchronize(index)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    except Exception:
        return None  # another torch, which answers otherwise: that is no broken context
    return None


def _has_context(torch: Any, index: int) -> bool:
    """Whether this process uses a device: asking one that it does not would make a context there, which takes memory.

    torch has no public question: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/cuda/Module.cpp
    """
    ask = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    return index == torch.cuda.current_device() if ask is None else bool(ask(index))


class _BrokenContext(BaseException):
    """Ends the protocol of a test that is to run again, in another process. No `except Exception` may hold it up."""


class DeviceProcess:
    """The process's own end: a plugin that sends what the muted hooks would have reported."""

    def __init__(
        self,
        session: pytest.Session,
        channel: Channel,
        remains: Remains,
        lease: Lease,
        find: Callable[[Any], pytest.Item],
    ) -> None:
        self.session = session
        self.channel = channel
        self.remains = remains
        self.lease = lease
        """Held here too: the devices of a process that outlives the pytest process are not free."""
        self.find = find
        """The test that a message names. Raises LookupError that says why there is none."""
        self.last: pytest.Item | None = None
        self.line: str | None = None
        """The terminal's line, as the pytest process knows it."""
        self.is_serving = self.is_started = self.is_ending = False
        self.changed_mask: dict[str, str | None] | None = None
        """As it was before the body of the running test, which has changed it."""
        self.tests = 0
        """How many have been run, reruns by pytest-rerunfailures within one."""
        self.timer: threading.Timer | None = None
        """Of pytest-timeout's method `thread`."""

    def serve(self, order: Message) -> None:
        """Run tests as they are asked for, until there are no more."""
        for name, value in order["environ"].items():
            os.environ[name] = value
        become(order["id"])
        self.family = Family(order["tag"], order["zygote"])
        config = self.session.config
        self._leave_remains(config)
        logging = config.pluginmanager.get_plugin("logging-plugin")  # its live log begins anew with each test
        compat.mute(config, MUTED, keep=(self.session, logging))
        config.pluginmanager.register(self, "cudaenv-device-process")  # which tells it of all warnings so far
        self.is_serving = True
        while (message := self.channel.receive()) is not None and "run" in message:
            self._run(message)
        self._tear_down(None)
        for process in self.family.end_process():
            self._warn_left_over(process, "was left running at the end of its device process, whose last test this is")
        self.channel.send({"closed": True, **hand_over(config)})

    def _leave_remains(self, config: pytest.Config) -> None:
        """Have what the pytest process wants to know after a death of this process written where it can read it."""
        is_of_suite = faulthandler.is_enabled() and not config.pluginmanager.has_plugin("faulthandler")
        self.remains.record_stacks(on_crash=not is_of_suite)
        compat.redirect_exit_on_timeout(config, self.remains.files["stacks"])
        captured = compat.mirror_capture(config, {kind: self.remains.files[kind] for kind in ("out", "err")})
        if captured:
            self.channel.send({"captured": captured})

    def _run(self, message: Message) -> None:
        answer: Message = {}
        self.session.testsfailed = message["testsfailed"]
        config = self.session.config
        self.line = message["line"]
        compat.set_terminal_line(config, self.line)
        if (reruns := message.get("reruns")) is not None:
            forced, config.option.force_reruns = config.option.force_reruns, reruns
        try:
            try:
                item = self.find(message["run"])
                nextitem = None if message["next"] is None else self.find(message["next"])
            except LookupError as error:
                answer["missing"] = str(error)
            else:
                self._tear_down(item)
                self.last, self.is_started = item, False
                self.tests += 1
                self.family.begin(self.tests)
                config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except _BrokenContext:
            answer["cut short"] = True
        except pytest.exit.Exception as error:
            answer["exit"] = {"reason": error.msg, "returncode": error.returncode}
        except KeyboardInterrupt:
            answer["interrupted"] = True
        except BaseException:
            answer["internal"] = traceback.format_exc()
        if reruns is not None:
            config.option.force_reruns = forced
        self._restore_mask()
        for process in self.family.end_test():
            self._warn_left_over(process, "was left running by this test")
        if (broken := broken_context()) is not None:
            answer["sticky"] = broken
        self.is_ending = "exit" in answer or "interrupted" in answer
        answer["done"] = {"shouldfail": self.session.shouldfail, "shouldstop": self.session.shouldstop}
        self.channel.send(answer)

    def _restore_mask(self) -> None:
        """Undo what a test's body did to the mask, where its own teardown has not: it would be the next one's."""
        if self.changed_mask is None:
            return
        for name, value in self.changed_mask.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.changed_mask = None

    def _warn_left_over(self, process: tuple[int, str], how: str) -> None:
        pid, command = process
        self._warn(f"[left-over] process {pid} ({command}) {how}; it was ended")

    def _warn(self, text: str) -> None:
        """Warn of what the last test did; never an error, as nothing of the test's can catch it."""
        if self.last is None:
            return
        path, line, name = self.last.location
        warning = warnings.WarningMessage(
            pytest.PytestWarning(text), pytest.PytestWarning, str(self.last.path), (line or 0) + 1
        )
        self.pytest_warning_recorded(warning, "runtest", self.last.nodeid, (path, line or 0, name))

    def _tear_down(self, nextitem: pytest.Item | None) -> None:
        """End what the next test does not need; an error of that is the last test's."""
        if self.last is None:
            return
        try:
            # Once the run is ending, pytest captures no more.
            with contextlib.nullcontext() if self.is_ending else compat.captured_late(self.last):
                compat.tear_down_to(self.session, nextitem)
        except Exception as error:
            self._send(compat.teardown_report(self.last, error), late=True)

    def _send(self, report: pytest.TestReport, *, late: bool = False) -> None:
        config = self.session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        message: Message = {
            "report": data,
            "late": late,
            "is_text": isinstance(report.longrepr, str),
            "failed_subtests": compat.failed_subtests(config, report),
            "junit": compat.junit_additions(config, report),
            "uses_cuda": uses_cuda(),
        }
        if (line := compat.terminal_line(config)) != self.line:
            message["line"] = self.line = line  # live logs were written
        self.channel.send(message)
        self.channel.receive()  # what this process prints next comes after what is printed of the report

    def pytest_runtest_logstart(self) -> None:
        if self.is_started:
            self.channel.send({"again": True})  # pytest-rerunfailures: another attempt
        self.is_started = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(report)
        if str(report.outcome) == "rerun" and broken_context() is not None:
            raise _BrokenContext  # pytest-rerunfailures would run the test again in this process, in vain

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self.family.of_wider_scope():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.channel.send({"phase": "setup"})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self.channel.send({"phase": "call"})
        before = _mask()
        try:
            return (yield)
        finally:
            self.changed_mask = before if _mask() != before else None
            if self.changed_mask is not None and uses_cuda():
                text = f"{VISIBLE_DEVICES} was changed while CUDA was in use, which has no effect in this process"
                self._warn(f"[mask-changed] {text}; what a test sees is decided by what it requires")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self.channel.send({"phase": "teardown"})

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool | None:
        # No signal handler runs inside a driver call: the pytest process watches the deadline as well.
        self.channel.send({"deadline": settings.timeout})
        if settings.method != "thread":
            return None
        # In place of pytest-timeout's own, which prints to the terminal and ends the process without another word.
        self.timer = threading.Timer(settings.timeout, self._time_out, (settings,))
        self.timer.daemon = True
        self.timer.start()
        return True

    def _time_out(self, settings: Any) -> None:
        """On a thread of its own: as pytest-timeout's method `thread` does, with all that it prints left behind."""
        is_debugging = getattr(sys.modules.get(type(settings).__module__), "is_debugging", None)
        if is_debugging is not None and not getattr(settings, "disable_debugger_detection", False) and is_debugging():
            return
        self.remains.write_stacks(f"Timeout (>{settings.timeout:.1f}s) from pytest-timeout.")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> None:
        self.channel.send({"deadline": None})
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()
            timer.join()

    def pytest_enter_pdb(self) -> None:
        self.channel.send({"deadline": None})  # pytest-timeout lets who debugs take their time, too

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if not self.is_serving:
            return
        category = warning_message.category
        self.channel.send(
            {
                "warning": {
                    "text": str(warning_message.message),
                    "module": category.__module__,
                    "category": category.__qualname__,
                    "filename": warning_message.filename,
                    "lineno": warning_message.lineno,
                },
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )
