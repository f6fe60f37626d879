"""Adoption in whole runs, with a stand-in for the libraries: a condition that holds leaves a trace, a skip says why."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., tuple[pytest.RunResult, dict[str, dict[str, Any]]]]

LIBRARY = """
    import functools
    import unittest
    import torch.cuda

    torch_device = "cuda" if torch.cuda.is_available() else "cpu"

    def require_torch_gpu(test_case):
        return unittest.skipUnless(torch_device == "cuda", "test requires CUDA")(test_case)

    def require_torch_multi_gpu(test_case):
        return unittest.skipUnless(torch.cuda.device_count() > 1, "test requires multiple CUDA GPUs")(test_case)

    def require_torch_non_multi_gpu(test_case):
        return unittest.skipUnless(torch.cuda.device_count() < 2, "test requires 0 or 1 GPU")(test_case)

    def require_torch_large_accelerator(test_case=None, *, memory=20):
        def decorator(tc):
            large = torch_device == "cuda" and torch.cuda.get_device_properties(0).total_memory / 2**30 > memory
            return unittest.skipUnless(large, f"test requires a GPU with more than {memory} GiB of memory")(tc)
        return decorator if test_case is None else decorator(test_case)

    def require_torch_fp16(test_case):
        raise AssertionError("asked the device")

    def require_peft(test_case):
        return unittest.skipUnless(False, "test requires PEFT")(test_case)

    def require_torch_xpu(test_case):
        return unittest.skipUnless(False, "test requires XPU device")(test_case)

    def require_flash_attn_3(test_case):
        return unittest.skipUnless(True, "test requires Flash Attention 3")(test_case)

    def require_tensorboard(test_case):
        return unittest.skipUnless(True, "test requires tensorboard")
"""

FACTS = """
    from types import SimpleNamespace

    def is_available():
        return False

    def is_initialized():
        return False

    def device_count():
        return 0

    def get_device_properties(device=None):
        return SimpleNamespace(total_memory=0)
"""
"""A torch that knows of no device: what it answers while collecting is the plugin's."""


@pytest.fixture
def library(pytester: pytest.Pytester) -> None:
    """A `transformers.testing_utils` of a few decorators, and what it needs of torch; both import at once."""
    for package, module, source in (("transformers", "testing_utils", LIBRARY), ("torch", "cuda", FACTS)):
        folder = pytester.mkpydir(package)
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
    (pytester.path / "torch" / "__init__.py").write_text(
        "from torch import cuda\n__version__ = '2.13.0'\n"
        "class version: cuda, hip = '13.0', None\n"
        "def manual_seed(seed): pass\n"
    )


TRANSFORMERS = ("--cuda-adopt", "transformers")


def test_what_holds_leaves_a_trace(pytester: pytest.Pytester, library: None, run: Run) -> None:
    pytester.makepyfile(
        test_suite="""
        import functools
        import os
        import unittest
        from parameterized import parameterized
        from transformers import testing_utils as hf

        def visible():
            mask = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            return len(mask.split(",")) if mask else 0

        def wrapped(function):
            @functools.wraps(function)
            def call(*args, **kwargs):
                return function(*args, **kwargs)
            return call

        @hf.require_torch_gpu
        def test_function(): assert visible() == 1

        @wrapped
        @hf.require_torch_multi_gpu
        def test_wrapped(): assert visible() == 2

        @hf.require_torch_gpu
        class Case(unittest.TestCase):
            def test_method(self): assert visible() == 1

            @hf.require_torch_multi_gpu
            def test_two(self): assert visible() == 2

            @parameterized.expand([("a",), ("b",)])
            @hf.require_torch_multi_gpu
            def test_expanded(self, name): assert visible() == 2

        class Inherited(Case):
            def test_method(self): assert visible() == 1

        @hf.require_torch_large_accelerator(memory=60)
        def test_large(): assert visible() == 1

        @hf.require_torch_large_accelerator
        def test_large_by_default(): assert visible() == 1

        @hf.require_torch_fp16
        def test_not_asked(): assert visible() == 1

        @hf.require_torch_non_multi_gpu
        def test_one_although_there_are_two(): assert visible() == 1

        def test_nothing(): assert visible() == 0
        """
    )
    result, outcomes = run(*TRANSFORMERS, "--cuda-simulate", "h100:2", "-rA")
    result.assert_outcomes(passed=15)
    on_device = {nodeid.rpartition("::")[2] for nodeid, found in outcomes.items() if found["ran_on"]}
    assert len(on_device) == 10  # Case and Inherited hold four each, by the same names
    assert "test_nothing" not in on_device


