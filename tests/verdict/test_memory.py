"""Peak and kept memory, and who holds it: on an allocator of fabricated tensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.requirements.markers import NO_LIMIT, MemoryLimit, cuda_memory
from pytest_cudaenv.verdict.memory import (
    Known,
    Meter,
    holder,
    kept_finding,
    oom_finding,
    oom_in,
    peak_finding,
    skipped_oom,
)
from tests.verdict import fake_memory
from tests.verdict.fake_memory import COUNTS, MIB, FakeAllocator, OutOfMemoryError, Tensor

GLOBAL: list[Any] = []


@pytest.fixture(autouse=True)
def _no_memory_in_use() -> Iterator[None]:
    COUNTS.update(used=False, now={}, peak={}, emptied=0, asked=0)
    yield
    GLOBAL.clear()
    gc.collect()


def test_a_meter_asks_nothing_of_a_device_that_is_not_in_use() -> None:
    meter = Meter(FakeAllocator(), [0])
    assert (meter.peak, meter.kept, meter.outside) == (0, 0, None)
    one = Tensor(3)
    assert (meter.peak, meter.kept) == (3 * MIB, 3 * MIB)
    del one
    assert (meter.peak, meter.kept) == (3 * MIB, 0)


def test_reset_begins_anew_and_forgets_nothing() -> None:
    meter = Meter(FakeAllocator(), [0])
    large = Tensor(50)
    del large
    kept = Tensor(2)
    meter.reset()
    assert (meter.peak, meter.kept) == (2 * MIB, 0)
    assert meter.highest == 50 * MIB
    assert meter.total_growth == 2 * MIB
    del kept


def test_peaks_are_of_one_device_and_kept_memory_of_all() -> None:
    meter = Meter(FakeAllocator(), [0, 1])
    both = Tensor(3, 0), Tensor(5, 1)
    assert (meter.peak, meter.kept) == (5 * MIB, 8 * MIB)
    del both


def test_cycles_are_no_kept_memory() -> None:
    meter = Meter(FakeAllocator(), [0])
    one: Any = Tensor(3)
    one.itself = one
    del one
    assert meter.growth == 3 * MIB
    assert meter.kept == 0


def test_what_a_wider_fixture_allocates_meanwhile_is_not_the_tests() -> None:
    meter = Meter(FakeAllocator(), [0])
    mine = Tensor(1)
    before = meter.pause()
    weights, transient = Tensor(40), Tensor(60)
    del transient
    meter.resume(before)
    assert meter.kept == MIB
    assert meter.peak == 41 * MIB, "the model is there while the test runs; what loading it took is not"
    assert meter.in_process == 101 * MIB
    before = meter.pause()
    del weights
    meter.resume(before)
    assert meter.total_growth == MIB
    del mine


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=12))
def test_kept_is_what_the_tests_own_steps_have_allocated(steps: list[tuple[bool, int]]) -> None:
    """Each step allocates; those of wider fixtures are excused, however they are mixed."""
    meter, alive = Meter(FakeAllocator(), [0]), []
    for is_wider, mib in steps:
        before = meter.pause() if is_wider else None
        alive.append(Tensor(mib))
        if before is not None:
            meter.resume(before)
    assert meter.total_growth == sum(mib for is_wider, mib in steps if not is_wider) * MIB
    assert meter.in_process == sum(mib for _, mib in steps) * MIB


class Model:
    cached: Any = None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def test_a_holder_is_named_as_the_suite_knows_it() -> None:
    GLOBAL.append(Tensor(1))
    assert holder(GLOBAL[0]) == f"the global {__name__}.GLOBAL[0]"
    GLOBAL[0] = {"model": Model(Tensor(1))}
    assert holder(GLOBAL[0]["model"].weight) == f"the global {__name__}.GLOBAL[0]['model'].weight"
    GLOBAL.clear()
    Model.cached = Tensor(1)
    assert holder(Model.cached) == "the class attribute Model.cached"
    Model.cached = None


def test_a_frame_of_a_traceback_is_named() -> None:
    def fails() -> None:
        activations = Tensor(1)
        raise ValueError(activations)

    with pytest.raises(ValueError, match="Tensor") as caught:
        fails()
    tensor = caught.value.args[0]
    caught.value.args = ()
    wanted = "the frame of fails (test_memory.py:"
    here = [sys._getframe()]
    told = holder(tensor, ignored=here)
    assert told.startswith(wanted)
    assert told.endswith("local activations")


def test_a_closure_is_named() -> None:
    def made() -> Any:
        weight = Tensor(1)
        return lambda: weight

    function = made()
    assert "closure" in holder(function())


def test_what_was_there_before_is_nobodys_leak() -> None:
    known, old = Known(), Tensor(5)
    known.note(FakeAllocator().held())
    GLOBAL.extend([Tensor(1), Tensor(2)])
    fresh = known.new(FakeAllocator().held())
    assert [one.count for one in fresh] == [2 * MIB, MIB]
    known.add(fresh)
    assert known.new(FakeAllocator().held()) == []
    del old


def test_findings_say_need_have_and_holder() -> None:
    GLOBAL.append(Tensor(64))
    fresh = FakeAllocator().held()
    without = kept_finding(64 * MIB, NO_LIMIT, fresh)
    assert without is not None
    assert not without.is_failure
    assert str(without).startswith(
        "[memory-kept] needs all memory given back; have 64 MiB kept: float32 (16777216,) on cuda:0, 64 MiB, held by "
        f"the global {__name__}.GLOBAL[0]"
    )
    assert kept_finding(64 * MIB - 1, NO_LIMIT, fresh) is None
    marked = kept_finding(1, MemoryLimit(leak=0), [])
    assert marked is not None
    assert marked.is_failure
    assert marked.text == "needs all memory given back; have 1 bytes kept, by no tensor that Python knows of"
    assert kept_finding(MIB, MemoryLimit(leak=MIB), fresh) is None
    over = peak_finding(3 * MIB, MemoryLimit(peak=2 * MIB))
    assert over is not None
    assert over.is_failure
    assert over.text == "needs a peak of at most 2 MiB on a device; have 3 MiB"
    assert peak_finding(2 * MIB, MemoryLimit(peak=2 * MIB)) is None
    with_others = peak_finding(3 * MIB, MemoryLimit(peak=2 * MIB), 1 * MIB)
    assert with_others is not None
    assert with_others.text.endswith("; have 3 MiB, 1 MiB of it from before the test")
    assert peak_finding(1 << 50, NO_LIMIT) is None


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.25 GiB "
            "is free. Process 7 has 77.93 GiB memory in use.",
            "needs 2.00 GiB more device memory; have 1.25 GiB free",
        ),
        (
            "CUDA error: out of memory\nCompile with",
            "needs more device memory; have too little: CUDA error: out of memory",
        ),
    ],
)
def test_out_of_memory_is_told_with_need_and_have(message: str, text: str) -> None:
    assert oom_finding(OutOfMemoryError(message)).text == text


def test_out_of_memory_is_found_behind_what_was_raised_for_it() -> None:
    oom = OutOfMemoryError("x")
    wrapped, handling = ValueError("wrapped"), ValueError("raised while handling it")
    wrapped.__cause__ = handling.__context__ = oom
    assert oom_in(wrapped) is oom
    assert oom_in(handling) is oom
    assert oom_in(ValueError("x")) is None
    assert skipped_oom(pytest.skip.Exception("GPU out of memory")) is not None
    assert skipped_oom(pytest.skip.Exception("needs a roomy GPU")) is None


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ({"peak": "2GiB"}, MemoryLimit(peak=2 * 1024**3)),
        ({"leak": "0"}, MemoryLimit(leak=0)),
        ({"leak": 0, "peak": "64 MiB"}, MemoryLimit(64 * MIB, 0)),
    ],
)
def test_the_markers_amounts(arguments: dict[str, Any], limit: MemoryLimit) -> None:
    assert cuda_memory(**arguments) == limit


@pytest.mark.parametrize("arguments", [{}, {"peak": "much"}, {"leak": True}, {"leak": "-1MiB"}])
def test_wrong_amounts_say_what_to_write(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(peak|leak)=.*GiB|leak="):
        cuda_memory(**arguments)


# Whole runs -------------------------------------------------------------------------------------------------------

HEAD = """
import unittest
import pytest
from fake_memory import COUNTS, FakeAllocator, MIB, OutOfMemoryError, Tensor
from pytest_cudaenv import cuda_memory as limit, requires_cuda
pytestmark = requires_cuda
KEPT = []
"""

CONFTEST = """
import gc
import sys
sys.path.insert(0, {path!r})
import pytest_cudaenv.torch_memory
from fake_memory import FakeAllocator
pytest_cudaenv.torch_memory.TorchAllocator = FakeAllocator
"""


class Runs:
    """Runs suites on a simulated host whose memory is fabricated."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        pytester.makeconftest(CONFTEST.format(path=str(Path(fake_memory.__file__).parent)))

    def __call__(self, suite: str, *arguments: str) -> pytest.RunResult:
        self.pytester.makepyfile(test_it=HEAD + suite)
        return self.pytester.runpytest_inprocess("--cuda-simulate=h100:2", *arguments)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runs:
    import pytest_cudaenv.torch_memory

    monkeypatch.setattr(pytest_cudaenv.torch_memory, "TorchAllocator", FakeAllocator)
    return Runs(pytester)


