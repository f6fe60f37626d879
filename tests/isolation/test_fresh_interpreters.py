"""Device processes of a pytest process that cannot be forked: fresh interpreters, with all else as it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.isolation.test_device_processes import alive

POISON = """
    from concurrent.futures import ThreadPoolExecutor
    POOL = ThreadPoolExecutor(1)
    POOL.submit(int).result()
"""


def run(pytester: pytest.Pytester, *arguments: str, level: str = "session") -> pytest.RunResult:
    return pytester.runpytest_subprocess("--cuda-simulate", "h100:4", "--cuda-isolation", level, *arguments)


NOTES = """
    import os, sys, pytest
    from pytest_cudaenv import current, cuda_isolated, requires_cuda
    with open("imports", "a") as file: file.write(f"{os.path.basename(__file__)} {os.getpid()}\\n")
    def note():
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert len(current().devices) == len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        with open("pids", "a") as file: file.write(f"{os.getpid()}\\n")
    def test_one(model, tmp_path): note()
    def test_cpu(model_of_cpu): pass
    def test_two(model): note()
"""


def test_one_interpreter_serves_all_modules_while_its_grant_fits(pytester: pytest.Pytester) -> None:
    """It collects a file when a test of it is due, and warns once, naming the file that is the cause."""
    pytester.makeconftest(
        """
        import os, pytest
        @pytest.fixture(scope="session")
        def model(cuda_device):
            with open("models", "a") as file: file.write("x")
        @pytest.fixture
        def model_of_cpu(): assert "CUDA_VISIBLE_DEVICES" not in os.environ
        """
    )
    larger = "@requires_cuda(devices=2)\n    def test_larger(cuda_devices): note()"
    pytester.makepyfile(test_a=NOTES, test_b=NOTES + POISON, test_c=NOTES, test_d=NOTES + f"    {larger}")
    result = run(pytester, "-p", "no:randomly")
    result.assert_outcomes(passed=13)
    warnings = [line for line in result.outlines if "[no-fork]" in line]
    assert len(warnings) == 1
    assert "ThreadPoolExecutor-0_0 was started while collecting test_b.py: device processes are fresh" in warnings[0]
    pids = (pytester.path / "pids").read_text().split()
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [8, 1]
    assert (pytester.path / "models").read_text() == "x"
    # Once in the pytest process; again in the first interpreter; and only test_d in the second.
    imports = [line.split() for line in (pytester.path / "imports").read_text().splitlines()]
    assert [sum(pid == p for _, p in imports) for pid in dict.fromkeys(pids)] == [4, 1]


@pytest.mark.parametrize("option", [("-W", "error"), ("-o", "filterwarnings=error")], ids=["option", "ini"])
def test_warnings_of_our_own_are_no_errors(pytester: pytest.Pytester, option: tuple[str, ...]) -> None:
    """Neither that nothing can be forked, nor what pytest says of an interpreter that has this package before it."""
    pytester.makepyfile(
        test_it=POISON
        + """
    import warnings, pytest
    def test_passes(cuda_device): pass
    def test_warns(cuda_device): warnings.warn("careful")
    """
    )
    result = run(pytester, *option)
    result.assert_outcomes(passed=1, failed=1, warnings=1)
    result.stdout.fnmatch_lines(["*[[]no-fork[]] thread ThreadPoolExecutor-0_0 was started while collecting test_it*"])


def test_levels_and_isolated_tests(pytester: pytest.Pytester) -> None:
    isolated = "@cuda_isolated\n    def test_alone(model): note()\n    def test_z(model): note()"
    pytester.makeconftest(
        "import pytest\n@pytest.fixture\ndef model(cuda_device): ...\n@pytest.fixture\ndef model_of_cpu(): ..."
    )
    pytester.makepyfile(test_a=NOTES + POISON, test_b=NOTES + f"    {isolated}")
    for level, expected in (("session", [4, 1, 1]), ("module", [2, 2, 1, 1]), ("function", [1] * 6)):
        (pytester.path / "pids").write_text("")
        run(pytester, level=level).assert_outcomes(passed=8)
        pids = (pytester.path / "pids").read_text().split()
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == expected, level


def test_what_is_asked_while_collecting_has_the_same_answers(pytester: pytest.Pytester) -> None:
    """The interpreter has one device; a module that counts them at import counts those of the run."""
    pytester.makepyfile(
        test_it=POISON
        + """
    import os, pytest, torch
    if torch.cuda.device_count() < 4: pytest.skip("needs four", allow_module_level=True)
    @pytest.mark.parametrize("place", range(torch.cuda.device_count()))
    def test_places(cuda_device, place): assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    """,
        test_more="import torch\nMANY = torch.cuda.device_count()\ndef test_it(cuda_device): assert MANY == 4",
    )
    run(pytester).assert_outcomes(passed=5)


def test_a_file_that_cannot_be_collected_again_is_an_error_of_its_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a=POISON + "    def test_a(cuda_device): pass",
        test_b="""
    import os
    if os.path.exists("second"): raise RuntimeError("not twice")
    open("second", "w").close()
    def test_b(cuda_device): pass
    """,
        test_c="""
    import os
    NAME = f"test_{os.getpid()}"
    exec(f"def {NAME}(cuda_device): pass")
    def test_c(cuda_device): pass
    """,
    )
    result = run(pytester)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*[[]no-fork[]] the file in which this test stands could not be collected again*"])
    result.stdout.fnmatch_lines(["*RuntimeError: not twice*"])
    result.stdout.fnmatch_lines(["*test_c.py::test_* was not collected again*"])


@pytest.mark.parametrize(
    "options",
    [("-k", "chosen"), ("-m", "chosen"), ("--deselect", "test_it.py::test_other"), ("test_it.py::test_chosen",)],
    ids=lambda options: options[0],
)
def test_what_was_selected_runs(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makeini("[pytest]\nmarkers = chosen")
    pytester.makepyfile(
        test_it=POISON
        + """
    import pytest
    @pytest.mark.chosen
    def test_chosen(cuda_device): pass
    def test_other(cuda_device): assert 0
    """
    )
    run(pytester, *options).assert_outcomes(passed=1, deselected=0 if "::test_chosen" in options[0] else 1)


def test_last_failed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=POISON + "    def test_good(cuda_device): pass\n    def test_bad(cuda_device): assert 0"
    )
    run(pytester).assert_outcomes(passed=1, failed=1)
    run(pytester, "--lf").assert_outcomes(failed=1)


def test_groups_of_xdist_keep_their_ids(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=POISON
        + """
    import pytest
    @pytest.mark.xdist_group("one")
    @pytest.mark.parametrize("x", ["a@b", "a@one"])
    def test_group(cuda_device, x): pass
    def test_alone(cuda_device): pass
    """
    )
    found = []
    for level in ("off", "session"):
        result = run(pytester, "-n", "2", "--dist", "loadgroup", "-v", level=level)
        result.assert_outcomes(passed=3)
        found.append(sorted(line.split("PASSED")[1].strip() for line in result.outlines if "PASSED" in line))
    assert found[0] == found[1]


def test_coverage(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        library="def on_cpu():\n    return 1\n\ndef on_device():\n    two = 2\n    return two\n",
        test_it=POISON
        + """
    import library
    def test_cpu(): library.on_cpu()
    def test_device(cuda_device): library.on_device()
    """,
    )
    for workers in ((), ("-n", "1")):
        result = run(pytester, *workers, "--cov=library", "--cov-branch", "--cov-report=term")
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(["library.py *5 * 0 *100%"])
        assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]


def test_files_of_the_run_are_the_pytest_processs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=POISON
        + """
    import logging
    def test_cpu(tmp_path): logging.getLogger("x").warning("of the cpu")
    def test_device(cuda_device, tmp_path): logging.getLogger("x").warning("of the device")
    def test_last(tmp_path): pass
    """
    )
    result = run(pytester, "--junitxml=report.xml", "--log-file=log.txt", "--basetemp", str(pytester.path / "base"))
    result.assert_outcomes(passed=3)
    assert (pytester.path / "report.xml").read_text().count("<testcase") == 3
    log = (pytester.path / "log.txt").read_text()
    assert "of the cpu" in log
    assert "of the device" in log
    assert len([p for p in (pytester.path / "base").iterdir() if p.name.startswith("test_")]) == 2 * 2


def test_a_death_and_a_deadline(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=POISON
        + """
    import os, pytest, signal, time
    def test_dies(cuda_device):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    @pytest.mark.timeout(1)
    def test_stuck(cuda_device):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)
    def test_after(cuda_device): pass
    """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*was killed by SIGSEGV during call*", "*did not end within 5 s of its deadline*"])


def test_an_interpreter_that_pytest_refuses_is_an_error_of_its_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import os, pytest
        if os.path.exists("second"): raise pytest.UsageError("no second time")
        open("second", "w").close()
        """
    )
    pytester.makepyfile(test_it=POISON + "    def test_it(cuda_device): pass\n    def test_cpu(): pass")
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*device process * ended with exit status 4 during setup*"])
    result.stderr.fnmatch_lines(["*no second time*"])


def test_it_dies_with_the_pytest_process(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=POISON
        + """
    import os, time
    def test_long(cuda_device):
        with open("pid", "w") as file: file.write(str(os.getpid()) + " ")
        time.sleep(120)
    """
    )
    command = [sys.executable, "-m", "pytest", "--cuda-simulate", "h100", "--cuda-isolation", "session"]
    process = subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    noted = pytester.path / "pid"
    until = time.monotonic() + 60
    while not (noted.exists() and noted.read_text().endswith(" ")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while alive({int(noted.read_text())}):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_debugging_in_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=POISON + "    def test_it(cuda_device):\n        x = 41\n        breakpoint()")
    command = [sys.executable, "-m", "pytest", "--cuda-simulate", "h100", "--cuda-isolation", "session"]
    done = subprocess.run(
        command, cwd=pytester.path, input="p x + 1\nc\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert "(Pdb) 42" in done.stdout
    assert "1 passed" in done.stdout
