"""What `current()` gives to `unittest.TestCase`: cells as subtests, expectations, the right device."""

from __future__ import annotations

import json

import pytest
import torch  # noqa: F401  # inner runs of this process share it: it cannot be imported a second time

SUITE = """
    import unittest
    import pytest
    import torch
    import pytest_cudaenv

    @pytest.mark.usefixtures("device")
    class OldTest(unittest.TestCase):
        def test_cells(self):
            seen, drawn = [], []
            for cell in pytest_cudaenv.current().cells(
                "eager", "sdpa", "flash_attention_2", dtypes=("float32", "bfloat16")
            ):
                with self.subTest(cell=cell.id):
                    seen.append((cell.id, cell.attn_backend, cell.dtype, cell.device))
                    drawn.append(torch.rand(3).tolist())
                    pytest_cudaenv.current().expectations.check(
                        [cell.attn_backend], {(None, "eager"): ["eager"], (None, "sdpa"): ["sdpa"]}
                    )
            device = pytest_cudaenv.current().device
            self.assertEqual(seen, [
                ("eager-fp32", "eager", torch.float32, device), ("eager-bf16", "eager", torch.bfloat16, device),
                ("sdpa-fp32", "sdpa", torch.float32, device), ("sdpa-bf16", "sdpa", torch.bfloat16, device),
            ])
            self.assertEqual(drawn, drawn[:1] * 4)
            with self.assertRaisesRegex(AssertionError, "expectation-missing"):  # no cell any more
                pytest_cudaenv.current().expectations.pick({(None, "sdpa"): 1})

        def test_failing_cell(self):
            for cell in pytest_cudaenv.current().cells("eager", "sdpa", dtypes=["bf16"]):
                with self.subTest(cell=cell.id):
                    pytest_cudaenv.current().expectations.check(cell.attn_backend, {None: "eager"})

        def test_no_cell(self):
            for cell in pytest_cudaenv.current().cells("flash_attention_2", "flash_attention_4"):
                raise AssertionError("nothing runs it here")
"""

PLACES = [
    pytest.param(("--cuda-simulate", "h100:2"), '(9, 0, "sdpa-bf16")', id="session"),
    pytest.param(("--cuda-simulate", "h100:2", "--cuda-isolation", "off"), '(9, 0, "sdpa-bf16")', id="off"),
    pytest.param(("--cuda-simulate", "h100:2", "-n", "2"), '(9, 0, "sdpa-bf16")', id="xdist"),
    pytest.param(
        ("--cuda-simulate", "h100:2", "-n", "2", "--cuda-isolation", "off"), '(9, 0, "sdpa-bf16")', id="off-xdist"
    ),
    pytest.param(("--cuda-visible", "-1"), '("cpu", "sdpa-bf16")', id="cpu"),
]


