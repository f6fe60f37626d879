"""What is known of a device process after its death: where Python was, what was printed last, and whose fault it is."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.grants.remains import stacks_as_shown

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation")

POISON = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
"""

fresh = pytest.mark.parametrize("prelude", ["", POISON], ids=["forked", "fresh"])


def source(body: str, prelude: str = "") -> str:
    lines = [line.removeprefix("    ") for line in body.splitlines()]
    return prelude + "\n".join(lines) + "\n"


def failure_of(result: pytest.RunResult, test: str) -> str:
    """The text of one failure, without those that follow."""
    text = result.stdout.str()
    start = next(at for what in ("_ ", "setup of ", "teardown of ") if (at := text.find(f"{what}{test} _")) >= 0)
    ends = [at for mark in ("\n____", "\n====") if (at := text.find(mark, start)) >= 0]
    return text[start : min(ends)]


@fresh
@pytest.mark.parametrize("arguments", [(), ("-p", "no:faulthandler"), ("-n", "1")], ids=["plain", "no", "xdist"])
def test_a_crash_shows_where_python_was(pytester: pytest.Pytester, prelude: str, arguments: tuple[str, ...]) -> None:
    """In the report of its test, and not somewhere on the terminal."""
    body = """
    import ctypes, os, signal
    def deep_inside(number): os.kill(os.getpid(), number)
    def test_segv(cuda_device): ctypes.string_at(0)
    def test_abrt(cuda_device): deep_inside(signal.SIGABRT)
    def test_bus(cuda_device): deep_inside(signal.SIGBUS)
    def test_fpe(cuda_device): deep_inside(signal.SIGFPE)
    def test_kill(cuda_device): deep_inside(signal.SIGKILL)
    def test_after(cuda_device): assert 0
    """
    pytester.makepyfile(source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", *arguments)
    assert result.parseoutcomes()["failed"] == 6
    for name in ("segv", "abrt", "bus", "fpe"):
        text = failure_of(result, f"test_{name}")
        assert f"was killed by SIG{name.upper()} during call" in text
        assert "- Python stack -" in text
        assert f"in test_{name}" in text
        assert name == "segv" or "in deep_inside" in text
        assert text.index("Python stack") < text.index("Reproduce")
        assert "_pytest" not in text[text.index("Python stack") : text.index("Reproduce")], "frames that tell nothing"
    for name in ("kill", "after"):
        assert "Python stack" not in failure_of(result, f"test_{name}")
    assert "Fatal Python error" not in result.stderr.str()


@fresh
def test_a_hang_shows_where_python_was(pytester: pytest.Pytester, prelude: str) -> None:
    """A deadlock in Python that takes no alarm, and C code that holds Python's lock, as a driver call may."""
    body = """
    import ctypes, pytest, signal, threading, time
    LOCK = threading.Lock()
    @pytest.mark.timeout(1)
    def test_deadlock(cuda_device):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        threading.Thread(target=on_another_thread, daemon=True).start()
        with LOCK: LOCK.acquire()
    def on_another_thread(): time.sleep(1000)
    @pytest.mark.timeout(1)
    def test_in_c(cuda_device):
        lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        while True: library.pthread_mutex_lock(lock)
    def test_after(cuda_device): pass
    """
    pytester.makeconftest("import pytest_cudaenv.attempt\npytest_cudaenv.attempt.GRACE = 0.5")
    pytester.makepyfile(source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["failed"]) == (1, 2)
    for name, frames in (("deadlock", ["in test_deadlock", "in on_another_thread"]), ("in_c", ["in test_in_c"])):
        text = failure_of(result, f"test_{name}")
        assert "did not end within 0.5 s of its deadline and was killed during call" in text
        assert all(frame in text[text.index("Python stack") :] for frame in frames)


@fresh
@pytest.mark.parametrize("arguments", [(), ("-n", "1"), ("--capture=sys",)], ids=["plain", "xdist", "sys"])
def test_the_thread_method_of_timeouts_is_a_timeout(
    pytester: pytest.Pytester, prelude: str, arguments: tuple[str, ...]
) -> None:
    """It ends the process; plain pytest would end the run."""
    body = """
    import pytest, time
    def wait_long(): time.sleep(1000)
    @pytest.mark.timeout(1, method="thread")
    def test_slow(cuda_device):
        print("words of the slow one")
        wait_long()
    @pytest.mark.timeout(1, method="thread")
    def test_quick(cuda_device): pass
    def test_after(cuda_device): time.sleep(1.2)
    """
    pytester.makepyfile(source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", *arguments)
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["failed"]) == (2, 1)
    text = failure_of(result, "test_slow")
    assert "was ended at its deadline, Timeout (>1.0s) from pytest-timeout, during call" in text
    assert "exit status" not in text
    assert "in wait_long" in text[text.index("Python stack") :]
    assert "words of the slow one" in text


def test_faulthandlers_own_deadline(pytester: pytest.Pytester) -> None:
    """It prints where it prints without device processes; where it ends the process, what it says is reported."""
    body = """
    import time
    def wait_long(seconds): time.sleep(seconds)
    def test_slow(cuda_device): wait_long(2)
    def test_after(cuda_device): pass
    """
    pytester.makepyfile(source(body))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", "-o", "faulthandler_timeout=0.5")
    result.assert_outcomes(passed=2)
    assert "in wait_long" in result.stderr.str()
    if "faulthandler_exit_on_timeout" not in pytester.runpytest_subprocess("--help").stdout.str():
        return  # an older pytest
    result = pytester.runpytest_subprocess(
        *SIMULATE, "session", "-o", "faulthandler_timeout=0.5", "-o", "faulthandler_exit_on_timeout=true"
    )
    result.assert_outcomes(passed=1, failed=1)
    text = failure_of(result, "test_slow")
    assert "was ended at its deadline, Timeout (0:00:00" in text
    assert "in wait_long" in text[text.index("Python stack") :]


def test_the_crash_of_a_process_that_a_test_forked_is_shown_with_its_failure(pytester: pytest.Pytester) -> None:
    body = """
    import os
    def crash():
        child = os.fork()
        if not child: os.abort()
        return os.waitpid(child, 0)[1]
    def test_harmless(cuda_device): assert crash()
    def test_fails(cuda_device): assert 0
    def test_worker(cuda_device): assert crash() == 0
    """
    pytester.makepyfile(source(body))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=1, failed=2)
    assert "in crash" in failure_of(result, "test_worker").partition("Python stack")[2]
    assert "Python stack" not in failure_of(result, "test_fails")


