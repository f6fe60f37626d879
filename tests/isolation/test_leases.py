"""No device is granted twice at once: not by workers, not by runs, not after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaenv.grants.lease_table import LeaseTable
from pytest_cudaenv.host.catalog import simulated_host

LOGGING = """
    import os, time, pytest
    from pytest_cudaenv import requires_cuda

    def use(devices, seconds=0.2):
        with open(os.environ["EVENTS"], "a") as file:
            file.write(f"{time.monotonic()} + {' '.join(d.uuid for d in devices)}\\n"); file.flush()
            time.sleep(seconds)
            file.write(f"{time.monotonic()} - {' '.join(d.uuid for d in devices)}\\n")
"""

MIXED = (
    LOGGING
    + """
    @pytest.mark.parametrize("x", range(6))
    def test_one(cuda_devices, x): use(cuda_devices)
    @requires_cuda(devices=2)
    @pytest.mark.parametrize("x", range(4))
    def test_two(cuda_devices, x): use(cuda_devices)
    @pytest.mark.parametrize("x", range(3))
    def test_cpu(x): pass
"""
)


def events(folder: Path) -> Iterator[tuple[float, str, list[str]]]:
    for line in sorted((folder / "events").read_text().splitlines(), key=lambda text: float(text.split()[0])):
        moment, sign, *uuids = line.split()
        yield float(moment), sign, uuids


def most_at_once(folder: Path) -> int:
    """How many tests used one device at the same time, at the most."""
    using: dict[str, int] = {}
    most = 0
    for _, sign, uuids in events(folder):
        for uuid in uuids:
            using[uuid] = using.get(uuid, 0) + (1 if sign == "+" else -1)
            most = max(most, using[uuid])
    return most


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENTS", str(pytester.path / "events"))
    return pytester.path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--cuda-isolation", "session", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("dist", ["load", "worksteal", "loadfile"])
def test_workers_never_share_a_device(pytester: pytest.Pytester, folder: Path, dist: str) -> None:
    pytester.makepyfile(test_a=MIXED, test_b=MIXED)
    arguments = ("--cuda-simulate", "h100:2", "--cuda-isolation", "session", "-n", "4", "--dist", dist)
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=26)
    assert most_at_once(folder) == 1
    assert len({uuid for _, _, uuids in events(folder) for uuid in uuids}) == 2


def test_two_runs_never_share_a_device(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(MIXED)
    runs = [start(folder, "--cuda-simulate", "h100:2", "-n", "2") for _ in range(2)]
    for run in runs:
        output, _ = run.communicate(timeout=120)
        assert "13 passed" in output, output
    assert most_at_once(folder) == 1


def test_a_worker_that_is_killed_gives_its_devices_back(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        LOGGING
        + """
    import signal
    @pytest.mark.parametrize("x", range(8))
    def test_one(cuda_devices, x):
        use(cuda_devices, 0.05)
        if x == 2: os.kill(int(os.environ["WORKER"]), signal.SIGKILL); time.sleep(30)
    """
    )
    pytester.makeconftest("import os\nos.environ['WORKER'] = str(os.getpid())")
    arguments = ("--cuda-simulate", "h100:1", "--cuda-isolation", "session", "-n", "2", "--timeout", "60")
    result = pytester.runpytest_subprocess(*arguments)
    assert result.parseoutcomes() == {"passed": 7, "failed": 1}
    result.stdout.fnmatch_lines(["*worker 'gw?' crashed while running*test_one?2?*"])


def test_a_stranger_is_waited_for_and_then_named(pytester: pytest.Pytester) -> None:
    """Busy is not a skip."""
    table = LeaseTable(Path(os.environ["CUDAENV_LEASE_DIR"]), run="another")
    [device] = simulated_host("h100").devices
    pytester.makepyfile("def test_it(cuda_device): pass\ndef test_cpu(): pass")
    arguments = ("--cuda-simulate", "h100", "--cuda-isolation", "session", "--cuda-wait")
    with table.acquire([device.uuid], 1, test="test_of_another.py::test_long"):
        result = pytester.runpytest_subprocess(*arguments, "1")
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines([f"*[[]device-busy[]]*{os.getpid()}*"])
    pytester.runpytest_subprocess(*arguments, "1").assert_outcomes(passed=2)


def test_small_tests_share_a_device_while_their_memory_fits(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        test_budgets=LOGGING
        + """
    @requires_cuda(memory="20GB")
    @pytest.mark.parametrize("x", range(8))
    def test_small(cuda_devices, x): use(cuda_devices, 0.4)
    @requires_cuda(memory="70GB")
    @pytest.mark.parametrize("x", range(2))
    def test_large(cuda_devices, x): use(cuda_devices, 0.1)
    """
    )
    arguments = ("--cuda-simulate", "h100", "--cuda-isolation", "function", "-n", "4")
    pytester.runpytest_subprocess(*arguments, "-k", "test_small").assert_outcomes(passed=8)
    assert 2 <= most_at_once(folder) <= 4
    (folder / "events").unlink()
    pytester.runpytest_subprocess(*arguments, "-k", "test_large").assert_outcomes(passed=2)
    assert most_at_once(folder) == 1


QUEUE = """
    @pytest.mark.parametrize("x", range(4))
    def test_one(cuda_devices, x): use(cuda_devices, SECONDS)
