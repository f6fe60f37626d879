"""`--dist cuda` runs every test once, whatever happens, and leaves alone what it is not asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

CUDA = ("--dist", "cuda", "--cuda-simulate", "h100:4", "--cuda-isolation", "session")

LOGGING = """
    import os, time, pytest
    from pytest_cudaenv import requires_cuda

    def note(request, devices=(), seconds=0.05):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
        def write(sign):
            with open(os.environ["EVENTS"], "a") as file:
                words = [str(time.monotonic()), sign, worker, request.node.nodeid, *(d.uuid for d in devices)]
                file.write(" ".join(words) + "\\n")
        write("+"); time.sleep(seconds); write("-")
"""

MIXED = (
    LOGGING
    + """
    @pytest.mark.parametrize("x", range(4))
    def test_one(request, cuda_devices, x): note(request, cuda_devices)
    @requires_cuda(devices=2)
    @pytest.mark.parametrize("x", range(3))
    def test_two(request, cuda_devices, x): note(request, cuda_devices)
    @requires_cuda(devices=4)
    def test_four(request, cuda_devices): note(request, cuda_devices)
    @requires_cuda(memory="20GB")
    @pytest.mark.parametrize("x", range(3))
    def test_small(request, cuda_devices, x): note(request, cuda_devices)
    @pytest.mark.parametrize("x", range(4))
    def test_cpu(request, x): note(request)
"""
)


@pytest.fixture(autouse=True)
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENTS", str(pytester.path / "events"))
    return pytester.path


def events(folder: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(sign, worker, test, its devices) in order."""
    lines = (folder / "events").read_text().splitlines()
    for _, sign, worker, test, *uuids in sorted((line.split() for line in lines), key=lambda words: float(words[0])):
        yield sign, worker, test.partition("::")[2], uuids


def order(folder: Path) -> list[str]:
    return [test for sign, _, test, _ in events(folder) if sign == "+"]


def workers_of(folder: Path, name: str) -> set[str]:
    return {worker for _, worker, test, _ in events(folder) if name in test}


@pytest.mark.parametrize("workers", ["1", "3", "8"])
def test_all_tests_run_once(pytester: pytest.Pytester, folder: Path, workers: str) -> None:
    pytester.makepyfile(test_a=MIXED, test_b=MIXED)
    result = pytester.runpytest_subprocess(*CUDA, "-n", workers)
    assert result.parseoutcomes() == {"passed": 30}
    assert len(order(folder)) == 30
    using: set[str] = set()
    for sign, _, test, uuids in events(folder):
        if "small" not in test and sign == "+":
            assert using.isdisjoint(uuids)
            using.update(uuids)
        elif "small" not in test:
            using.difference_update(uuids)


def test_a_second_run_knows_how_long_tests_take(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        LOGGING
        + """
    @pytest.mark.parametrize("x", range(12))
    def test_it(request, cuda_devices, x): note(request, cuda_devices, 1.0 if x == 11 else 0.05)
    """
    )
    pytester.runpytest_subprocess(*CUDA, "-n", "2").assert_outcomes(passed=12)
    assert order(folder).index("test_it[11]") > 2
    durations = json.loads((folder / ".pytest_cache/v/cudaenv/durations").read_text())
    assert len(durations) == 12
    (folder / "events").unlink()
    pytester.runpytest_subprocess(*CUDA, "-n", "2").assert_outcomes(passed=12)
    assert order(folder).index("test_it[11]") < 2


