"""What a device process is: where tests run, what they see, and what becomes of a run when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_cudaenv.host.catalog import simulated_host
from tests.signals import heed_signals

SIMULATE = ("--cuda-simulate", "h100:4")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*SIMULATE, "--cuda-isolation", "session", *arguments)


def test_a_device_test_sees_its_devices_and_a_cpu_test_stays(pytester: pytest.Pytester) -> None:
    uuids = {str(d.index): d.uuid for d in simulated_host("h100:4").devices}
    pytester.makepyfile(
        f"""
        import os
        from pytest_cudaenv import current, requires_cuda
        HERE, MASK = os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")
        ALONE, UUIDS = "PYTEST_XDIST_WORKER" not in os.environ, {uuids!r}

        def test_cpu():
            assert os.getpid() == HERE and os.environ.get("CUDA_VISIBLE_DEVICES") == MASK

        def test_one(cuda_device):
            assert os.getpid() != HERE
            mask = os.environ["CUDA_VISIBLE_DEVICES"]
            assert mask == "2" if ALONE else mask in ("2", "0", "3")  # the other worker may have come first
            assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert (cuda_device, cuda_device.uuid) == ("cuda:0", UUIDS[mask])

        @requires_cuda(devices=2)
        def test_two(cuda_devices):
            mask = os.environ["CUDA_VISIBLE_DEVICES"]
            assert mask == "2,0" if ALONE else mask in ("2,0", "2,3", "0,3")
            first, second = mask.split(",")
            assert [(str(d), d.uuid) for d in cuda_devices] == [("cuda:0", UUIDS[first]), ("cuda:1", UUIDS[second])]
            assert current().devices == cuda_devices

        def test_nothing_is_left_behind(): assert os.environ.get("CUDA_VISIBLE_DEVICES") == MASK == "2,0,3"
        """
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "2,0,3")
        for arguments in ((), ("-n", "2")):
            run(pytester, *arguments).assert_outcomes(passed=4)


PIDS = """
    import os, pytest
    from pytest_cudaenv import requires_cuda
    def note(name):
        with open("pids", "a") as file: file.write(f"{name} {os.getpid()}\\n")
    def test_a(cuda_device): note("a")
    def test_b(cuda_device): note("b")
    def test_cpu(): note("cpu")
    @requires_cuda(devices=2)
    def test_two(cuda_devices): note("two")
    def test_c(cuda_device): note("c")
"""


@pytest.mark.parametrize(
    ("level", "processes"),
    # a and b share one, two has its own, c's is new; module 2 goes on with c's process only at level session.
    [
        ("session", [1, 1, 2, 3, 3, 3, 4, 5]),
        ("module", [1, 1, 2, 3, 4, 4, 5, 6]),
        ("function", [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_process_lives_while_its_grant_fits(pytester: pytest.Pytester, level: str, processes: list[int]) -> None:
    pytester.makepyfile(test_m1=PIDS, test_m2=PIDS)
    pytester.runpytest_subprocess(*SIMULATE, "--cuda-isolation", level).assert_outcomes(passed=10)
    lines = [line.split() for line in (pytester.path / "pids").read_text().splitlines()]
    seen: dict[str, int] = {}
    found = [seen.setdefault(pid, len(seen) + 1) for name, pid in lines if name != "cpu"]
    assert found == processes
    assert len({pid for name, pid in lines if name == "cpu"}) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV during call"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL during call"),
        ("os.abort()", "was killed by SIGABRT during call"),
        ("os._exit(0)", "ended with exit status 0 during call"),
        ("os._exit(3)", "ended with exit status 3 during call"),
    ],
)
def test_a_death_is_the_failure_of_its_test(pytester: pytest.Pytester, body: str, message: str) -> None:
    """With what it printed last, and the others go on in a new process."""
    pytester.makepyfile(
        f"""
        import os, signal
        def test_before(cuda_device): pass
        def test_dies(cuda_device):
            print("last words", flush=True)
            {body}
        def test_after(cuda_device): print("innocent")
        def test_after_fails(cuda_device): print("words of another"); assert 0
        """
    )
    for arguments in ((), ("-n", "1")):
        result = run(pytester, *arguments)
        result.assert_outcomes(passed=2, failed=2)
        text = result.stdout.str()
        start = text.index("_ test_dies _")
        assert message in text[start:]
        assert "last words" in text[start : text.index("_ test_after_fails _")]
        assert "last words" not in text[text.index("_ test_after_fails _") :]


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_a_death_names_its_phase(pytester: pytest.Pytester, phase: str) -> None:
    pytester.makepyfile(
        f"""
        import os, pytest
        @pytest.fixture
        def deadly():
            if {phase == "setup"}: os._exit(1)
            yield
            os._exit(1)
        def test_dies(cuda_device, deadly): pass
        def test_after(cuda_device): pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1 if phase == "setup" else 2, errors=1)
    result.stdout.fnmatch_lines([f"*ended with exit status 1 during {phase}*"])


