"""Tests that declare no device: named where they use CUDA, and hidden, granted or failed where the run is told to."""

from __future__ import annotations

import os

import pytest

from tests.native.build import FakeGpu, build_cuda, cuda_environment

TORCH = '''
import sys, types

def use_cuda():
    """What a first, or a further, allocation of torch's shows."""
    if "torch" not in sys.modules:
        cuda = types.SimpleNamespace(allocated=0, device_count=lambda: 2, is_initialized=lambda: True)
        cuda.synchronize = lambda: None
        cuda.memory_stats = lambda index: {"allocation.all.allocated": cuda.allocated if index else 0}
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].cuda, sys.modules["torch"].manual_seed = cuda, lambda seed: None
    sys.modules["torch"].cuda.allocated += 1
'''

SUITE = """
    import pytest
    from use import use_cuda
    from pytest_cudaenv import requires_package
    def test_declared(cuda_device): use_cuda()
    def test_first(): use_cuda()
    def test_none(): pass
    def test_again(): use_cuda()
    @requires_package("pytest")
    def test_without_device(): use_cuda()
    @pytest.fixture
    def frees():
        yield
        use_cuda()
    def test_late(frees): pass
"""

USERS = ["test_again", "test_first", "test_late", "test_without_device"]


@pytest.fixture(autouse=True)
def _torch(pytester: pytest.Pytester) -> None:
    (pytester.path / "use.py").write_text(TORCH)
    pytester.syspathinsert()


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("--cuda-simulate", "h100:2", "-p", "no:randomly", *arguments)