LEVELS = pytest.mark.parametrize("level", ["--cuda-isolation=session", "--cuda-isolation=off"])


@LEVELS
def test_a_leak_on_a_failing_test_is_found_and_its_traceback_is_none(run: Runs, level: str) -> None:
    """Both tests fail with 64 MiB in a local; only the one that keeps them in a global as well leaks."""
    suite = """
def test_fails():
    activations = Tensor(64)
    assert 0
def test_fails_and_leaks():
    activations = Tensor(64)
    KEPT.append(activations)
    assert 0
def test_next(cuda_memory):
    assert COUNTS["now"][0] == 64 * MIB
"""
    result = run(suite, "--cuda-strict", "-p", "no:randomly", level)
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_fails_and_leaks*",
            "[[]memory-kept[]] needs all memory given back; have 64 MiB kept: float32 (16777216,) on cuda:0, 64 MiB, "
            "held by the global test_it.KEPT[[]0[]]*",
        ]
    )


@LEVELS
def test_without_strict_it_is_told(run: Runs, level: str) -> None:
    result = run("def test_leaks(): KEPT.append(Tensor(65))", level)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["[[]memory-kept[]] 1: needs all memory given back; have 65 MiB kept*", "*test_leaks"])


@LEVELS
def test_the_marker_fails_a_leak_and_a_peak(run: Runs, level: str) -> None:
    suite = """
@limit(leak="0")
def test_leaks(): KEPT.append(Tensor(1))
@limit(peak="64MiB")
def test_too_much():
    Tensor(65)
@limit(peak="64MiB", leak="1MiB")
class TestLegacy(unittest.TestCase):
    def test_fits(self): Tensor(60)
    @limit(peak="10MiB")
    def test_too_much(self): Tensor(60)
    def test_leaks(self): self.kept = KEPT.append(Tensor(2))
@limit(leak="0")
def test_gives_back():
    one = Tensor(64)
    one.itself = one
"""
    result = run(suite, level)
    result.assert_outcomes(passed=4, failed=2, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*[[]memory-leak[]] needs all memory given back; have 1 MiB kept*held by the global test_it.KEPT*",
            "*[[]memory-peak[]] needs a peak of at most 64 MiB on a device; have 6? MiB*",
        ]
    )