def test_a_grandchild_that_holds_on_does_not_hide_a_death(pytester: pytest.Pytester) -> None:
    """Death is what waitpid says: the end of the stream may come much later; here, after the test has been reported."""
    pytester.makeconftest(
        """
        import pytest_cudaenv.isolation
        pytest_cudaenv.isolation.end_all = lambda processes: None
        """
    )
    pytester.makepyfile(
        """
        import os, signal, time
        def test_dies(cuda_device):
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            with open("grandchild", "w") as file: file.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        def test_after():
            grandchild = open("grandchild").read()
            assert open(f"/proc/{grandchild}/stat").read().split()[2] != "Z"  # nobody waited for it
        """
    )
    run(pytester).assert_outcomes(passed=1, failed=1)


def test_a_deadline_is_a_failure_of_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, time
        @pytest.mark.timeout(1)
        def test_slow(cuda_device): time.sleep(30)
        def test_after(cuda_device): pass
        """
    )
    for arguments in ((), ("-n", "1")):
        result = run(pytester, *arguments)
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["*Timeout*"])


def test_a_deadline_is_enforced_from_outside(pytester: pytest.Pytester) -> None:
    """No signal handler runs in a process that blocks its signals, as one inside a driver call does."""
    pytester.makepyfile(
        """
        import pytest, signal, time
        @pytest.mark.timeout(1)
        def test_stuck(cuda_device):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(600)
        def test_after(cuda_device): pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*did not end within 5 s of its deadline and was killed during call*"])


