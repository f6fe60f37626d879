"""Processes by what /proc tells of them, and by who holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaenv.grants import family
from pytest_cudaenv.grants.grant import TAG
from pytest_cudaenv.grants.holders import held
from tests.grants.processes import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_children_and_what_is_below_them(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = (
        f"import subprocess, time; pid = subprocess.Popen({SLEEP!r}).pid; open({str(noted)!r}, 'w').write(f'{{pid}} ')"
    )
    started.append(subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(600)"]))
    until(lambda: noted.exists() and noted.read_text().endswith(" "))
    grandchild = int(noted.read_text())
    assert started[0].pid in family.children(os.getpid())
    found = family.below([started[0].pid])
    assert [process.pid for process in found] == [started[0].pid, grandchild]
    assert family.below([started[0].pid], stop=lambda process: process.pid == grandchild) == found[:1]
    family.end_all(found)
    assert family.below([started[0].pid]) == []
    assert family.relative(grandchild) is None


def test_children_where_the_kernel_does_not_list_them(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started.append(subprocess.Popen(SLEEP))

    def no_list(path: str, *arguments: object, **keywords: object) -> object:
        if str(path).endswith("/children"):
            raise FileNotFoundError(path)
        return open(path, *arguments, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(family, "open", no_list, raising=False)
    monkeypatch.setattr(family.os.path, "exists", lambda path: False)
    assert started[0].pid in family.children(os.getpid())


def test_whether_there_are_children() -> None:
    code = "from pytest_cudaenv.grants.family import *; import subprocess; before = has_children(); "
    code += "child = subprocess.Popen(['sleep', '0']); print(before, has_children(), child.wait(), has_children())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "0", "False"]


def test_a_name_may_hold_anything(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    started.append(subprocess.Popen([str(program), "600"]))
    [process] = family.below([started[0].pid])
    assert process.born.isdecimal()
    until(lambda: bool(Path(f"/proc/{process.pid}/cmdline").read_bytes()))  # a moment after it has begun
    told, whole = family.command_line(process.pid), f"{program} 600"
    assert told == whole or (len(told) == 80 and whole.startswith(told.removesuffix("…")))


def test_a_zombie_has_ended(started: list[subprocess.Popen[bytes]]) -> None:
    started.append(subprocess.Popen(["sleep", "0"]))
    until(lambda: family.relative(started[0].pid) is None)
    assert Path(f"/proc/{started[0].pid}").exists()


def test_a_number_that_is_used_again_is_another_process(started: list[subprocess.Popen[bytes]]) -> None:
    started.append(subprocess.Popen(SLEEP))
    [process] = family.below([started[0].pid])
    family.end_all([process._replace(born="1")])
    assert family.relative(process.pid) == process


def test_who_takes_no_notice_is_killed(started: list[subprocess.Popen[bytes]]) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
    assert started[0].stdout is not None
    started[0].stdout.readline()
    family.end_all(family.below([started[0].pid]), mercy=0.2)
    assert started[0].wait(10) == -signal.SIGKILL


def test_by_tag(started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"test-{os.getpid()}-{time.time_ns()}"
    for tag in (f"{run}:1:7", f"{run}:1:0", f"{run}:11:1"):
        monkeypatch.setenv(TAG, tag)
        started.append(subprocess.Popen(SLEEP))
    until(lambda: len(family.tagged(f"{run}:")) == 3)
    assert {process.pid for process in family.tagged(f"{run}:1:")} == {started[0].pid, started[1].pid}
    assert family.tag_of(started[2].pid) == f"{run}:11:1"


def forget() -> None:
    """Start a process whose handle only a frame of a failure holds."""
    process = subprocess.Popen(SLEEP)
    raise LookupError(process.pid)


HOLDER: dict[str, object] = {}


def test_who_is_held() -> None:
    class Server:
        def __init__(self) -> None:
            self.processes = {"one": [subprocess.Popen(SLEEP)]}

    server = Server()
    pid = server.processes["one"][0].pid
    try:
        assert held([pid]) == set(), "a frame is no holder"
        HOLDER["server"] = server
        assert held([pid]) == {pid}, "a module is"
        HOLDER.clear()
        with pytest.raises(LookupError) as caught:
            forget()
        other = int(caught.value.args[0])
        assert held([pid, other, 1]) == set(), "neither is the traceback of a failure"
        os.kill(other, signal.SIGKILL)
    finally:
        HOLDER.clear()
        server.processes["one"][0].kill()
        server.processes["one"][0].wait()