"""

TOGETHER = """
    @pytest.mark.parametrize("x", range(4))
    def test_one(cuda_devices, x):
        with open(os.environ["EVENTS"], "a") as file: file.write(f"{time.monotonic()} + {cuda_devices[0].uuid}\\n")
        while len(open(os.environ["EVENTS"]).readlines()) < 2: time.sleep(0.01)  # as nobody ends before, two share
"""


@pytest.mark.parametrize("default", ["option", "ini", "variable", None])
def test_a_default_memory_makes_tests_share_and_without_it_the_summary_advises_to(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch, default: str | None
) -> None:
    pytester.makepyfile(LOGGING + (TOGETHER if default else QUEUE.replace("SECONDS", "2.5")))
    arguments = ["--cuda-simulate", "h100", "--cuda-isolation", "session", "-n", "4", "--timeout", "60"]
    if default == "option":
        arguments += ["--cuda-default-memory", "15GB"]
    elif default == "ini":
        pytester.makeini("[pytest]\ncuda_default_memory = 15GB")
    elif default == "variable":
        monkeypatch.setenv("CUDAENV_DEFAULT_MEMORY", "15GB")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=4)
    if default is None:
        assert most_at_once(folder) == 1
        result.stdout.fnmatch_lines(["waited for devices: * s in 3 tests, * % of the time of 3 workers"])
        result.stdout.fnmatch_lines(["*3 of them declare no memory=*cuda_default_memory*"])
    else:
        assert most_at_once(folder) >= 2
        result.stdout.no_fnmatch_line("waited for devices:*")


def test_an_exclusive_test_takes_its_device_whole_all_the_same(pytester: pytest.Pytester, folder: Path) -> None:
    queue = QUEUE.replace("    @pytest", "    @requires_cuda(exclusive=True)\n    @pytest").replace("SECONDS", "0.2")
    pytester.makepyfile(LOGGING + queue)
    arguments = ("--cuda-simulate", "h100", "--cuda-isolation", "session", "--cuda-default-memory", "15GB", "-n", "4")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=4)
    assert most_at_once(folder) == 1


def test_a_default_memory_is_written_as_memory_is(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--cuda-default-memory", "15")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cuda-default-memory: '15': write a number and a unit*"])


def test_a_default_memory_is_no_need(pytester: pytest.Pytester) -> None:
    """A device that is smaller serves a test that declares nothing, whole."""
    pytester.makepyfile("def test_it(cuda_device): pass")
    arguments = ("--cuda-simulate", "t4", "--cuda-isolation", "session", "--cuda-default-memory", "40GB")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)


def test_a_nested_run_inherits_the_lease(pytester: pytest.Pytester) -> None:
    """It would otherwise wait for what the test that started it holds."""
    pytester.makepyfile(
        test_outer="""
        import os, subprocess, sys
        def test_outer(cuda_device):
            command = [sys.executable, "-m", "pytest", "-q", "test_outer.py", "-k", "inner", "--cuda-simulate", "h100",
                       "--cuda-isolation", "session", "--cuda-wait", "2"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert "1 passed" in done.stdout, done.stdout
        def test_inner(cuda_device): assert os.environ["CUDAENV_LEASE"] == cuda_device.uuid
        """
    )
    arguments = ("--cuda-simulate", "h100", "--cuda-isolation", "session", "-k", "outer", "--timeout", "90")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=2)


def test_a_storm_of_kills_leaves_nothing_behind(pytester: pytest.Pytester, folder: Path) -> None:
    """Runs killed with -9 at random moments: the next one has both devices at once."""
    pytester.makepyfile(MIXED)
    for round_ in range(6):
        run = start(folder, "--cuda-simulate", "h100:2", "-n", "2")
        time.sleep(1.0 + 0.3 * round_)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate(timeout=30)
    (folder / "events").unlink(missing_ok=True)
    last = start(folder, "--cuda-simulate", "h100:2", "--cuda-wait", "20")
    output, _ = last.communicate(timeout=120)
    assert "13 passed" in output, output
    assert most_at_once(folder) == 1