def alive(pids: set[int]) -> set[int]:
    return {
        pid
        for pid in pids
        if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_dies_with_the_pytest_process(pytester: pytest.Pytester, number: signal.Signals) -> None:
    pytester.makepyfile(
        """
        import os, time
        def test_long(cuda_device):
            with open("pids", "w") as file: file.write(f"{os.getpid()} {os.getppid()}")
            time.sleep(120)
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SIMULATE, "--cuda-isolation", "session"]
    process = subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids: set[int] = set()
    for _ in range(600):
        with_pids = pytester.path / "pids"
        if with_pids.exists() and len(with_pids.read_text().split()) == 2:
            pids = {int(pid) for pid in with_pids.read_text().split()}
            break
        time.sleep(0.05)
    assert len(pids) == 2
    assert process.pid not in pids
    os.kill(process.pid, number)
    process.wait(timeout=30)
    for _ in range(200):
        if not alive(pids):
            break
        time.sleep(0.05)
    assert not alive(pids)


def test_openmp_of_the_pytest_process_does_not_hang_a_device_process(pytester: pytest.Pytester) -> None:
    """libgomp's pool does not survive a fork: a child that computed on it would hang."""
    pytester.makepyfile(
        """
        import torch
        torch.set_num_threads(2)
        WARM = (torch.randn(400, 400) @ torch.randn(400, 400)).sum()
        torch.randn(200_000).exp().sum()
        def test_it(cuda_device):
            for _ in range(20):
                torch.randn(200_000).exp().sum()
                torch.randn(400, 400) @ torch.randn(400, 400)
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, "--cuda-isolation", "session", "--timeout", "60")
    result.assert_outcomes(passed=1)


def test_no_device_test_no_process(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, subprocess
        from pytest_cudaenv import requires_cuda
        def test_cpu():
            children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "pytest"], capture_output=True)
            assert not children.stdout
        @requires_cuda(devices=16)
        def test_skipped(): pass
        """
    )
    run(pytester).assert_outcomes(passed=1, skipped=1)


def test_seeds_are_the_same_in_a_device_process(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import random
        def test_numbers(cuda_device):
            with open("numbers", "a") as file: file.write(f"{random.random()}\\n")
        """
    )
    for level in ("off", "session", "function"):
        pytester.runpytest_subprocess(*SIMULATE, "--cuda-isolation", level).assert_outcomes(passed=1)
    assert len(set((pytester.path / "numbers").read_text().split())) == 1


def test_an_isolated_test_has_a_process_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        from pytest_cudaenv import cuda_isolated
        def note():
            with open("pids", "a") as file: file.write(f"{os.getpid()}\\n")
        def test_a(cuda_device): note()
        def test_b(cuda_device): note()
        @cuda_isolated
        def test_c(cuda_device): note()
        def test_d(cuda_device): note()
        def test_e(cuda_device): note()
        """
    )
    run(pytester).assert_outcomes(passed=5)
    a, b, c, d, e = (pytester.path / "pids").read_text().split()
    assert (a, d) == (b, e)
    assert len({a, c, d}) == 3


def test_ctrl_c_tears_down_and_ends(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, time
        @pytest.fixture(scope="module")
        def resource(cuda_device):
            yield
            open("torn down", "w").close()
        def test_slow(resource):
            open("started", "w").close()
            time.sleep(60)
        def test_next(resource): pass
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SIMULATE, "--cuda-isolation", "session"]
    process = subprocess.Popen(
        command,
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    for _ in range(600):
        if (pytester.path / "started").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in output
    assert "test_next" not in output
    assert (pytester.path / "torn down").exists()


@pytest.mark.parametrize(
    ("test", "arguments", "typed", "answers"),
    [
        ("breakpoint()", (), 'p x + 1\np os.environ["CUDA_VISIBLE_DEVICES"]\nc\n', ["(Pdb) 42", "(Pdb) '0'"]),
        ("assert x == 8", ("--pdb",), "p x + 2\nq\n", ["(Pdb) 43"]),
    ],
)
def test_debugging_is_under_the_mask_of_the_test(
    pytester: pytest.Pytester, test: str, arguments: tuple[str, ...], typed: str, answers: list[str]
) -> None:
    pytester.makepyfile(f"import os\ndef test_it(cuda_device):\n    x = 41\n    {test}\n    assert x")
    command = [sys.executable, "-m", "pytest", *SIMULATE, "--cuda-isolation", "session", *arguments]
    done = subprocess.run(
        command, cwd=pytester.path, input=typed, capture_output=True, text=True, timeout=60, check=False
    )
    for answer in answers:
        assert answer in done.stdout


def test_who_debugs_is_not_killed_at_the_deadline(pytester: pytest.Pytester) -> None:
    """pytest-timeout suspends its timer in a debugger; so does the deadline that is enforced from outside."""
    pytester.makeconftest("import pytest_cudaenv.attempt\npytest_cudaenv.attempt.GRACE = 0.2")
    pytester.makepyfile("import pytest\n@pytest.mark.timeout(0.5)\ndef test_it(cuda_device): breakpoint()")
    command = [sys.executable, "-m", "pytest", *SIMULATE, "--cuda-isolation", "session"]
    typed = "import time\ntime.sleep(1.5)\nc\n"
    done = subprocess.run(
        command, cwd=pytester.path, input=typed, capture_output=True, text=True, timeout=60, check=False
    )
    assert "1 passed" in done.stdout, done.stdout


ZYGOTE = """
    import os, signal, sys, time
    from pathlib import Path
    import pytest
    MAIN, IDS = Path("main"), Path("zygote")
    if not IDS.exists(): MAIN.write_text(str(os.getpid()))
    def zygote(): return int(IDS.read_text())
    def kill_from_its_parent():
        os.kill(zygote(), signal.SIGKILL)
        os.waitid(os.P_PID, zygote(), os.WEXITED | os.WNOWAIT)  # it has ended, and is still there to be waited for
    def note(name):
        with open("pids", "a") as file: file.write(f"{name} {os.getpid()}\\n")
    @pytest.fixture(scope="session")
    def of_run(): note("set up in"); yield; note("torn down in")
    @pytest.fixture(scope="session")
    def model(cuda_device): yield
    def test_first(model): IDS.write_text(str(os.getppid()))
    def test_cpu_before(of_run): assert os.getpid() == int(MAIN.read_text())
"""

ENDS = {
    "in a test": """
    def test_ends(model):
        os.kill(zygote(), signal.SIGKILL)
        time.sleep(30)  # it dies with the zygote
    """,
    "at the end of a test": """
    def test_ends(model, request): request.addfinalizer(lambda: os.kill(zygote(), signal.SIGKILL))
    """,
    "between tests": """
    def test_ends(): kill_from_its_parent()
    """,
    "in the setup of a test": """
    @pytest.fixture
    def deadly():
        os.kill(zygote(), signal.SIGKILL)
        time.sleep(30)
    def test_ends(model, deadly): pass
    """,
}

AFTER = """
    def test_device(model, tmp_path): assert os.environ["CUDA_VISIBLE_DEVICES"] and tmp_path.exists()
    def test_cpu(of_run): pass
    def test_same_process(model): note("last")
    @pytest.mark.parametrize("x", range(2))
    def test_more(model, x): note("last")
"""


@pytest.mark.parametrize("when", ENDS)
@pytest.mark.parametrize("arguments", [(), ("-n", "1"), ("-W", "error")], ids=["plain", "xdist", "errors"])
def test_fresh_interpreters_take_the_place_of_a_dead_zygote(
    pytester: pytest.Pytester, when: str, arguments: tuple[str, ...]
) -> None:
    """Only the test that was running fails, and the run says once why later device tests take longer to start."""
    pytester.makepyfile(test_it=ZYGOTE + ENDS[when] + AFTER)
    result = run(pytester, *arguments)
    outcomes = result.parseoutcomes()
    if when == "at the end of a test":  # it may have been told of just in time, its body's end or all of it
        wrong = outcomes.get("errors", 0) + outcomes.get("failed", 0)
        assert (outcomes["passed"], wrong) in {(8, 0), (8, 1), (7, 1)}
    else:
        failed = {"in a test": "failed", "in the setup of a test": "errors"}.get(when)
        assert outcomes.pop("passed") == (8 if failed is None else 7)
        assert outcomes == ({"warnings": 1} if failed is None else {failed: 1, "warnings": 1})
    told = [line for line in result.outlines if "[no-fork]" in line]
    assert len(told) == 1
    assert "the zygote was killed by SIGKILL, and its device process with it: device processes are fresh" in told[0]
    if outcomes.keys() & {"failed", "errors"}:
        result.stdout.fnmatch_lines(
            ["*[[]device-process-death[]] device process * died with the process that had sta*"]
        )
    notes = [line.rpartition(" ")[::2] for line in (pytester.path / "pids").read_text().splitlines()]
    assert [name for name, _ in notes].count("set up in") == 1, "of the pytest process's fixtures there is no second"
    assert len({pid for name, pid in notes if name == "last"}) == 1, "the interpreter is used again"


def test_reruns_survive_the_death_of_the_zygote(pytester: pytest.Pytester) -> None:
    body = """
    @pytest.mark.flaky(reruns=1)
    def test_ends(model):
        if os.getppid() == zygote():
            os.kill(zygote(), signal.SIGKILL)
            time.sleep(30)
    """
    pytester.makepyfile(test_it=ZYGOTE + body + AFTER)
    assert run(pytester).parseoutcomes() == {"passed": 8, "rerun": 1, "warnings": 1}


def test_what_a_dead_zygotes_process_had_started_is_ended(pytester: pytest.Pytester) -> None:
    body = """
    import subprocess
    @pytest.fixture(scope="session")
    def server(model):
        with open("server", "w") as file: file.write(str(subprocess.Popen(["sleep", "600"]).pid))
    def test_starts(server): pass
    def test_ends(): kill_from_its_parent()
    def test_server_has_ended(model):
        path = f"/proc/{open('server').read()}/stat"
        assert not os.path.exists(path) or open(path).read().split()[2] == "Z"
    """
    pytester.makepyfile(test_it=ZYGOTE + body)
    run(pytester).assert_outcomes(passed=5, warnings=1)


def test_a_zygote_that_cannot_fork_for_once_goes_on(pytester: pytest.Pytester) -> None:
    """Where memory or process numbers are short."""
    pytester.makeconftest(
        """
        import errno, os
        from pytest_cudaenv.grants import zygote
        FORK, CALLS = zygote.fork, []
        def fork():
            CALLS.append(1)
            if len(CALLS) == 3: raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return FORK()
        zygote.fork = fork
        """
    )
    pytester.makepyfile(
        """
        from pytest_cudaenv import cuda_isolated
        def test_first(cuda_device): pass
        @cuda_isolated
        def test_refused(cuda_device): pass
        def test_after(cuda_device): pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*[[]device-process-death[]] no device process: *Resource temporarily unavailable*"])
