"""The state guard in whole runs: what is told of a test that left torch changed, and what the next test sees."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")  # once, in this process: what inner runs import is forgotten after each

LEAK = "needs torch.backends.cuda.matmul.allow_tf32 given back; have True, was False"


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    yield
    assert torch.backends.cuda.matmul.allow_tf32 is False, "an inner run left TF32 on"


def cells(*bodies: str) -> str:
    """A suite of cell tests, which run on every host in the process of pytest."""
    head = """
import os
import unittest
import pytest
import torch
from pytest_cudaenv import requires_cuda
pytestmark = [pytest.mark.attn_backends("eager"), pytest.mark.dtypes("float32")]
ON = torch.backends.cuda.matmul
"""
    return head + "\n".join(bodies)


LEAKS = "def test_leaks(cell): ON.allow_tf32 = True\n"
NEXT = "def test_next(cell): assert ON.allow_tf32 is False\n"


def test_a_leak_is_told_and_the_next_test_starts_clean(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(cells(LEAKS, NEXT))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"[[]state-leak[]] 1: {LEAK}", "*::test_leaks[[]eager-fp32[]]"])


def test_strict_makes_it_an_error_of_the_test_that_left_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(cells(LEAKS, NEXT))
    result = pytester.runpytest_inprocess("--cuda-strict")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_leaks*", f"[[]state-leak[]] {LEAK}*(--cuda-strict)*", "ERROR *::test_leaks*"]
    )


@pytest.mark.parametrize(
    "body",
    [
        "    ON.allow_tf32 = True\n    assert 0",
        "    ON.allow_tf32 = True\n    pytest.skip('later')",
        "    ON.allow_tf32 = True\n    pytest.xfail('known')",
    ],
    ids=["fails", "skips", "xfails"],
)
def test_a_test_that_does_not_pass_gives_back_as_well(pytester: pytest.Pytester, body: str) -> None:
    pytester.makepyfile(cells(f"def test_leaks(cell):\n{body}\n", NEXT))
    result = pytester.runpytest_inprocess()
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines([f"[[]state-leak[]] 1: {LEAK}"])


def test_an_unmarked_test_is_not_judged_and_its_leak_reaches_no_cell(pytester: pytest.Pytester) -> None:
    """TF32 left on by the test before, which does not use this plugin: for tests like it nothing changes."""
    plain = "def test_plain(): ON.allow_tf32 = True\n"
    after = "def test_plain_after():\n    assert ON.allow_tf32 is True\n    ON.allow_tf32 = False\n"
    pytester.makepyfile(cells(plain, NEXT, after))
    result = pytester.runpytest_inprocess("--cuda-strict")
    result.assert_outcomes(passed=3)
    assert "state-leak" not in result.stdout.str()


@pytest.mark.parametrize("scope", ["class", "module", "session"])
def test_what_a_wider_fixture_sets_is_the_suites(pytester: pytest.Pytester, scope: str) -> None:
    """It is set up within the first test and torn down within the last, which are not to blame."""
    suite = f"""
@pytest.fixture(scope={scope!r})
def tf32():
    ON.allow_tf32 = True
    os.environ["TF32_IS_ON"] = "1"
    yield
    ON.allow_tf32 = False
    del os.environ["TF32_IS_ON"]
class TestIt:
    def test_first(self, tf32, cell): assert ON.allow_tf32
    def test_leaks(self, tf32, cell):
        assert ON.allow_tf32
        torch.backends.cudnn.benchmark = True
    def test_last(self, tf32, cell):
        assert ON.allow_tf32 and not torch.backends.cudnn.benchmark and os.environ["TF32_IS_ON"]
def test_after(cell): assert not ON.allow_tf32 {"or True" if scope != "class" else ""}
"""
    pytester.makepyfile(cells(suite))
    result = pytester.runpytest_inprocess("--cuda-strict")
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*[[]state-leak[]] needs torch.backends.cudnn.benchmark given back*"])
    assert "allow_tf32" not in result.stdout.str()
    assert "TF32_IS_ON" not in result.stdout.str()


def test_a_wider_fixture_of_an_unmarked_test_is_known_as_well(pytester: pytest.Pytester) -> None:
    suite = """
@pytest.fixture(scope="module")
def tf32():
    ON.allow_tf32 = True
    yield
    ON.allow_tf32 = False