def test_largest_requests_first(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(MIXED)
    for _ in range(2):
        (folder / "events").unlink(missing_ok=True)
        pytester.runpytest_subprocess(*CUDA, "-n", "2").assert_outcomes(passed=15)
    device_tests = [test for test in order(folder) if "cpu" not in test]
    assert device_tests[0] == "test_four"


def test_xdist_groups_stay_together(pytester: pytest.Pytester, folder: Path) -> None:
    text = (
        LOGGING
        + """
    @pytest.mark.xdist_group("pair")
    @pytest.mark.parametrize("x", range(6))
    def test_grouped(request, cuda_devices, x): note(request, cuda_devices)
    @pytest.mark.xdist_group(name="pair")
    def test_grouped_cpu(request): note(request)
    @pytest.mark.parametrize("x", range(6))
    def test_free(request, x): note(request)
    """
    )
    pytester.makepyfile(test_a=text, test_b=text)
    result = pytester.runpytest_subprocess(*CUDA, "-n", "4", "-v")
    result.assert_outcomes(passed=26)
    assert len(workers_of(folder, "grouped")) == 1
    result.stdout.no_fnmatch_line("*@pair*")


@pytest.mark.parametrize("grouped", [False, True], ids=["module", "group"])
def test_a_worker_holds_no_device_through_a_cpu_test(pytester: pytest.Pytester, grouped: bool) -> None:
    """Others may come to want it meanwhile. An xdist group is scheduled as one request, and keeps it."""
    pytester.makepyfile(
        f"""
        import os, pathlib, pytest
        from pytest_cudaenv.grants.lease_table import LeaseTable, LeaseTimeout
        from pytest_cudaenv.host.catalog import simulated_host
        if {grouped}: pytestmark = pytest.mark.xdist_group("g")

        def is_free():
            devices = [d.uuid for d in simulated_host("h100:4").devices]
            try:
                LeaseTable(pathlib.Path(os.environ["CUDAENV_LEASE_DIR"])).acquire(devices, 4, timeout=0).release()
                return True
            except LeaseTimeout:
                return False

        def test_device(cuda_device): pass
        def test_cpu(): assert is_free() is not {grouped}
        """
    )
    pytester.runpytest_subprocess(*CUDA, "-n", "1").assert_outcomes(passed=2)


def test_exitfirst(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        LOGGING
        + """
    @pytest.mark.parametrize("x", range(30))
    def test_it(request, cuda_devices, x):
        note(request, cuda_devices)
        assert x != 2
    """
    )
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2", "-x")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert len(order(folder)) < 15


@pytest.mark.parametrize("arguments", [(), ("--cuda-isolation", "off")], ids=["session", "off"])
def test_a_killed_worker_costs_one_test(pytester: pytest.Pytester, folder: Path, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(
        LOGGING
        + """
    import signal
    @pytest.mark.parametrize("x", range(12))
    def test_it(request, cuda_devices, x):
        note(request, cuda_devices)
        if x == 3: os.kill(int(os.environ["WORKER"]), signal.SIGKILL); time.sleep(30)
    """
    )
    pytester.makeconftest("import os\nos.environ['WORKER'] = str(os.getpid())")
    result = pytester.runpytest_subprocess(*CUDA, *arguments, "-n", "2", "--timeout", "60")
    result.assert_outcomes(passed=11, failed=1)
    result.stdout.fnmatch_lines(["*worker 'gw?' crashed while running*test_it?3?*"])
    assert sorted(order(folder)) == sorted(f"test_it[{x}]" for x in range(12))


def test_no_worker_is_restarted_where_that_is_said(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pytest, time
        @pytest.mark.parametrize("x", range(8))
        def test_it(x):
            time.sleep(0.1)
            if x == 1: os._exit(1)
        """
    )
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2", "--max-worker-restart", "0")
    result.stdout.fnmatch_lines(["*worker restarting disabled*"])
    assert result.parseoutcomes()["failed"] == 1


def test_a_crash_is_run_again_by_rerunfailures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pathlib, pytest
        @pytest.mark.parametrize("x", range(4))
        def test_it(x):
            if x == 1 and not pathlib.Path("crashed").exists():
                pathlib.Path("crashed").touch()
                os._exit(1)
        """
    )
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2", "--reruns", "1")
    assert result.parseoutcomes() == {"passed": 4, "rerun": 1}


def test_last_failed(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        LOGGING
        + """
    @pytest.mark.parametrize("x", range(8))
    def test_it(request, cuda_devices, x):
        note(request, cuda_devices)
        assert x not in (2, 5)
    """
    )
    pytester.runpytest_subprocess(*CUDA, "-n", "2").assert_outcomes(passed=6, failed=2)
    (folder / "events").unlink()
    pytester.runpytest_subprocess(*CUDA, "-n", "2", "--lf").assert_outcomes(failed=2)
    assert sorted(order(folder)) == ["test_it[2]", "test_it[5]"]
    assert len(json.loads((folder / ".pytest_cache/v/cudaenv/durations").read_text())) == 8


def test_fresh_interpreters_as_device_processes(pytester: pytest.Pytester, folder: Path) -> None:
    """They are started with the run's arguments, `--dist cuda` among them."""
    poison = "from concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor()\nPOOL.submit(int)\n"
    pytester.makepyfile(test_a=MIXED, test_poison=poison)
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2")
    result.assert_outcomes(passed=15)
    result.stdout.fnmatch_lines(["*[[]no-fork[]]*"])
    assert len(order(folder)) == 15


def test_without_isolation_it_says_that_nothing_is_leased(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(MIXED)
    arguments = (*CUDA, "--cuda-isolation", "off", "-n", "2")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=15)
    result.stdout.fnmatch_lines(["*PytestWarning: [[]no-leases[]] --dist cuda:*--cuda-isolation off"])
    pytester.runpytest_subprocess(*arguments, "-k", "cpu").stdout.no_fnmatch_line("*no-leases*")


def test_a_suite_that_does_not_use_the_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.parametrize('x', range(30))\ndef test_it(x): assert x != 7",
        test_b="def test_it(tmp_path): pass",
    )
    pytester.maketxtfile(test_doc=">>> 1 + 1\n2\n")
    result = pytester.runpytest_subprocess("--dist", "cuda", "-n", "3", "--doctest-glob", "*.txt", "-v")
    assert result.parseoutcomes() == {"passed": 31, "failed": 1}
    result.stdout.fnmatch_lines(["*scheduling tests via CudaScheduling*"])
    result.stdout.no_fnmatch_line("*cudaenv:*")


@pytest.mark.parametrize("arguments", [("-n", "0"), ()], ids=["-n 0", "no -n"])
def test_without_workers_it_changes_nothing(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(MIXED)
    pytester.runpytest_subprocess(*CUDA, *arguments).assert_outcomes(passed=15)


def test_no_tests_and_collection_errors(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.makepyfile("raise OSError")
    as_load = pytester.runpytest_subprocess("-n", "2")
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2")
    assert (result.ret, result.parseoutcomes()) == (as_load.ret, as_load.parseoutcomes())
    assert "errors" in result.parseoutcomes()


def test_workers_that_collect_different_tests_are_told_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import os, pytest\n@pytest.mark.parametrize('x', [os.environ['PYTEST_XDIST_WORKER']])\ndef test_it(x): pass\n"
    )
    result = pytester.runpytest_subprocess(*CUDA, "-n", "2")
    result.stdout.fnmatch_lines(["*Different tests were collected between gw[01] and gw[01]*"])


def test_without_xdist_there_is_no_such_option(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert pytester.runpytest_subprocess("-p", "no:xdist").ret == 0
    result = pytester.runpytest_subprocess("-p", "no:xdist", "--dist", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unrecognized arguments: --dist*"])


def test_a_mode_that_nobody_knows_is_a_usage_error_that_names_this_one(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--dist", "cudda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*invalid choice: 'cudda'*cuda*"])


@pytest.mark.parametrize("arguments", [("-o", "cuda=false"), ("-p", "no:cudaenv")], ids=["ini", "no plugin"])
def test_switched_off_it_is_a_usage_error(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("--dist", "cuda", "-n", "1", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_without_a_cache_it_knows_no_durations(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MIXED)
    pytester.runpytest_subprocess(*CUDA, "-n", "2", "-p", "no:cacheprovider").assert_outcomes(passed=15)


@pytest.mark.parametrize(
    ("conftest", "variable", "dist", "expected"),
    [
        ("", None, "cuda", 5),
        ("", None, "load", 2),
        ("", "1", "cuda", 1),
        ("def pytest_xdist_auto_num_workers(config): return 1", None, "cuda", 1),
    ],
    ids=["devices and one", "load", "variable", "conftest"],
)
def test_the_number_of_workers(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    conftest: str,
    variable: str | None,
    dist: str,
    expected: int,
) -> None:
    """Enough of them for each of four devices and one beside, where xdist counts two cores."""
    if variable is not None:
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", variable)
    pytester.makeconftest(conftest)
    pytester.makepyfile(
        two_cores="""
            import contextlib, os
            os.sched_getaffinity = lambda pid: {0, 1}
            with contextlib.suppress(ImportError):
                import psutil
                psutil.cpu_count = lambda logical=True: 2
        """,
        test_it=f"import os\ndef test_it(): assert os.environ['PYTEST_XDIST_WORKER_COUNT'] == '{expected}'",
    )
    pytester.syspathinsert()
    result = pytester.runpytest_subprocess(*CUDA[2:], "--dist", dist, "-n", "auto", "-p", "two_cores")
    result.assert_outcomes(passed=1)


def test_nothing_is_left_behind(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    temporary = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    pytester.makepyfile(MIXED)
    pytester.runpytest_subprocess(*CUDA, "-n", "2", "--basetemp", str(pytester.path / "base")).assert_outcomes(
        passed=15
    )
    assert not list(temporary.glob("cudaenv-*"))
