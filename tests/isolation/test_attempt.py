"""What the pytest process does about device processes that no process can be made to be: stuck inside the kernel."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from pytest_cudaenv import attempt as module
from pytest_cudaenv.attempt import Attempt, death
from pytest_cudaenv.grants.remains import TELL, Remains, stacks_as_shown
from pytest_cudaenv.grants.source import Child
from pytest_cudaenv.grants.transport import Channel, channels
from pytest_cudaenv.session import SESSION


class Process(Child):
    """A device process that notes which signals it gets, and ends on those that it takes."""

    def __init__(self, channel: Channel, takes: set[int]) -> None:
        super().__init__(999_999_999, channel)
        self.takes = takes
        self.signals: list[int] = []

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.signals.append(number)
        if number == TELL and TELL in self.takes:
            os.write(self.remains.files["stacks"], b"Current thread\n  File x, line 3 in stuck\n")
        elif number in self.takes:
            self.status = number


class Source:
    """Knows one process, whose death comes when it has been killed."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def note_deaths(self) -> bool:
        return True

    def wait(self, child: Child, seconds: float) -> bool:
        return child.status is not None


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = channels()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def attempt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.setattr(module, "GRACE", 0.0)
    return Attempt(request.config.stash[SESSION], request.node, is_published=False)


@pytest.mark.parametrize(
    ("takes", "signals", "text"),
    [
        ({TELL, signal.SIGKILL}, [TELL, signal.SIGKILL], "of its deadline and was killed during call"),
        ({signal.SIGKILL}, [TELL, signal.SIGKILL], "of its deadline and was killed during call"),
        (
            set(),
            [TELL, signal.SIGKILL],
            "was killed without effect, as it is stuck inside the kernel: its devices stay locked during call",
        ),
    ],
    ids=["tells", "takes no signal", "stuck"],
)
def test_a_deadline(
    attempt: Attempt, ends: tuple[Channel, Channel], takes: set[int], signals: list[int], text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Remains, "wait_for_stacks", lambda *_: None)
    ours, theirs = ends
    child = Process(ours, takes)
    theirs.send({"phase": "call"})
    theirs.send({"deadline": 0.05})
    assert attempt.listen(Source(), child) is None  # type: ignore[arg-type]
    assert child.signals[:2] == signals
    attempt.fail_dead(child)
    failure = attempt.failure
    assert failure is not None
    assert text in failure.longreprtext
    assert failure.when == "call"
    attempt.flush()
    assert ("in stuck" in failure.longreprtext) == (TELL in takes)
    child.remains.close()


def test_a_deadline_is_suspended_and_the_latest_holds(attempt: Attempt) -> None:
    attempt._take({"deadline": 100.0})
    assert attempt.deadline is not None
    attempt._take({"deadline": None})
    assert attempt.deadline is None
    attempt.latest = 5.0
    attempt._take({"deadline": None})
    assert attempt.deadline == 5.0
    attempt._take({"deadline": 1e9})
    assert attempt.deadline == 5.0


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "vanished"), (9, "was killed by SIGKILL"), (11 | 128, "was killed by SIGSEGV"),
        (62, f"was killed by signal {62}"), (3 << 8, "ended with exit status 3"),
    ],
)  # fmt: skip
def test_how_a_process_ended_in_words(status: int | None, text: str) -> None:
    assert death(status) == text


def test_remains_are_shared_and_the_last_of_them_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Remains.make()
    theirs, rest = Remains.adopt([os.dup(file) for file in (*ours.filenos(), 0)])
    os.close(rest[0])
    os.write(theirs.files["out"], b"one")
    os.write(theirs.files["out"], b"two")
    assert ours.read("out") == "onetwo"
    os.ftruncate(theirs.files["out"], 0)
    os.write(theirs.files["out"], "drei\xff".encode() + b"\xff")
    assert ours.read("out") == "drei\xff\N{REPLACEMENT CHARACTER}"
    monkeypatch.setattr("pytest_cudaenv.grants.remains.MOST", 2)
    os.write(theirs.files["stacks"], b"abcdef")
    assert ours.read("stacks") == "ef"
    ours.forget_stacks()
    assert ours.read("stacks") == ours.read("err") == ""
    theirs.close()
    ours.close()
    ours.close()
    assert ours.read("out") == ""


def test_text_that_is_no_stack_is_left_as_it_is() -> None:
    assert stacks_as_shown("  Timeout (>1.0s) from pytest-timeout.\n") == "Timeout (>1.0s) from pytest-timeout."
    assert stacks_as_shown("") == ""