def test_what_skips_says_why(pytester: pytest.Pytester, library: None, run: Run) -> None:
    pytester.makepyfile(
        test_suite="""
        import unittest
        from transformers import testing_utils as hf

        class Case(unittest.TestCase):
            @hf.require_torch_multi_gpu
            def test_two(self): pass

            @hf.require_torch_multi_gpu
            @hf.require_torch_large_accelerator
            @hf.require_peft
            def test_all_three(self): pass

            @hf.require_torch_xpu
            def test_xpu(self): pass

        @hf.require_torch_xpu
        class OtherHardware(unittest.TestCase):
            def test_one(self): pass
        """
    )
    result, outcomes = run(*TRANSFORMERS, "--cuda-simulate", "t4")
    result.assert_outcomes(skipped=4)
    assert {nodeid.rpartition("::")[2]: found["codes"] for nodeid, found in outcomes.items()} == {
        "test_two": ["cuda-devices"],
        "test_all_three": ["cuda-devices", "cuda-memory", "package-missing"],
        "test_xpu": ["vendor-xpu"],
        "test_one": ["vendor-xpu"],
    }
    texts = {nodeid.rpartition("::")[2]: found["skip"] for nodeid, found in outcomes.items()}
    assert texts["test_two"] == "test requires multiple CUDA GPUs"
    assert texts["test_one"] == "test requires XPU device"


