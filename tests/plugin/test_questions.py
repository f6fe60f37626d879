"""torch.cuda's questions while collecting: answered from facts, put back before the first test."""

from __future__ import annotations

import pytest

LEGACY = """
    import pytest
    import pytest_cudaenv
    import torch
    from torch.cuda import device_count as copied

    CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    LARGE = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 40 << 30
    COUNT = torch.cuda.device_count()
    NAME = torch.cuda.get_device_name() if COUNT else None
    COPIED = copied()
    BF16 = torch.cuda.is_bf16_supported(including_emulation=False)
    FREE = torch.cuda.mem_get_info(0)[0] if COUNT else 0
    SM = torch.cuda.get_device_properties("cuda:0").multi_processor_count if COUNT else 0

    @pytest.mark.skipif(CAPABILITY < (9, 0), reason="needs Hopper")
    def test_hopper(): pass

    @pytest.mark.skipif(COUNT < 2, reason="needs two")
    def test_two(): pass

    @pytest.mark.skipif(not LARGE, reason="needs memory")
    def test_large(): pass

    def test_originals_are_back():
        assert not hasattr(torch.cuda.is_available, "__cudaenv__")
        assert torch.cuda.is_available.__module__ == "torch.cuda"
        assert torch.cuda.mem_get_info is torch.cuda.memory.mem_get_info
        assert not hasattr(torch.cuda.mem_get_info, "__cudaenv__")
        assert copied() == torch.cuda.device_count()
        print("ANSWERS", CAPABILITY, COUNT, COPIED, NAME, BF16, FREE >> 30, SM)
"""


@pytest.mark.parametrize(
    ("simulate", "passed", "answers"),
    [
        ("h100:2", 4, "(9, 0) 2 2 NVIDIA H100 80GB HBM3 True 79 132"),
        ("t4", 1, "(7, 5) 1 1 Tesla T4 False 15 40"),
        ("a100-80", 2, "(8, 0) 1 1 NVIDIA A100-SXM4-80GB True 80 108"),
    ],
)
def test_module_level_conditions_decide_as_on_that_host(
    pytester: pytest.Pytester, simulate: str, passed: int, answers: str
) -> None:
    pytester.makepyfile(LEGACY)
    result = pytester.runpytest_subprocess("-s", "--cuda-simulate", simulate)
    result.assert_outcomes(passed=passed, skipped=4 - passed)
    result.stdout.fnmatch_lines([f"*ANSWERS {answers}"])


def test_transformers_decorators_decide_as_on_that_host(pytester: pytest.Pytester) -> None:
    """With no edit, and what they remembered of the simulated host is forgotten before the tests."""
    pytester.makepyfile(
        """
        import pytest_cudaenv
        from transformers.testing_utils import (
            require_cuda_capability_at_least, require_torch_gpu, require_torch_large_gpu, require_torch_multi_gpu,
        )
        from transformers.utils.import_utils import is_torch_cuda_available

        @require_torch_gpu
        def test_gpu(): pass

        @require_torch_multi_gpu
        def test_multi(): pass

        @require_torch_large_gpu
        def test_large(): pass

        @require_cuda_capability_at_least(10, 0)
        def test_blackwell(): pass

        COLLECTING = is_torch_cuda_available()
        def test_forgotten():
            import torch
            assert COLLECTING is True
            assert is_torch_cuda_available() == torch.cuda.is_available()
        """
    )
    result = pytester.runpytest_subprocess("-rs", "--cuda-simulate", "h100:2")
    result.assert_outcomes(passed=4, skipped=1)
    result.stdout.fnmatch_lines(["*Requires CUDA capability >= 10.0*"])


@pytest.mark.parametrize(
    ("first", "is_on"),
    [
        ("import pytest_cudaenv", True),
        ("from pytest_cudaenv import requires_cuda", True),
        ("import pytest_cudaenv as env", True),
        ("import pytest", False),
    ],
)
def test_on_from_the_moment_the_suite_shows_that_it_uses_the_plugin(
    pytester: pytest.Pytester, first: str, is_on: bool
) -> None:
    """A module that imports the package has its questions answered from its first line on."""
    pytester.makepyfile(
        f"""
        import torch
        ANSWERED = hasattr(torch.cuda.is_available, "__cudaenv__")
        {first}
        def test_it(): assert ANSWERED is {is_on}
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize("where", ["conftest", "ini", "environment"])
def test_on_by_conftest_ini_or_environment(
    pytester: pytest.Pytester, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "conftest":
        pytester.makeconftest("import pytest_cudaenv")
    elif where == "ini":
        pytester.makeini("[pytest]\ncuda_unmet = skip")
    else:
        monkeypatch.setenv("CUDAENV_UNMET", "skip")
    pytester.makepyfile(
        """
        import torch
        ANSWERED = hasattr(torch.cuda.is_available, "__cudaenv__")
        def test_it(): assert ANSWERED
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_who_asked_is_logged(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_asker="""
        import pytest_cudaenv, torch
        COUNT = torch.cuda.device_count()
        from pytest_cudaenv import requires_cuda
        @requires_cuda
        def test_it(): assert COUNT == 2
        """
    )
    result = pytester.runpytest_subprocess("-v", "--cuda-simulate", "h100:2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["cudaenv: *test_asker.py:2 asked torch.cuda.device_count() while collecting: 2"])
    assert "asked torch" not in pytester.runpytest_subprocess("--cuda-simulate", "h100:2").stdout.str()


def test_a_host_without_devices_answers_as_torch_does(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest_cudaenv.host.detect
        from pytest_cudaenv.host.devices import Host
        from pytest_cudaenv.host.software import Software, TorchBuild
        BUILD = TorchBuild("2.13.0", cuda="13.0")
        pytest_cudaenv.host.detect.detect_host = lambda *_: Host(software=Software(torch=BUILD))
        """
    )
    pytester.makepyfile(
        """
        import pytest, torch
        ANSWERS = (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_bf16_supported())
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            torch.cuda.get_device_capability()
        def test_it(): assert ANSWERS == (False, 0, False)
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_indices_that_are_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest_cudaenv, pytest, torch
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_name(2)
        with pytest.raises(AttributeError, match="not known"):
            torch.cuda.get_device_properties(0).regs_per_multiprocessor
        SECOND = torch.cuda.get_device_properties(torch.device("cuda", 1)), torch.cuda.get_device_properties("cuda")
        def test_it():
            assert SECOND[0].uuid != SECOND[1].uuid and SECOND[0].major == 9 and SECOND[0].minor == 0
        """
    )
    pytester.runpytest_subprocess("--cuda-simulate", "h100:2").assert_outcomes(passed=1)