@pytest.mark.parametrize("level", ["off", "session"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_those_who_use_cuda_are_named_and_counted(
    pytester: pytest.Pytester, level: str, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_it=SUITE)
    result = run(pytester, "--cuda-isolation", level, *workers)
    result.assert_outcomes(passed=6)
    named = ", ".join(f"test_it.py::{name}" for name in USERS)
    result.stdout.fnmatch_lines(
        [
            "used CUDA without declaring it, and without a lease: 4",
            f"       {named}",
            "       Put @requires_cuda on them, or choose --cuda-unmarked=grant, hide or fail.",
        ]
    )


def test_a_suite_whose_tests_declare_what_they_use_is_told_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from use import use_cuda\ndef test_declared(cuda_device): use_cuda()\ndef test_cpu(): pass\n"
        "def test_again(cuda_device): use_cuda()"
    )
    result = run(pytester)
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line("*used CUDA*")


def test_many_are_counted_and_some_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest
        from use import use_cuda
        def test_declared(cuda_device): pass
        @pytest.mark.parametrize("x", range(12))
        def test_many(x): use_cuda()
        """
    )
    result = run(pytester)
    result.stdout.fnmatch_lines(["used CUDA without declaring it*: 12", "*test_many[[]7[]] and 2 more"])


@pytest.mark.parametrize("told", [("--cuda-unmarked", "keep"), ("--cuda-unmarked", "fail")])
def test_whoever_initialises_cuda_without_torch_is_seen(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    told: tuple[str, ...],
) -> None:
    folder = build_cuda(tmp_path_factory.mktemp("cuda"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    for name, value in cuda_environment([FakeGpu()]).items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(
        test_it="""
        import ctypes
        def test_declared(cuda_device): pass
        def test_loads(): ctypes.CDLL("libcuda.so.1")
        def test_initialises(): ctypes.CDLL("libcuda.so.1").cuInit(0)
        def test_after(): pass
        """
    )
    result = run(pytester, "--cuda-isolation", "session", *told)
    failed = told[1] == "fail"
    result.assert_outcomes(passed=3 if failed else 4, failed=int(failed))
    result.stdout.fnmatch_lines(["used CUDA without declaring it*: 1", "       test_it.py::test_initialises"])


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_fail_fails_those_that_would_pass(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        test_it=SUITE
        + """
    @pytest.mark.xfail
    def test_known(): use_cuda(); assert 0
    @pytest.mark.xfail(strict=False)
    def test_known_to_pass(): use_cuda()
    def test_fails(): use_cuda(); assert 0, "its own"
    def test_skips(): use_cuda(); pytest.skip()
"""
    )
    result = run(pytester, "--cuda-unmarked", "fail", "--cuda-isolation", "session", *workers)
    # test_late uses CUDA after its body: an error beside its pass.
    result.assert_outcomes(passed=3, failed=4, errors=1, xfailed=1, xpassed=1, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED test_it.py::test_first - [[]cuda-unmarked[]] needs a requirement*",
            "FAILED test_it.py::test_fails - AssertionError: its own*",
            "ERROR test_it.py::test_late - [[]cuda-unmarked[]]*",
            "*Put @requires_cuda on the test, or request cuda_device (--cuda-unmarked=fail)",
        ]
    )


MASKS = """
    import os
    def mask(): return os.environ.get("CUDA_VISIBLE_DEVICES")
    def test_cpu(): assert mask() == {cpu!r}
    def test_device(cuda_device): assert mask() == {device!r}, mask()
    def test_cpu_again(): assert mask() == {cpu!r}
"""


@pytest.mark.parametrize("outer", [None, "1", "1,0"])
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_hide_shows_them_no_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, outer: str | None, workers: tuple[str, ...]
) -> None:
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    pytester.makepyfile(MASKS.format(cpu="-1", device=(outer or "0")[0]))
    result = run(pytester, "--cuda-unmarked", "hide", "--cuda-isolation", "session", "-W", "error", *workers)
    result.assert_outcomes(passed=3)


def test_hide_is_undone_after_the_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pytester.makepyfile("import os\ndef test_cpu(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1'")
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100:2", "--cuda-unmarked", "hide")
    result.assert_outcomes(passed=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_hide_says_where_it_cannot(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    result = run(pytester, "--cuda-unmarked", "hide", "--cuda-isolation", "off", "-W", "error")
    result.assert_outcomes(passed=6, warnings=1)
    result.stdout.fnmatch_lines(
        ["*[[]cuda-unmarked[]] --cuda-unmarked=hide has no effect: device tests run in the same*"]
    )
    result.stdout.fnmatch_lines(["used CUDA without declaring it*: 4"])


def test_hide_says_that_cuda_was_there_first(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_cuda(tmp_path_factory.mktemp("cuda"))))
    pytester.makepyfile("import ctypes, os\nctypes.CDLL('libcuda.so.1').cuInit(0)\ndef test_it(): pass")
    result = run(pytester, "--cuda-unmarked", "hide")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*hide has no effect: CUDA was initialised while collecting*"])


GRANTED = """
    import os, pytest, pytest_cudaenv
    def test_plain():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert os.environ["CUDAENV_LEASE"] == pytest_cudaenv.current().devices[0].uuid
    class TestCase:
        def test_method(self, tmp_path): test_plain()
    def test_declared(cuda_device): test_plain()
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_grant_runs_every_test_with_one_device(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(GRANTED)
    arguments = ("--cuda-unmarked", "grant", "--cuda-isolation", "session", *workers)
    result = run(pytester, *arguments)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["passed: 3 on NVIDIA H100*"])
    run(pytester, *arguments, "-m", "cuda").assert_outcomes(passed=1)


def test_grant_is_good_without_a_single_mark(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import os\ndef test_it(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '0'")
    run(pytester, "--cuda-unmarked", "grant", "--cuda-isolation", "session").assert_outcomes(passed=1)


def test_grant_leaves_tests_alone_where_nothing_can_be_granted(pytester: pytest.Pytester) -> None:
    """No device, or one that this torch cannot use: a test that declares nothing needs nothing."""
    pytester.makepyfile("import os\ndef test_it(): assert 'CUDA_VISIBLE_DEVICES' not in os.environ")
    arguments = ("--cuda-unmarked", "grant", "--cuda-isolation", "session")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)
    run(pytester, *arguments, "--cuda-assume", "torch==2.11.0+cpu").assert_outcomes(passed=1)


def test_grant_says_that_it_needs_device_processes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = run(pytester, "--cuda-unmarked", "grant", "--cuda-isolation", "off")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*grant has no effect with --cuda-isolation=off*"])


@pytest.mark.parametrize("origin", ["ini", "variable"])
def test_its_other_spellings(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    pytester.makepyfile(test_it=SUITE)
    if origin == "ini":
        pytester.makeini("[pytest]\ncuda_unmarked = fail")
    else:
        monkeypatch.setenv("CUDAENV_UNMARKED", "fail")
    run(pytester, "-k", "first or none").assert_outcomes(passed=1, failed=1, deselected=4)