@pytest.mark.parametrize(("arguments", "key"), PLACES)
def test_cells_are_subtests(pytester: pytest.Pytester, arguments: tuple[str, ...], key: str) -> None:
    pytester.makepyfile(test_old=SUITE)
    result = pytester.runpytest_subprocess(*arguments, "-rsf", "--cuda-ledger", "ledger.json")
    result.stdout.fnmatch_lines_random(
        [
            "E*If it is right, add:",
            f'E*    {key}: "sdpa",',
            "SUBFAILED(cell=*sdpa-bf16*) test_old.py::OldTest::test_failing_cell*",
            "SKIPPED * [[]attn-missing[]] FA2 needs flash-attn; have none*",
        ]
    )
    result.stdout.fnmatch_lines(["*not run: 4"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [json.loads(line) for line in (pytester.path / "ledger.json").read_text().splitlines()]
    tests = {line["id"].rpartition("::")[2]: line for line in lines if line["kind"] == "test"}
    assert {name: line["outcome"] for name, line in tests.items()} == {
        "test_cells": "passed",
        "test_failing_cell": "failed",
        "test_no_cell": "skipped",
    }
    cells = tests["test_cells"]["cells"]
    assert {cell for cell, told in cells.items() if told == "ran"} == {
        "eager-fp32", "eager-bf16", "sdpa-fp32", "sdpa-bf16"
    }  # fmt: skip
    assert cells["flash_attention_2-bf16"].startswith("[attn-missing] FA2 needs flash-attn; have none")
    assert "reasons" not in tests["test_cells"]
    assert {reason["code"] for reason in tests["test_no_cell"]["reasons"]} >= {"attn-missing"}
    assert tests["test_failing_cell"]["cells"] == {"eager-bf16": "ran", "sdpa-bf16": "ran"}


CELLS = """
    import unittest
    import pytest
    from pytest_cudaenv import current

    @pytest.mark.usefixtures("device")
    class OldTest(unittest.TestCase):
        def test_it(self):
            ran = []
            for cell in current().cells({arguments}):
                with self.subTest(cell=cell.id):
                    ran.append(cell.id)
            print("RAN", *ran)
"""


def in_process(pytester: pytest.Pytester, arguments: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(CELLS.format(arguments=arguments))
    return pytester.runpytest_inprocess("-s", "-v", "--cuda-simulate", "h100", "--cuda-isolation", "off", *options)


def test_without_names_they_are_the_projects_own(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda_attn_backends = sdpa eager\ncuda_dtypes = float16")
    result = in_process(pytester, "")
    result.stdout.fnmatch_lines(["*RAN sdpa-fp16 eager-fp16*"])


def test_names_are_what_markers_take(pytester: pytest.Pytester) -> None:
    result = in_process(pytester, "'sdpa', {'text_config': 'eager', 'vision_config': 'sdpa'}, dtypes=['bf16']")
    result.stdout.fnmatch_lines(["*RAN sdpa-bf16 text=eager+vision=sdpa-bf16*"])


def test_cells_that_options_leave_out_are_told(pytester: pytest.Pytester) -> None:
    result = in_process(pytester, "'eager', 'sdpa', dtypes=['float32']", "--cuda-attn-backends", "sdpa", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*RAN sdpa-fp32*", "*[[]cell-deselected[]] needs eager-fp32 to be selected; have only*"]
    )


def test_what_a_model_does_not_support_is_told(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("class Model: _supports_sdpa = False\nimport builtins; builtins.Model = Model")
    result = in_process(pytester, "'eager', 'sdpa', dtypes=['float32'], model=Model", "-rs")
    result.stdout.fnmatch_lines(["*RAN eager-fp32*", "*[[]model-attn[]]*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("'spda'", "*Unknown*Error: *spda*Usage: attn_backends(*"),
        ("dtypes=['float31']", "*Unknown*Error: *float31*Usage: dtypes(*"),
        ("'flash_attention_2', dtypes=['float32']", "*ValueError: cells(): no cell is left that any device could run"),
    ],
)
def test_wrong_names_are_an_error_of_the_test(pytester: pytest.Pytester, arguments: str, text: str) -> None:
    result = in_process(pytester, arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([text])


def test_a_promised_cell_may_not_be_skipped(pytester: pytest.Pytester) -> None:
    """A subtest that the runner's contract does not let skip fails its test; so does one under --cuda-unmet=fail."""
    result = in_process(pytester, "'eager', 'flash_attention_2', dtypes=['bf16']", "--cuda-unmet", "fail")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*RAN eager-bf16*", "*SUBFAILED(cell='flash_attention_2-bf16')*"])


def test_functions_take_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_cudaenv import current
        def test_it(device):
            for cell in current().cells("eager"): pass
        """
    )
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100", "--cuda-isolation", "off")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*cells() is for unittest.TestCase: a function or a plain class takes the fixture `cell`"]
    )


def test_a_model_that_rules_a_cell_out_skips_that_cell_alone(pytester: pytest.Pytester) -> None:
    """`cell.build` refuses inside of the subtest; the cells after it run, and the test has passed."""
    pytester.makepyfile(
        """
        import unittest
        import pytest
        from transformers import LlamaConfig, LlamaForCausalLM
        from pytest_cudaenv import current

        class WithoutSdpa(LlamaForCausalLM):
            _supports_sdpa = False

        @pytest.mark.usefixtures("device")
        class OldTest(unittest.TestCase):
            def test_it(self):
                config = LlamaConfig(
                    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1,
                )
                built = []
                for cell in current().cells("sdpa", "eager", dtypes=("float32",)):
                    with self.subTest(cell=cell.id):
                        cell.build(WithoutSdpa, config)
                        built.append(cell.id)
                self.assertEqual(built, ["eager-fp32"])
        """
    )
    arguments = ("--cuda-visible", "-1", "-rs", "--cuda-ledger", "ledger.json")
    result = pytester.runpytest_subprocess(*arguments)
    result.stdout.fnmatch_lines(["*[[]model-attn[]]*"])
    assert result.ret == 0
    line = next(line for line in (pytester.path / "ledger.json").read_text().splitlines() if '"kind":"test"' in line)
    assert (json.loads(line)["outcome"], json.loads(line).get("reasons")) == ("passed", None)


def test_cells_are_no_tests_to_a_contract(pytester: pytest.Pytester) -> None:
    """One test that went through two cells is one test that ran."""
    result = in_process(pytester, "'eager', 'sdpa', dtypes=['float32']", "--cuda-min-ran", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*needs 2 tests that ran on a CUDA device (--cuda-min-ran); have 1"])


def test_before_subtests_were_reported_a_cell_that_cannot_run_is_a_warning(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_cudaenv.compat.reports_subtests", lambda _: False)
    result = in_process(pytester, "'eager', 'flash_attention_2', dtypes=['bf16']")
    result.assert_outcomes(passed=1, warnings=1)
    warning = "*OldTest::test_it (flash_attention_2-bf16): [[]attn-missing[]] *"
    result.stdout.fnmatch_lines(["*RAN eager-bf16*", warning])


def test_what_needs_no_device_is_there_without_one_and_memory_skips(pytester: pytest.Pytester) -> None:
    """As the fixtures of these names: `expectations` asks for no device, `cuda_memory` cannot do without."""
    pytester.makepyfile(
        """
        import unittest
        import pytest
        from pytest_cudaenv import current, requires_package

        @requires_package("pytest")
        class OldTest(unittest.TestCase):
            def test_expectations(self):
                current().expectations.check(1, {"cpu": 1})

            def test_device(self):
                with self.assertRaisesRegex(RuntimeError, "was granted no device: put @requires_cuda"):
                    current().device

            def test_memory(self):
                current().cuda_memory.reset()

        def test_fixture(cuda_memory): ...
        """
    )
    result = pytester.runpytest_inprocess("--cuda-visible", "-1", "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["*SKIPPED*[[]cuda-none[]] needs a CUDA device; have none*"])
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100", "--cuda-isolation=off", "-k", "test_memory")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NoGrantError: this test was granted no device: put @requires_cuda on it"])