def test_a_fixture_that_holds_it_is_named(run: Runs) -> None:
    suite = """
@pytest.fixture(scope="module")
def model(): return {}
@limit(leak="0")
def test_leaks(model): model["weight"] = Tensor(5)
def test_again(model): pass
"""
    result = run(suite)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*held by the fixture model*"])


@LEVELS
def test_what_wider_fixtures_hold_is_not_the_tests(run: Runs, level: str) -> None:
    suite = """
@pytest.fixture(scope="session")
def model(): return Tensor(500)
@pytest.fixture(scope="module")
def batch(model):
    yield Tensor(100)
@limit(leak="0", peak="700MiB")
def test_first(batch): Tensor(50)
@limit(leak="0")
def test_last(batch): pass
"""
    run(suite, "--cuda-strict", level).assert_outcomes(passed=2)


def test_a_function_fixtures_value_is_gone_with_the_test(run: Runs) -> None:
    """pytest itself holds it until the teardown has been reported."""
    suite = """
@pytest.fixture
def batch(): return Tensor(100)
@limit(leak="0")
def test_it(batch): pass
"""
    run(suite, "--cuda-strict").assert_outcomes(passed=1)


@LEVELS
def test_a_leak_is_seen_beside_a_fixture_that_ends_with_the_test(run: Runs, level: str) -> None:
    suite = """
@pytest.fixture(scope="module")
def model(): return Tensor(50)
@limit(leak="0")
def test_it(model): KEPT.append(Tensor(70))
"""
    result = run(suite, level)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*[[]memory-leak[]] needs all memory given back; have 70 MiB kept*"])