def test_a_suites_own_faulthandler_is_left_alone(pytester: pytest.Pytester) -> None:
    body = """
    import faulthandler, os
    faulthandler.enable(open("crashes", "w"))
    def test_dies(cuda_device): os.abort()
    """
    pytester.makepyfile(source(body))
    pytester.runpytest_subprocess(*SIMULATE, "session", "-p", "no:faulthandler").assert_outcomes(failed=1)
    assert "in test_dies" in (pytester.path / "crashes").read_text()


@fresh
@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["plain", "xdist"])
@pytest.mark.parametrize("capture", ["fd", "sys", "tee-sys"])
def test_what_was_printed_last_is_reported(
    pytester: pytest.Pytester, prelude: str, arguments: tuple[str, ...], capture: str
) -> None:
    """With the right test, and each word once; also what was not flushed by Python itself."""
    body = """
    import os, signal, sys
    def test_before(cuda_device): print("words", "before")
    def test_dies(cuda_device):
        print("last words", end="")
        sys.stderr.write("last error")
        os.kill(os.getpid(), signal.SIGKILL)
    def test_after(cuda_device): print("words", "after"); assert 0
    def test_dies_again(cuda_device):
        print("words", "again")
        os._exit(3)
    """
    pytester.makepyfile(source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", f"--capture={capture}", *arguments)
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["failed"]) == (1, 3)
    first, after, again = (failure_of(result, f"test_{name}") for name in ("dies", "after", "dies_again"))
    assert "Captured stdout call" in first
    assert (first.count("last words"), first.count("last error")) == (1, 1)
    assert (after.count("words after"), again.count("words again")) == (1, 1)
    assert "words before" not in first
    for text in (after, again):
        assert "last words" not in text
        assert "last error" not in text