def test_a_check_that_the_host_contradicts_is_named(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """M1: a broken probe looks like absent hardware, and a decorator that asks too little lets a test fail."""
    pytester.makepyfile(
        test_suite="""
        from transformers import testing_utils as hf

        hf.torch_device = "cpu"   # the broken probe

        @hf.require_torch_gpu
        def test_probe(): pass

        hf.torch_device = "cuda"

        @hf.require_flash_attn_3
        def test_no_code_for_this_device(): raise AssertionError("ran")
        """
    )
    assumed = ("--cuda-assume", "flash-attn-3==3.0.0")
    result, outcomes = run(*TRANSFORMERS, "--cuda-simulate", "t4", *assumed)
    result.assert_outcomes(skipped=2)
    assert [found["codes"] for found in outcomes.values()] == [["skip-disagrees"], ["attn-capability"]]
    result.stdout.fnmatch_lines(["*[[]skip-disagrees[]] require_torch_gpu skips; have a host that meets it*"])


def test_a_decorator_that_skips_what_was_promised_is_a_failure(
    pytester: pytest.Pytester, library: None, run: Run
) -> None:
    """Only where it skips for nothing else as well."""
    pytester.makepyfile(
        test_suite="""
        import unittest
        from transformers import testing_utils as hf

        hf.torch_device = "cpu"   # the broken probe

        @hf.require_torch_gpu
        def test_probe(): pass

        @hf.require_torch_gpu
        class TestClass(unittest.TestCase):
            def test_in_class(self): pass

        @unittest.skip("flaky, see #1")
        @hf.require_torch_gpu
        def test_flaky_besides(): pass

        @hf.require_peft
        @hf.require_torch_gpu
        def test_peft_besides(): pass

        @hf.require_torch_gpu
        @hf.require_torch_xpu
        def test_other_hardware_besides(): pass

        @hf.require_peft
        def test_peft(): pass

        hf.torch_device = "cuda"

        @hf.require_torch_large_accelerator(memory=200)
        def test_too_large(): pass

        @hf.require_torch_gpu
        def test_ran(): pass
        """
    )
    for adopted in (TRANSFORMERS, ()):  # by their traces, and by their words alone
        for more in ((), ("-n", "2")):
            promises = ("--cuda-require", "devices>=2", "--cuda-simulate", "h100:2")
            _, outcomes = run(*adopted, *promises, *more)
            failed = {nodeid.rpartition("::")[2] for nodeid, found in outcomes.items() if found["outcome"] == "failed"}
            outermost = set() if adopted else {"test_other_hardware_besides"}  # of the others nothing is known
            assert failed == {"test_probe", "test_in_class"} | outermost
    _, outcomes = run(*TRANSFORMERS, "--cuda-require", "bf16", "--cuda-simulate", "h100:2")
    assert sum(found["outcome"] == "failed" for found in outcomes.values()) == 2  # bf16 takes a device


def test_a_decorator_that_has_no_effect_is_named(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """M2 and M3: above `parameterized.expand` it is lost, and one that gives back no test leaves none."""
    pytester.makepyfile(
        test_suite="""
        import unittest
        from parameterized import parameterized
        from transformers import testing_utils as hf

        class Case(unittest.TestCase):
            @hf.require_torch_gpu
            @parameterized.expand([("a",)])
            def test_above(self, name): pass

            @hf.require_tensorboard
            def test_never_called(self): raise AssertionError("ran")
        """
    )
    result, _ = run(*TRANSFORMERS, "--cuda-simulate", "t4")
    result.stdout.fnmatch_lines(
        [
            "*[[]adopt-lost[]] *test_suite.py:*: require_torch_gpu was applied to None: put it below *",
            "*[[]adopt-lost[]] *test_suite.py:*: require_tensorboard returned * in place of Case.test_never_called*",
        ]
    )


def test_without_adoption_nothing_is_wrapped(pytester: pytest.Pytester, library: None, run: Run) -> None:
    pytester.makepyfile(
        test_suite="""
        from transformers import testing_utils as hf

        @hf.require_torch_gpu
        def test_gpu():
            assert not hasattr(hf.require_torch_gpu, "__cudaenv__")
        """
    )
    result, outcomes = run("--cuda-simulate", "t4")
    result.assert_outcomes(passed=1)
    assert [found["ran_on"] for found in outcomes.values()] == [None]


def test_a_library_that_is_imported_already_is_wrapped(pytester: pytest.Pytester, library: None, run: Run) -> None:
    pytester.makepyfile(early_plugin="from transformers import testing_utils")
    pytester.makepyfile(
        test_suite="""
        from transformers.testing_utils import require_torch_multi_gpu

        @require_torch_multi_gpu
        def test_two(): pass
        """
    )
    _, outcomes = run("-p", "early_plugin", *TRANSFORMERS, "--cuda-simulate", "t4")
    assert [found["codes"] for found in outcomes.values()] == [["cuda-devices"]]


def test_without_device_processes_a_grant_is_no_promise(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """All devices stay visible there, so a decorator that skips for too many keeps doing so."""
    pytester.makepyfile(
        test_suite="""
        from transformers import testing_utils as hf

        @hf.require_torch_non_multi_gpu
        def test_one(): pass
        """
    )
    _, outcomes = run(*TRANSFORMERS, "--cuda-simulate", "h100:2", "--cuda-isolation", "off")
    assert [found["codes"] for found in outcomes.values()] == [["cuda-too-many"]]


def test_adopted_needs_are_declared_needs(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """`-m cuda`, `--cuda-unmet` and `--collect-only` know them."""
    pytester.makepyfile(
        test_suite="""
        from transformers import testing_utils as hf

        @hf.require_torch_gpu
        def test_one(): pass

        @hf.require_torch_multi_gpu
        def test_two(): pass

        def test_none(): pass
        """
    )
    adopted = (*TRANSFORMERS, "--cuda-simulate", "t4")
    run(*adopted, "-m", "cuda")[0].assert_outcomes(passed=1, skipped=1, deselected=1)
    run(*adopted, "-m", "multi_gpu")[0].assert_outcomes(skipped=1, deselected=2)
    run(*adopted, "--cuda-unmet", "fail")[0].assert_outcomes(passed=2, errors=1)
    run(*adopted, "--cuda-unmet", "deselect")[0].assert_outcomes(passed=2, deselected=1)
    result, _ = run(*adopted, "--collect-only")
    result.stdout.fnmatch_lines(["would run: 1 on Tesla T4", "*[[]cuda-devices[]] needs 2 CUDA devices; have 1"])


def test_markers_of_the_project(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeini(
        """
        [pytest]
        markers =
            gpu_4: ours
            distributed: ours
        cuda_adopt_markers =
            gpu_4 = requires_cuda(devices=4)
            distributed(num_gpus=n) = requires_cuda(devices=n)
        """
    )
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name == "test_marked_late":
                    item.add_marker("gpu_4")
        """
    )
    pytester.makepyfile(
        test_suite="""
        import pytest

        @pytest.mark.gpu_4
        def test_four(): pass

        @pytest.mark.distributed(num_gpus=2)
        def test_two(): pass

        @pytest.mark.distributed(num_gpus="two")
        def test_wrong(): pass

        def test_marked_late(): pass
        """
    )
    result, outcomes = run("--cuda-simulate", "h100:2", "--continue-on-collection-errors")
    result.stdout.fnmatch_lines(["*test_wrong: distributed(num_gpus='two') by cuda_adopt_markers *"])
    pytester.path.joinpath("test_suite.py").write_text(
        pytester.path.joinpath("test_suite.py").read_text().replace('"two"', "1")
    )
    _, outcomes = run("--cuda-simulate", "h100:2")
    assert {nodeid.rpartition("::")[2]: (found["outcome"], found["codes"]) for nodeid, found in outcomes.items()} == {
        "test_four": ("skipped", ["cuda-devices"]),
        "test_two": ("passed", []),
        "test_wrong": ("passed", []),
        "test_marked_late": ("skipped", ["cuda-devices"]),
    }


@pytest.mark.parametrize(
    ("ini", "why"),
    [
        ("cuda_adopt = transformer", "--cuda-adopt: 'transformer' (ini cuda_adopt): choose from transformers, accel*"),
        ("cuda_adopt_markers = gpu_4", "cuda_adopt_markers: 'gpu_4': no equals sign *"),
    ],
)
def test_what_was_written_wrong(pytester: pytest.Pytester, ini: str, why: str) -> None:
    pytester.makeini(f"[pytest]\n{ini}")
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{why}"])


def test_conditions_and_mistakes(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """M3: what was meant to skip and does not, and what hides a defect behind a skip."""
    pytester.makepyfile(
        test_suite="""
        import unittest
        import pytest
        import torch.cuda

        @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
        def test_two(): pass

        def test_returns_early():
            unittest.skip("no flash attention here")
            return

        def test_swallows():
            try:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            except Exception as error:
                pytest.skip(str(error))
        """
    )
    result, outcomes = run("--cuda-adopt", "skipif", "--cuda-simulate", "h100:2")
    assert outcomes["test_suite.py::test_two"]["ran_on"] == "NVIDIA H100 80GB HBM3"
    result.stdout.fnmatch_lines(
        [
            "*[[]adopt-skip[]] *test_suite.py:9: unittest.skip(…) as a statement skips nothing",
            "*[[]adopt-skip[]] *test_suite.py:15: except Exception: any defect becomes a skip",
        ],
    )


def test_a_module_that_skips_itself_is_told_of(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_suite="import pytest\npytest.importorskip('package_of_nobody')\ndef test(): pass")
    for workers in ((), ("-n", "1")):
        result, _ = run("--cuda-adopt", "skipif", *workers)
        result.stdout.fnmatch_lines(["     1 [[]package-missing[]] needs package_of_nobody; have none"])


def test_the_suites_own_reasons_are_folded(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        test_suite="""
        import pytest

        @pytest.mark.parametrize("n", range(30))
        def test_many(n):
            if n >= 0:
                pytest.skip(f"see {n}")
        """
    )
    result, _ = run("--cuda-adopt", "skipif")
    text = result.stdout.str()
    assert text.count("[skip-unknown]") == 10
    assert "for 20 more reasons that are the suite's own" in text


def test_in_a_worker_and_its_device_process(pytester: pytest.Pytester, library: None, run: Run) -> None:
    pytester.makepyfile(
        test_suite="""
        from transformers import testing_utils as hf

        @hf.require_torch_gpu
        def test_one(): pass

        @hf.require_torch_multi_gpu
        def test_two(): pass
        """
    )
    _, outcomes = run(*TRANSFORMERS, "--cuda-simulate", "t4", "-n", "1")
    assert outcomes["test_suite.py::test_one"]["ran_on"] == "Tesla T4"
    assert outcomes["test_suite.py::test_two"]["codes"] == ["cuda-devices"]


def test_what_runs_nowhere_is_named(pytester: pytest.Pytester, run: Run) -> None:
    """M1 and M2: a class that every host skips, an empty list of parameters, memory that ran out as a skip."""
    pytester.makepyfile(
        test_suite="""
        import unittest
        import pytest

        @unittest.skip("until the new kernels are there")
        class Everything(unittest.TestCase):
            def test_one(self): pass
            def test_two(self): pass

        @pytest.mark.parametrize("backend", [])
        def test_backends(backend): pass

        def test_reference():
            try:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            except RuntimeError as error:
                if "out of memory" in str(error):
                    pytest.skip(str(error))
                raise
        """
    )
    result, outcomes = run("--cuda-adopt", "skipif", "--cuda-simulate", "h100")
    assert {nodeid.partition("::")[2]: found["codes"] for nodeid, found in outcomes.items()} == {
        "Everything::test_one": ["skip-always"],
        "Everything::test_two": ["skip-always"],
        "test_backends[NOTSET]": ["skip-no-parameters"],
        "test_reference": ["skip-memory"],
    }
    result.stdout.fnmatch_lines(["     2 [[]skip-always[]] needs the suite to stop skipping it; have *"])


def test_a_ledger_alone_has_every_skip_told(pytester: pytest.Pytester, library: None, run: Run) -> None:
    """The first step of adoption: nothing is wrapped, no test gets a device, and the reasons are there."""
    pytester.makepyfile(
        test_suite="""
        import pytest
        import torch.cuda
        from transformers import testing_utils as hf

        @hf.require_torch_multi_gpu
        def test_decorated(): pass

        @pytest.mark.skipif(torch.cuda.device_count() < 4, reason="not here")
        def test_condition(): pass

        def test_words():
            if torch:
                pytest.skip("needs H100")

        @hf.require_torch_gpu
        def test_passes(): pass
        """
    )
    _, outcomes = run("--cuda-ledger", "ledger.json", "--cuda-simulate", "t4")
    assert {nodeid.rpartition("::")[2]: found["codes"] for nodeid, found in outcomes.items()} == {
        "test_decorated": ["cuda-devices"],
        "test_condition": ["cuda-devices"],
        "test_words": ["cuda-capability"],
        "test_passes": [],
    }
    assert not any(found["ran_on"] for found in outcomes.values())
    lines = [json.loads(line) for line in pytester.path.joinpath("ledger.json").read_text().splitlines()]
    told = {line["id"].rpartition("::")[2]: line for line in lines if line["kind"] == "test"}
    assert [reason["code"] for reason in told["test_words"]["reasons"]] == ["cuda-capability"]
    assert told["test_words"]["skip"] == "needs H100"