def test_a_wider_fixture_that_keeps_its_memory_is_named(run: Runs) -> None:
    suite = """
@pytest.fixture(scope="module")
def model():
    KEPT.append(Tensor(100))
    yield
@limit(leak="0")
def test_it(model): pass
"""
    result = run(suite)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "[[]memory-kept[]] 1: needs all memory given back; have 100 MiB kept*",
            "*Drop what holds it when the test or the module-scoped fixture model ends.",
        ]
    )


def test_the_fixture_measures(run: Runs) -> None:
    suite = """
def test_it(cuda_memory):
    assert cuda_memory.peak == 0
    one = Tensor(8)
    assert (cuda_memory.peak, cuda_memory.kept) == (8 * MIB, 8 * MIB)
    cuda_memory.reset()
    assert cuda_memory.kept == 0
    del one
    Tensor(3)
    assert cuda_memory.peak == 8 * MIB
"""
    run(suite).assert_outcomes(passed=1)


def test_the_fixture_needs_a_device(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    pytester.makepyfile("def test_it(cuda_memory): pass")
    result = pytester.runpytest_inprocess("--cuda-simulate=h100", "-rs")
    result.assert_outcomes(skipped=1)


def test_between_modules_memory_is_returned(run: Runs) -> None:
    suite = "def test_it(cuda_memory): Tensor(1)\ndef test_same(cuda_memory): assert COUNTS['emptied'] == 0\n"
    run.pytester.makepyfile(test_other=HEAD + "def test_other(cuda_memory): assert COUNTS['emptied'] == 1")
    run(suite, "-p", "no:randomly").assert_outcomes(passed=3)


def test_objects_are_looked_through_only_after_a_test_that_keeps_something(run: Runs) -> None:
    suite = """
@pytest.mark.parametrize("n", range(5))
def test_it(n): Tensor(100)
def test_last(): assert COUNTS["asked"] == 0
"""
    run(suite, "-p", "no:randomly").assert_outcomes(passed=6)


OOMS = """
def test_oom(): Tensor(20_000)
def test_wrapped():
    try: Tensor(20_000)
    except OutOfMemoryError as error: raise RuntimeError("generation failed") from error
def test_skips():
    try: Tensor(20_000)
    except OutOfMemoryError: pytest.skip("too small a device")
@pytest.mark.xfail
def test_known(): Tensor(20_000)
@pytest.fixture
def model(): return Tensor(20_000)
def test_in_setup(model): pass
def test_honest(): pytest.skip("not today")
"""


@LEVELS
def test_running_out_of_memory_is_an_outcome_of_its_own(run: Runs, level: str) -> None:
    result = run(OOMS, level, "-p", "no:randomly")
    result.assert_outcomes(failed=2, errors=1, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*[[]cuda-oom[]] the allocator*",
            "| PyTorch CUDA memory summary |",
            "[[]cuda-oom[]] 4: needs 20.00 GiB more device memory; have 1.25 GiB free",
            "[[]oom-skipped[]] 1: needs its device memory to have run; have skipped when it ran out",
            "*::test_skips",
        ]
    )


def test_each_attempt_of_a_rerun_has_all_memory(run: Runs) -> None:
    """What the traceback of the first attempt holds is freed before the second."""
    suite = """
SEEN = []
def test_flaky():
    SEEN.append(COUNTS["now"].get(0, 0))
    activations = Tensor(100)
    assert len(SEEN) == 2
    assert SEEN == [0, 0]
"""
    result = run(suite, "--reruns=2", "--cuda-strict")
    result.assert_outcomes(passed=1)
    assert "memory-kept" not in result.stdout.str()


def test_xdist_workers_tell_it_too(run: Runs) -> None:
    result = run("@limit(leak='0')\ndef test_leaks(): KEPT.append(Tensor(1))", "-n1")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*[[]memory-leak[]] needs all memory given back; have 1 MiB kept*"])


def test_an_expected_failure_that_leaks_is_told(run: Runs) -> None:
    suite = """
@pytest.mark.xfail
@limit(leak="0")
def test_known():
    KEPT.append(Tensor(1))
    assert 0
"""
    run(suite).assert_outcomes(xfailed=1, errors=1)
