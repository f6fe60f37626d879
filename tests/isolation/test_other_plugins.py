"""Other plugins go on working beside device processes."""

from __future__ import annotations

import pytest

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation", "session")


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "xdist"])
def test_coverage_counts_what_device_tests_run(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """Without any setting of the user's, and without files left behind."""
    pytester.makepyfile(
        library="def on_cpu():\n    return 1\n\ndef on_device():\n    two = 2\n    return two\n",
        test_it="import library\ndef test_cpu(): library.on_cpu()\ndef test_device(cuda_device): library.on_device()",
    )
    result = pytester.runpytest_subprocess(*SIMULATE, *workers, "--cov=library", "--cov-report=term")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["library.py *5 * 0 *100%"])
    assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_reruns_survive_a_death(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        """
        import os, pytest, signal
        def times(name):
            with open(name, "a") as file: file.write("x")
            return os.path.getsize(name)
        @pytest.mark.flaky(reruns=2)
        def test_dies_once(cuda_device):
            if times("died") < 2: os.kill(os.getpid(), signal.SIGKILL)
        @pytest.mark.flaky(reruns=2)
        def test_fails_once(cuda_device): assert times("failed") > 1
        @pytest.mark.flaky(reruns=1)
        def test_dies_always(cuda_device):
            times("always")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, *workers)
    assert result.parseoutcomes() == {"passed": 2, "failed": 1, "rerun": 3}
    assert (pytester.path / "always").read_text() == "xx"


@pytest.mark.parametrize("arguments", [("-p", "randomly"), ("-p", "randomly", "-n", "2")], ids=["plain", "xdist"])
def test_random_order(pytester: pytest.Pytester, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(
        test_a="def test_a(cuda_device): ...\ndef test_b(): ...\ndef test_c(cuda_device): ...",
        test_b="def test_a(cuda_device): ...\ndef test_b(): ...\ndef test_c(cuda_device): ...",
    )
    pytester.runpytest_subprocess(*SIMULATE, *arguments, "-p", "no:cacheprovider").assert_outcomes(passed=6)


def test_hypothesis(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        @settings(max_examples=20, deadline=None)
        @given(st.integers())
        def test_passes(x): assert x == x
        @settings(max_examples=20, deadline=None)
        @given(x=st.integers())
        def test_fails(cuda_device, x): assert x < 5
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_fails(*", "*x=5,*"])
