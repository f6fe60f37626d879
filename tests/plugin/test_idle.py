"""A device test that passes without using CUDA has tested nothing of its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.runner import is_idle

OnHost = Callable[[Host], None]

# The allocator of another torch, which is all that is asked of it.
TORCH = """
    import sys, types
    import pytest
    ALLOCATED = [0]
    def use(): ALLOCATED[0] += 1
    cuda = types.SimpleNamespace(
        is_initialized=lambda: ALLOCATED[0] > 0,
        device_count=lambda: 1,
        memory_stats=lambda index: {"allocation.all.allocated": ALLOCATED[0]},
        max_memory_allocated=lambda index: 4096,
        reset_peak_memory_stats=lambda index: None,
        synchronize=lambda: None,
    )
    torch = types.SimpleNamespace(cuda=cuda, manual_seed=lambda seed: None)
    @pytest.fixture(autouse=True, scope="session")
    def _torch():
        kept = sys.modules.get("torch")
        sys.modules["torch"] = torch
        yield
        sys.modules.pop("torch")
        if kept is not None: sys.modules["torch"] = kept
"""

SUITE = """
    from conftest import use
    import pytest
    from pytest_cudaenv import requires_cuda
    def test_before_any_use(cuda_device): pass
    def test_computes(cuda_device): use()
    def test_returns_early(cuda_device):
        if True: return
    @pytest.fixture
    def on_device(cuda_device): use()
    def test_its_fixture_computes(on_device): pass
    def test_fails(cuda_device): assert 0
    def test_cpu(): pass
    @pytest.mark.xfail
    def test_expected(cuda_device): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, on_host: OnHost) -> pytest.Pytester:
    on_host(replace(simulated_host("h100"), simulated=None))
    pytester.makeconftest(TORCH)
    pytester.makepyfile(test_it=SUITE)
    return pytester


@pytest.mark.parametrize("level", ["off", "session"])
def test_idle_passes_are_named(suite: pytest.Pytester, level: str) -> None:
    result = suite.runpytest_inprocess("--cuda-isolation", level)
    result.assert_outcomes(passed=5, failed=1, xpassed=1)
    result.stdout.fnmatch_lines(
        ["passed without using CUDA: 2", "*test_it.py::test_before_any_use, test_it.py::test_returns_early"]
    )


@pytest.mark.parametrize("switch", [("--cuda-strict",), ("-o", "cuda_strict=true")], ids=lambda switch: switch[0])
def test_strict_fails_them(suite: pytest.Pytester, switch: tuple[str, ...]) -> None:
    result = suite.runpytest_inprocess(*switch)
    result.assert_outcomes(passed=3, failed=3, xpassed=1)
    result.stdout.fnmatch_lines(["*[[]cuda-idle[]] needs to use CUDA, as it asks for a device; have neither*"])


def test_a_simulated_device_is_never_used_and_nobody_is_blamed(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--cuda-simulate", "h100", "--cuda-strict")
    result.assert_outcomes(passed=5, failed=1, xpassed=1)
    assert "without using CUDA" not in result.stdout.str()


@pytest.mark.parametrize("text", ["maybe", "2"])
def test_a_switch_is_true_or_false(suite: pytest.Pytester, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAENV_STRICT", text)
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --cuda-strict: '{text}' (CUDAENV_STRICT): write true or false"])


@pytest.mark.parametrize(
    ("before", "now", "idle"),
    [
        ((False, ()), (False, ()), True),
        ((False, ()), (True, (1,)), False),
        ((True, (1,)), (True, (1,)), True),
        ((True, (1,)), (True, (2,)), False),
        # CUDA is in use and torch has nothing to do with it: nobody can tell.
        ((True, ()), (True, ()), False),
        ((False, ()), (True, ()), False),
    ],
)
def test_what_idle_is(before: tuple[bool, tuple[int, ...]], now: tuple[bool, tuple[int, ...]], idle: bool) -> None:
    assert is_idle(before, now) is idle