def test_what_was_printed_in_the_setup_is_not_told_twice(pytester: pytest.Pytester) -> None:
    body = """
    import os, pytest
    @pytest.fixture
    def speaks(cuda_device): print("of the setup")
    def test_dies(speaks):
        print("of the call")
        os._exit(1)
    """
    pytester.makepyfile(source(body))
    for capture in ("fd", "sys"):
        result = pytester.runpytest_subprocess(*SIMULATE, "session", f"--capture={capture}")
        text = failure_of(result, "test_dies")
        assert text.count("of the call") == 1
        assert "of the setup" not in text.partition("Captured stdout call")[2]


@fresh
@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_a_death_at_its_end_is_an_error(pytester: pytest.Pytester, prelude: str, arguments: tuple[str, ...]) -> None:
    """In the teardown of fixtures that outlive their last test; the text names that test."""
    body = """
    import os, pytest
    from pytest_cudaenv import requires_cuda
    @pytest.fixture(scope="session")
    def model(cuda_device):
        yield
        os._exit(5)
    def test_uses_it(model): pass
    @requires_cuda(devices=2)
    def test_in_another_process(cuda_devices): pass
    """
    pytester.makepyfile(test_it=source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session", *arguments)
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["errors"]) == (2, 1)
    result.stdout.fnmatch_lines(["*ended with exit status 5 at its end, after test_it.py::test_uses_it*"])


@fresh
def test_a_death_between_tests_is_not_the_next_ones(pytester: pytest.Pytester, prelude: str) -> None:
    body = """
    import os, threading, time
    def test_leaves_a_bomb(cuda_device):
        threading.Timer(0.3, os._exit, (6,)).start()
    def test_cpu(): time.sleep(1.5)
    def test_innocent(cuda_device): pass
    """
    pytester.makepyfile(test_it=source(body, prelude))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    assert (result.parseoutcomes()["passed"], result.parseoutcomes()["errors"]) == (3, 1)
    result.stdout.fnmatch_lines(["*ended with exit status 6 between tests, after test_it.py::test_leaves_a_bomb*"])


FRAME = '  File "{}", line 3 in f'


@given(
    mine=st.lists(st.sampled_from(["/suite/test_a.py", "/site/torch/x.py", "/site/_pytest/python.py"]), max_size=4),
    theirs=st.lists(st.sampled_from(["/site/_pytest/runner.py", "<string>", "/site/pluggy/_manager.py"]), max_size=4),
)
def test_frames_that_lead_to_a_test_are_left_out(mine: list[str], theirs: list[str]) -> None:
    heading = "Current thread 0x00007f153ca17b80 (most recent call first):"
    mine = ["/suite/deep.py", *mine, "/suite/test_a.py"]
    crash = "\n".join([heading, *map(FRAME.format, [*mine, *theirs])])
    expected = "\n".join([heading, *map(FRAME.format, mine)])
    assert stacks_as_shown(f"Fatal Python error: X\n\n{crash}\n\nExtension modules: a, b (total: 2)\n") == (
        f"Fatal Python error: X\n\n{expected}"
    )


def test_a_build_that_was_killed_leaves_a_lock(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later builds would wait for it for ever. Those that were there before are somebody else's."""
    folder = pytester.mkdir("extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    for name in ("old", "new", "py312_cu130/inner"):
        (folder / name).mkdir(parents=True)
    (folder / "old" / "lock").touch()
    os.utime(folder / "old" / "lock", (1, 1))
    body = """
    import os
    def test_builds(cuda_device):
        for name in ("new", "py312_cu130/inner"): open(f"extensions/{name}/lock", "w").close()
        os._exit(1)
    """
    pytester.makepyfile(source(body))
    result = pytester.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"it may have held {folder}/new/lock, {folder}/py312_cu130/inner/lock: builds wait*"])


def test_a_death_between_two_phases_is_not_a_second_outcome_of_the_first(pytester: pytest.Pytester) -> None:
    """The body has passed and said so: what comes after it is the teardown."""
    pytester.makeconftest(
        """
        import os, pytest
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(item):
            if item.name == "test_setup_ends": os._exit(1)
            return (yield)
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_teardown(item):
            if item.name == "test_call_ends": os._exit(1)
            return (yield)
        """
    )
    pytester.makepyfile("def test_call_ends(cuda_device): pass\ndef test_setup_ends(cuda_device): pass")
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "--cuda-isolation", "session")
    result.assert_outcomes(passed=1, errors=1, failed=1)
    text = result.stdout.str()
    assert "during teardown" in text
    assert "during call" in text