def test_plain(tf32): pass
def test_cell(tf32, cell): assert ON.allow_tf32
"""
    pytester.makepyfile(cells(suite))
    pytester.runpytest_inprocess("--cuda-strict").assert_outcomes(passed=2)


def test_what_a_function_fixture_sets_and_gives_back_is_no_leak(pytester: pytest.Pytester) -> None:
    suite = """
@pytest.fixture
def tf32(monkeypatch):
    monkeypatch.setenv("TF32_IS_ON", "1")
    ON.allow_tf32 = True
    yield
    ON.allow_tf32 = False
def test_it(tf32, cell): assert ON.allow_tf32
"""
    pytester.makepyfile(cells(suite))
    pytester.runpytest_inprocess("--cuda-strict").assert_outcomes(passed=1)


def test_what_a_conftest_sets_before_each_test_is_no_leak(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import torch
        ONCE = []
        def pytest_runtest_setup(item):
            if not ONCE:
                ONCE.append(item)
                torch.backends.cudnn.benchmark = True
        def pytest_unconfigure():
            torch.backends.cudnn.benchmark = False
        """
    )
    pytester.makepyfile(cells("def test_a(cell): assert torch.backends.cudnn.benchmark\n", "test_b = test_a\n"))
    pytester.runpytest_inprocess("--cuda-strict").assert_outcomes(passed=2)


@pytest.mark.parametrize("level", ["session", "module", "function", "off"])
def test_device_tests_at_every_level_of_isolation(pytester: pytest.Pytester, level: str) -> None:
    suite = """
@requires_cuda
def test_leaks(): ON.allow_tf32 = True
@requires_cuda
def test_next(): assert ON.allow_tf32 is False
@requires_cuda
class TestLegacy(unittest.TestCase):
    @classmethod
    def setUpClass(cls): torch.backends.cudnn.benchmark = True
    @classmethod
    def tearDownClass(cls): torch.backends.cudnn.benchmark = False
    def test_a_leaks(self): ON.allow_tf32 = True
    def test_b_next(self):
        assert ON.allow_tf32 is False and torch.backends.cudnn.benchmark
"""
    pytester.makepyfile(cells(suite).replace("pytestmark =", "_ ="))
    result = pytester.runpytest_inprocess("--cuda-simulate=h100", f"--cuda-isolation={level}", "--cuda-strict")
    result.assert_outcomes(passed=4, errors=2)
    assert "cudnn" not in result.stdout.str()
    result.stdout.fnmatch_lines([f"[[]state-leak[]] 2: {LEAK}", "*::TestLegacy::test_a_leaks, *::test_leaks"])


def test_xdist_workers_tell_it_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(cells(LEAKS, NEXT))
    result = pytester.runpytest_inprocess("-n1", "--cuda-strict")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"[[]state-leak[]] 1: {LEAK}"])


def test_each_attempt_of_a_rerun_starts_clean(pytester: pytest.Pytester) -> None:
    suite = """
SEEN = []
def test_flaky(cell):
    SEEN.append(ON.allow_tf32)
    ON.allow_tf32 = True
    assert len(SEEN) == 3
    assert SEEN == [False] * 3
"""
    pytester.makepyfile(cells(suite))
    result = pytester.runpytest_inprocess("--reruns=4")
    result.assert_outcomes(passed=1)
    assert "2 rerun" in result.stdout.str()
    result.stdout.fnmatch_lines([f"[[]state-leak[]] 1: {LEAK}"])


def test_the_ledger_tells_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(cells(LEAKS, NEXT))
    pytester.runpytest_inprocess("--cuda-ledger=run.jsonl")
    told = [line for line in (pytester.path / "run.jsonl").read_text().splitlines() if "state-leak" in line]
    assert len(told) == 1
    assert "test_leaks" in told[0]
    assert LEAK in told[0]


def test_a_test_that_imports_torch_starts_from_its_defaults(pytester: pytest.Pytester) -> None:
    """In a process of its own, which has not imported torch before."""
    pytester.makepyfile(
        """
        import sys
        from pytest_cudaenv import requires_cuda
        @requires_cuda
        def test_leaks():
            assert "torch" not in sys.modules
            import torch
            torch.backends.cudnn.benchmark = True
        @requires_cuda
        def test_next():
            import torch
            assert torch.backends.cudnn.benchmark is False
        """
    )
    result = pytester.runpytest_subprocess("--cuda-simulate=h100", "--cuda-isolation=off")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["[[]state-leak[]] 1: needs torch.backends.cudnn.benchmark given back; have True*"])
