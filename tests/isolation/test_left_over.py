"""Processes that tests leave running: ended and named, and those of wider fixtures not before their device process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.isolation.test_deaths import fresh, source
from tests.isolation.test_device_processes import alive
from tests.signals import heed_signals

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation")

START = """
import multiprocessing, os, pytest, signal, subprocess, sys, time
def note(name, pid):
    with open("started", "a") as file: file.write(f"{name} {pid}\\n")
def start(name, *words):
    process = subprocess.Popen(words or ["sleep", "600"])
    note(name, process.pid)
    return process
def fork(name):
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    note(name, child)
    return child
def daemonise(name, *words):
    '''A process in a session of its own, whose parent has ended.'''
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            note(name, os.getpid())
            if words: os.execvp(words[0], words)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    until = time.monotonic() + 30
    while not os.path.exists("started") or f"{name} " not in open("started").read():
        assert time.monotonic() < until
        time.sleep(0.01)
def lives(name):
    pid = next(line.split()[1] for line in open("started") if line.startswith(f"{name} "))
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError: return False
"""


def started(pytester: pytest.Pytester) -> dict[str, int]:
    lines = (pytester.path / "started").read_text().splitlines()
    return {name: int(pid) for name, pid in map(str.split, lines)}


def told(result: pytest.RunResult) -> dict[int, str]:
    """What each left-over process was, by its number."""
    found = re.findall(r"\[left-over\] process (\d+) \((.*)\) (was left running .*); it was ended", result.stdout.str())
    return {int(pid): f"{command}: {how}" for pid, command, how in found}


@fresh
@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_what_a_test_leaves_is_ended_and_named(
    pytester: pytest.Pytester, prelude: str, arguments: tuple[str, ...]
) -> None:
    body = """
    def test_popen(cuda_device): start("popen")
    def test_fails(cuda_device):
        process = start("failing")
        assert not process
    def test_fork(cuda_device): fork("forked")
    def test_daemon(cuda_device): daemonise("daemon")
    def test_daemon_program(cuda_device): daemonise("program", "sleep", "600")
    def test_shell(cuda_device): os.system("sleep 600 & echo shell $! >> started")
    def test_process(cuda_device):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        note("process", process.pid)
    @pytest.fixture
    def server(cuda_device): return start("fixture")
    def test_of_its_own_fixture(server): pass
    def test_none_lives(cuda_device):
        assert not any(map(lives, "popen failing forked daemon program shell process fixture".split()))
    """
    pytester.makepyfile(source(body, START + prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", *arguments)
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"], outcomes["warnings"]) == (8, 1, 9 if prelude else 8)
    pids = started(pytester)
    assert set(told(result)) == set(pids.values())
    assert told(result)[pids["popen"]] == "sleep 600: was left running by this test"
    result.stdout.fnmatch_lines([f"*::test_{name}" for name in ("popen", "fails", "fork", "daemon", "daemon_program")])
    assert not alive(set(pids.values()))


@fresh
def test_what_belongs_to_wider_fixtures_lives_as_long_as_the_process(pytester: pytest.Pytester, prelude: str) -> None:
    """Also what they start while a test runs, as pools do; and it is ended with the process, where they do not."""
    body = """
    from concurrent.futures import ProcessPoolExecutor
    FORK = multiprocessing.get_context("fork")
    GLOBAL_POOL = []
    @pytest.fixture(scope="session")
    def server(cuda_device):
        process = start("server")
        yield
        process.kill(); process.wait()
    @pytest.fixture(scope="module")
    def forgotten_server(cuda_device): daemonise("forgotten", "sleep", "600")
    @pytest.fixture(scope="module", autouse=True)
    def worker_of_module(cuda_device): fork("module")
    @pytest.fixture(scope="session")
    def pool(cuda_device):
        with ProcessPoolExecutor(2, mp_context=FORK) as executor: yield executor
    @pytest.fixture(scope="session")
    def lazy_server(cuda_device):
        class Server:
            def ask(self):
                if not hasattr(self, "process"): self.process = start("lazy")
        return Server()
    def test_first(server, forgotten_server, pool, lazy_server):
        lazy_server.ask()
        assert pool.submit(abs, -1).result(30) == 1
        GLOBAL_POOL.append(FORK.Pool(2))
        assert GLOBAL_POOL[0].apply(abs, (-1,)) == 1
    def test_dynamic(cuda_device, request):
        start("of_the_test")
        request.getfixturevalue("late_server")
    @pytest.fixture(scope="session")
    def late_server(cuda_device): start("late")
    def test_all_live(cuda_device, pool):
        assert all(map(lives, "server forgotten module lazy late".split()))
        assert not lives("of_the_test")
        assert pool.submit(abs, -1).result(30) == GLOBAL_POOL[0].apply(abs, (-1,)) == 1
    """
    pytester.makepyfile(source(body, START + prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    assert result.parseoutcomes()["passed"] == 3
    assert "failed" not in result.parseoutcomes()
    pids = started(pytester)
    found = told(result)
    assert found.pop(pids["of_the_test"]).endswith("by this test")
    assert set(found) == {pids[name] for name in ("forgotten", "module", "lazy", "late")}
    assert all("at the end of its device process" in how for how in found.values())
    assert not alive(set(pids.values()))


def test_what_ends_by_itself_is_not_told(pytester: pytest.Pytester) -> None:
    """Workers of a pool that went with its test, and what needs a moment."""
    body = """
    import torch
    from torch.utils.data import DataLoader
    def test_moment(cuda_device): subprocess.Popen(["sleep", "0.2"])
    def test_loader(cuda_device):
        loader = DataLoader(range(8), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        assert len(list(loader)) == 8
    def test_pool(cuda_device):
        pool = multiprocessing.get_context("fork").Pool(2)
        assert pool.apply(abs, (-1,)) == 1
        pool.terminate()
    """
    pytester.makepyfile(source(body, START))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", "-rw")
    result.assert_outcomes(passed=3)
    assert not told(result)


def test_helpers_of_multiprocessing_are_nobodys(pytester: pytest.Pytester) -> None:
    """The resource tracker and the fork server stay; what the server has started for a test does not."""
    body = """
    from multiprocessing import shared_memory, resource_tracker, forkserver
    def test_shared(cuda_device):
        memory = shared_memory.SharedMemory(create=True, size=64)
        memory.close(); memory.unlink()
        note("tracker", resource_tracker._resource_tracker._pid)
    def test_server(cuda_device):
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
        process.start()
        note("left", process.pid)
        note("forkserver", forkserver._forkserver._forkserver_pid)
    def test_after(cuda_device): assert lives("tracker") and lives("forkserver") and not lives("left")
    """
    pytester.makepyfile(source(body, START))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=3, warnings=1)
    pids = started(pytester)
    assert set(told(result)) == {pids["left"]}
    until = time.monotonic() + 30
    while alive(set(pids.values())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(set(pids.values()))


@fresh
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_what_a_dead_process_leaves_is_ended(pytester: pytest.Pytester, prelude: str, how: str) -> None:
    body = f"""
    @pytest.fixture(scope="session")
    def server(cuda_device): start("server")
    def test_dies(server):
        start("popen"); fork("forked"); daemonise("daemon"); daemonise("program", "sleep", "600")
        {how}
    def test_after(cuda_device):
        assert not any(map(lives, "server popen forked daemon program".split()))
    """
    pytester.makepyfile(source(body, START + prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["failed"]) == (1, 1)
    assert not alive(set(started(pytester).values()))


@fresh
@pytest.mark.parametrize("victim", ["pytest", "zygote"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_the_run(pytester: pytest.Pytester, victim: str, number: signal.Signals, prelude: str) -> None:
    """Whoever is killed while a device process is inside a call that takes no signals.

    Without the zygote, or the keeper, what has come from a process is found by its environment alone.
    """
    unmarked = 'start("bare", "env", "-i", "sleep", "600"); fork("forked"); daemonise("daemon")'
    body = f"""
    def test_long(cuda_device):
        note("zygote", os.getppid()); note("process", os.getpid())
        start("popen"); daemonise("program", "sleep", "600")
        {unmarked if victim == "pytest" else ""}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        note("ready", 0)
        time.sleep(600)
    def test_next(cuda_device): pass
    """
    pytester.makepyfile(source(body, START + prelude))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SIMULATE, "session"]
    process = subprocess.Popen(
        command, cwd=pytester.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals
    )
    until = time.monotonic() + 60
    noted = pytester.path / "started"
    while not (noted.exists() and "ready" in noted.read_text()):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    pids = started(pytester)
    pids.pop("ready")
    os.kill(process.pid if victim == "pytest" else pids["zygote"], number)
    output, _ = process.communicate(timeout=60)
    until = time.monotonic() + 20
    while alive(set(pids.values())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not (left := alive(set(pids.values()))), (left, pids, output)
    if victim == "zygote":
        assert "1 failed, 1 passed" in output
        assert f"the {'keeper of fresh interpreters' if prelude else 'zygote'} was killed by {number.name}" in output
        assert process.returncode == pytest.ExitCode.TESTS_FAILED


def test_subprocesses_know_who_started_them(pytester: pytest.Pytester) -> None:
    """The run, the device process and the test; what a wider fixture starts has no test."""
    body = """
    def tag(): return subprocess.run(["sh", "-c", "echo $CUDAENV_TAG"], capture_output=True, text=True).stdout.strip()
    @pytest.fixture(scope="module")
    def wide(cuda_device): return tag()
    def test_one(wide): note("one", tag()); note("wide", wide)
    def test_two(cuda_device): note("two", tag())
    def test_cpu(): note("cpu", tag())
    """
    pytester.makepyfile(source(body, START))
    pytester.runpytest_subprocess(*SIMULATE, "session").assert_outcomes(passed=3)
    lines = dict(line.partition(" ")[::2] for line in (pytester.path / "started").read_text().splitlines())
    run, process, test = lines["one"].rsplit(":", 2)
    assert (process, test) == ("1", "1")
    assert (lines["wide"], lines["two"], lines["cpu"]) == (f"{run}:1:0", f"{run}:1:2", "")


def test_workers_of_the_pytest_process_are_its_own(pytester: pytest.Pytester) -> None:
    """A fork has their handles too; neither the end of a test nor that of its process ends them."""
    pytester.makeconftest(
        """
        import multiprocessing, time
        WORKER = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        WORKER.start()
        """
    )
    pytester.makepyfile(
        """
        import multiprocessing, subprocess
        from conftest import WORKER
        def test_none_here(cuda_device): assert not multiprocessing.active_children()
        def test_leaves_one(cuda_device): subprocess.Popen(["sleep", "600"])
        def test_cpu(): assert WORKER.is_alive()
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, "function")
    result.assert_outcomes(passed=3, warnings=1)
