"""What a fork carries over from the pytest process, and what must not come of it."""

from __future__ import annotations

import pytest

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation")


def test_torchs_inter_op_pool_is_a_reason_not_to_fork(pytester: pytest.Pytester) -> None:
    """What is given to a pool that a fork did not copy is never run, and no signal handler ends the waiting."""
    pytester.makepyfile(
        """
        import torch, warnings
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still what suites use
        @torch.jit.script
        def twice(x: torch.Tensor):
            return 2 * torch.jit.wait(torch.jit.fork(torch.relu, x))
        assert twice(torch.ones(1)).item() == 2
        def test_it(cuda_device): assert twice(torch.ones(1)).item() == 2
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, "session", "--timeout", "60", "-W", "ignore::DeprecationWarning")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*[[]no-fork[]] thread PTThreadPool was started while collecting test_*"])


def test_a_controller_sees_that_its_worker_died_whatever_it_left_behind(pytester: pytest.Pytester) -> None:
    """A grandchild that holds the worker's descriptors would hide the end of the stream until it ends itself."""
    pytester.makepyfile(
        """
        import os, signal, time
        WORKER = os.getpid()
        def test_kills_its_worker(cuda_device):
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            os.kill(WORKER, signal.SIGKILL)
            time.sleep(60)
        def test_after(cuda_device): pass
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATE, "session", "-n", "1", timeout=100)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*worker 'gw0' crashed while running *test_kills_its_worker*"])


def test_exit_handlers_run_where_they_were_registered(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import atexit, os
        HERE = os.getpid()
        def note(what):
            with open("ended", "a") as file: file.write(f"{what} {os.getpid() == HERE}\\n")
        atexit.register(note, "import")
        def test_a(cuda_device): atexit.register(note, "a")
        def test_b(cuda_device): pass
        def test_cpu(): atexit.register(note, "cpu")
        """
    )
    pytester.runpytest_subprocess(*SIMULATE, "function").assert_outcomes(passed=3)
    lines = (pytester.path / "ended").read_text().splitlines()
    assert sorted(lines) == ["a False", "cpu True", "import True"]


def test_garbage_of_the_collection_is_finalised_once(pytester: pytest.Pytester) -> None:
    """In each process, `__del__` would remove what the others use."""
    pytester.makepyfile(
        """
        import gc, os
        class Cycle:
            def __init__(self): self.me = self
            def __del__(self):
                with open("finalised", "a") as file: file.write(f"{os.getpid()}\\n")
        gc.disable()
        Cycle()
        def test_a(cuda_device): gc.collect()
        def test_b(cuda_device): gc.collect()
        def test_cpu(): gc.collect()
        """
    )
    pytester.runpytest_subprocess(*SIMULATE, "function").assert_outcomes(passed=3)
    assert len((pytester.path / "finalised").read_text().split()) == 1


def test_answers_about_devices_are_not_remembered_from_the_collection(pytester: pytest.Pytester) -> None:
    """transformers remembers what it once asked; a device process has another mask than the collection."""
    pytester.makepyfile(
        """
        import os
        from transformers.utils import import_utils
        BEFORE = import_utils.is_torch_bf16_gpu_available()
        def test_it(cuda_device):
            assert BEFORE
            caches = [v for v in vars(import_utils).values() if hasattr(v, "cache_info")]
            assert caches and not any(v.cache_info().currsize for v in caches)
        """
    )
    pytester.runpytest_subprocess(*SIMULATE, "session").assert_outcomes(passed=1)


def test_a_module_that_ends_with_a_device_test_is_torn_down_before_the_next(pytester: pytest.Pytester) -> None:
    """pytest assumes that each test runs where the last one did."""
    module = """
        import pytest
        @pytest.fixture(scope="module")
        def wide():
            yield
            print("torn down")
        def test_cpu(wide): pass
        def test_device(cuda_device): pass
    """
    pytester.makepyfile(test_a=module, test_b="def test_next(): pass", test_c=module)
    for workers in ((), ("-n", "1")):
        result = pytester.runpytest_subprocess(*SIMULATE, "session", *workers)
        result.assert_outcomes(passed=5)
        assert "not torn down properly" not in result.stdout.str()
