"""Every test of a cell is witnessed without asking: lies are findings, honest cells are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# pytester forgets modules that only an inner run imported: these stay one and the same.
import torch
from transformers import CLIPVisionConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pytest_cudaenv.runner
import pytest_cudaenv.verdict.cell_witness
import pytest_cudaenv.verdict.witness
from pytest_cudaenv.verdict.attention_taps import Taps
from tests.inner_runs import forget_outer_run
from tests.verdict import tiny_models

HEAD = """
    import pytest, torch
    from pytest_cudaenv import attn_backends, attn_sdpa_kernel, dtypes
    from tests.verdict import tiny_models as tiny
    from transformers import LlamaConfig, LlamaForCausalLM
    CONFIG = LlamaConfig(**tiny.TEXT)
"""


@pytest.fixture(autouse=True)
def _inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_outer_run(monkeypatch)
    # Compiled code does not say what it calls; what an outer test has compiled is no part of these.
    monkeypatch.setattr("pytest_cudaenv.verdict.witness.compiled_frames", lambda: 0)


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it="\n".join([HEAD, body]))
    return pytester.runpytest_inprocess("--cuda-strict", "--cuda-isolation=off", "--cuda-ledger=it.json", *options)


def witnessed(pytester: pytest.Pytester) -> dict[str, Any]:
    """What the ledger tells of each test."""
    lines = [json.loads(line) for line in (Path(pytester.path) / "it.json").read_text().splitlines()]
    return {line["id"].partition("::")[2]: line.get("witness") for line in lines if "id" in line}


HONEST = {
    "built by the cell": "cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)",
    "with an eager reference": """
        cell.build(LlamaForCausalLM, CONFIG, attn_backend="eager", dtype=torch.float64)(tiny.IDS)
        cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)
    """,
    "backward": "cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS, labels=tiny.IDS).loss.backward()",
    "generated": "cell.build(LlamaForCausalLM, CONFIG).generate(tiny.IDS, max_new_tokens=2)",
    "by hand": "tiny.mistral(cell.attn_backend)(tiny.IDS)",
    "set later": """
        model = tiny.llama("eager")
        model(tiny.IDS)
        model.set_attn_implementation(cell.attn_backend)
        model(tiny.IDS)
    """,
    "vision": "tiny.run(tiny.clip(cell.attn_backend))",
    "parts on other backends": """
        model = tiny.clip({"text_config": cell.attn_backend, "vision_config": "eager"})
        tiny.run(model)
    """,
}


def test_honest_cells_pass(pytester: pytest.Pytester) -> None:
    bodies = [
        f"@attn_backends('eager', 'sdpa')\n    @dtypes('fp32')\n    def test_{place}(cell):\n        "
        + "\n        ".join(line.strip() for line in body.strip().splitlines())
        for place, body in enumerate(HONEST.values())
    ]
    result = run(pytester, "\n    ".join(["", *bodies]))
    result.assert_outcomes(passed=2 * len(HONEST))
    told = witnessed(pytester)
    assert told["test_0[sdpa-fp32]"] == {"backends": {"sdpa": 2}}
    assert told["test_1[sdpa-fp32]"] == {"backends": {"eager": 2, "sdpa": 2}}


class Part(torch.nn.Module):
    """A part of a model with a config of its own class, and no model of its own around it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.config = CLIPVisionConfig()
        self.config._attn_implementation = backend

    def forward(self, q: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, lambda _, q, *__: (q, None))
        return attend(self, q, q, q, None)[0]


def test_a_part_with_a_config_of_its_own_speaks_for_itself() -> None:
    """Around it is a model of another config, which asks for another backend: both run what they ask for."""
    model = torch.nn.Sequential(Part("eager"))
    model.config, model.base_model_prefix = tiny_models.llama("sdpa").config, "model"
    recorder = pytest_cudaenv.verdict.cell_witness.CellRecorder()
    recorder.start(["sdpa"])
    taps = Taps(recorder)
    taps.install()
    try:
        model(torch.rand(1, 2, 4, 8))
    finally:
        taps.remove()
    assert recorder.counts == {"eager": 1}
    assert recorder.others == {}


LIES = {
    "another backend": (
        'tiny.llama("eager")(tiny.IDS)',
        "*witness-unseen*needs sdpa, which the cell names; have eager 2x*",
    ),
    "nothing": ("assert True", "*witness-unseen*needs sdpa, which the cell names; have no call of attention*"),
    "one of the layers": (
        """
        model = cell.build(LlamaForCausalLM, CONFIG)
        tiny.set_backend(model.model.layers[1].self_attn, "eager")
        model(tiny.IDS)
        """,
        "*witness-other*have LlamaAttention 1: sdpa was asked for, eager ran*",
    ),
    "another function under the name": (
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import eager_attention_forward
        ALL_ATTENTION_FUNCTIONS["sdpa"] = eager_attention_forward
        try:
            cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
        """,
        "*witness-other*LlamaAttention 0: sdpa was asked for, unknown ran*",
    ),
}


@pytest.mark.parametrize(("body", "line"), LIES.values(), ids=LIES)
def test_lies_are_findings(pytester: pytest.Pytester, body: str, line: str) -> None:
    text = "\n        ".join(line.removeprefix("        ") for line in body.strip().splitlines())
    body = f"\n    @attn_backends('sdpa')\n    @dtypes('fp32')\n    def test_it(cell):\n        {text}\n"
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([line])
    result = pytester.runpytest_inprocess("--cuda-isolation=off")
    result.assert_outcomes(passed=1)


def test_a_failed_or_skipped_test_gets_none(pytester: pytest.Pytester) -> None:
    body = """
    @attn_backends("sdpa")
    @dtypes("fp32")
    @pytest.mark.parametrize("how", [pytest.fail, pytest.skip, pytest.xfail])
    def test_it(cell, how):
        how("said so")

    @dtypes("fp32")
    def test_without_a_backend(dtype): ...
    """
    result = run(pytester, body)
    result.assert_outcomes(failed=1, skipped=1, xfailed=1, passed=1)
    assert "witness-" not in result.stdout.str()


def test_a_model_that_a_fixture_runs_is_seen_by_each_test_of_the_module(pytester: pytest.Pytester) -> None:
    body = """
    @pytest.fixture(scope="module")
    def logits(cell):
        return cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS).logits

    @attn_backends("eager", "sdpa")
    @dtypes("fp32")
    @pytest.mark.parametrize("row", [0, 1])
    def test_it(cell, logits, row):
        assert logits[row].isfinite().all()
    """
    run(pytester, body).assert_outcomes(passed=4)


def test_transformers_may_be_imported_by_the_body(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        from pytest_cudaenv import attn_backends, dtypes

        @attn_backends("eager", "sdpa")
        @dtypes("fp32")
        def test_it(cell):
            from transformers import LlamaConfig, LlamaForCausalLM
            small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
            import torch
            cell.build(LlamaForCausalLM, LlamaConfig(**small))(torch.ones(1, 4, dtype=torch.long))
        """
    )
    result = pytester.runpytest_subprocess("--cuda-strict", "--cuda-ledger=it.json")
    result.assert_outcomes(passed=2)
    assert witnessed(pytester)["test_it[eager-fp32]"]["backends"] == {"eager": 1}


def test_flash_attention_cells(pytester: pytest.Pytester) -> None:
    """On a simulated host, with packages made for the test: the honest cell passes, FA2 under FA3's name does not."""
    body = """
    @attn_backends("flash_attention_2", "flash_attention_3")
    @dtypes("bf16")
    @pytest.mark.parametrize("is_honest", [True, False])
    def test_it(attn_backend, dtype, is_honest, monkeypatch):
        fa2, fa3 = tiny.flash_package("flash_attn"), tiny.flash_package("flash_attn_interface")
        packages = {"flash_attention_2": fa2, "flash_attention_3": fa3 if is_honest else fa2}
        tiny.install_flash(monkeypatch, packages)
        tiny.flash_llama(attn_backend)(tiny.IDS)
    """
    assumed = ("--cuda-assume=flash-attn==2.8.0", "--cuda-assume=flash-attn-3==3.0.0")
    result = run(pytester, body, "--cuda-simulate=h100", *assumed)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*witness-other*LlamaAttention 0: flash_attention_3 was asked for, flash_attention_2 ran*",
            "*witness-unseen*needs flash_attention_3, which the cell names; have flash_attention_2 2x*",
        ]
    )


def test_a_forced_kernel_is_proven(pytester: pytest.Pytester) -> None:
    body = """
    def attend():
        q = torch.rand(1, 2, 8, 8)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    @pytest.mark.parametrize("kernel", [
        pytest.param("flash", marks=attn_sdpa_kernel("flash")),
        pytest.param("math", marks=attn_sdpa_kernel("math")),
        pytest.param("flash", marks=attn_sdpa_kernel("flash", "math")),
    ])
    def test_forced(kernel, attn_witness):
        attend()
        attn_witness.assert_ran("sdpa", kernel=kernel)

    @attn_sdpa_kernel("flash")
    def test_undone_by_the_body():
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            attend()

    @attn_sdpa_kernel("math")
    def test_without_sdpa(): ...

    def test_the_next_one_chooses_freely():
        assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    """
    pytester.makepyfile(test_it="\n".join([HEAD, body]))
    result = pytester.runpytest_inprocess()  # a failure without --cuda-strict as well
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*[[]witness-kernel] needs sdpa to run flash; have math in *",
            "*[[]witness-kernel] needs sdpa to run math; have no call of sdpa*",
        ]
    )


def test_a_wrong_kernel_is_a_collection_error(pytester: pytest.Pytester) -> None:
    result = run(pytester, "\n    @attn_sdpa_kernel('fast')\n    def test_it(): ...\n")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*unknown sdpa kernel 'fast'; did you mean 'flash'? choose from flash, efficient, cudnn, math*"]
    )


def test_the_fixture_sees_the_whole_test_and_single_models(pytester: pytest.Pytester) -> None:
    body = """
    @attn_backends("sdpa")
    @dtypes("fp32")
    def test_it(cell, attn_witness):
        reference = cell.build(LlamaForCausalLM, CONFIG, attn_backend="eager")
        model = cell.build(LlamaForCausalLM, CONFIG)
        with attn_witness(model) as seen:
            model(tiny.IDS)
            reference(tiny.IDS)
        seen.assert_ran("sdpa", kernel="flash", causal=True)
        assert attn_witness.backends == {"eager", "sdpa"}
        attn_witness.assert_never("math")
        with pytest.raises(AssertionError, match="witness-other"):
            attn_witness.assert_ran("sdpa")
    """
    run(pytester, body).assert_outcomes(passed=1)


def test_a_projects_own_backend_is_known_by_its_functions(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from pytest_cudaenv import AttnBackend

        def pytest_cudaenv_attn_backends():
            return [AttnBackend("ring", entry_points=("rings:attend",)), AttnBackend("other")]
        """
    )
    pytester.makepyfile(rings="def attend(q, k, v): return q")
    body = """
    import rings

    @attn_backends("ring", "other")
    @dtypes("fp32")
    @pytest.mark.parametrize("calls", [True, False])
    def test_it(cell, calls):
        if calls:
            rings.attend(1, 2, 3)
    """
    result = run(pytester, body)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*witness-unseen*needs ring, which the cell names; have no call of attention*"])
    assert witnessed(pytester)["test_it[ring-fp32-True]"] == {"backends": {"ring": 1}}


def test_nothing_is_left_behind(pytester: pytest.Pytester) -> None:
    import sys

    from transformers.modeling_utils import AttentionInterface

    before = (torch.nn.functional.scaled_dot_product_attention, AttentionInterface.get_interface, list(sys.meta_path))
    body = """
    @attn_backends("sdpa")
    @dtypes("fp32")
    def test_it(cell):
        cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)
    """
    run(pytester, body).assert_outcomes(passed=1)
    after = (torch.nn.functional.scaled_dot_product_attention, AttentionInterface.get_interface, list(sys.meta_path))
    assert after == before


def test_a_test_may_say_that_it_runs_no_attention(pytester: pytest.Pytester) -> None:
    body = """
    from pytest_cudaenv import attn_witness

    @pytest.fixture(scope="module")
    def model(cell):
        model = cell.build(LlamaForCausalLM, CONFIG)
        model(tiny.IDS)
        return model

    @attn_backends("eager", "sdpa")
    @dtypes("fp32")
    class TestIt:
        @attn_witness(runs=False)
        def test_saving(self, cell, tmp_path):
            cell.build(LlamaForCausalLM, CONFIG).save_pretrained(tmp_path)

        @attn_witness(runs=False)
        def test_saving_what_a_fixture_ran(self, model, tmp_path):
            model.save_pretrained(tmp_path)

        @attn_witness(runs=False)
        def test_lying(self, cell):
            cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)

        @attn_witness
        def test_running(self, cell):
            cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)
    """
    result = run(pytester, body)
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.fnmatch_lines(
        ["*[[]witness-ran] needs a body without attention, as @attn_witness(runs=False) says; have sdpa 2x*"]
    )
    pytester.runpytest_inprocess("--cuda-isolation=off").assert_outcomes(passed=6, failed=2)


def test_saying_so_of_a_test_that_is_not_watched_is_refused(pytester: pytest.Pytester) -> None:
    body = "\n    from pytest_cudaenv import attn_witness\n    @attn_witness(runs=False)\n    def test_it(dtype): ...\n"
    result = run(pytester, body)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*test_it*@attn_witness has no effect here: request the fixture `cell`*"])


def test_cells_of_a_test_case_are_watched(pytester: pytest.Pytester) -> None:
    body = """
    import unittest
    import pytest_cudaenv
    from pytest_cudaenv import attn_witness

    @pytest.mark.usefixtures("device")
    class TestIt(unittest.TestCase):
        def each(self, backend=None, layer=None, run=True):
            for cell in pytest_cudaenv.current().cells("eager", "sdpa", dtypes=("float32",)):
                with self.subTest(cell=cell.id):
                    model = cell.build(LlamaForCausalLM, CONFIG, attn_backend=backend)
                    if layer:
                        tiny.set_backend(model.model.layers[1].self_attn, layer)
                    if run:
                        model(tiny.IDS)

        def test_honest(self):
            self.each()

        def test_always_eager(self):
            self.each("eager")

        def test_a_layer(self):
            self.each(layer="eager")

        def test_nothing(self):
            self.each(run=False)

        @attn_witness(runs=False)
        def test_nothing_as_it_says(self):
            self.each(run=False)

        @attn_witness(runs=False)
        def test_lying(self):
            self.each()
    """
    result = run(pytester, body)
    told = list(result.reprec.getreports("pytest_runtest_logreport"))
    whole = {r.nodeid.rpartition("::")[2]: r for r in told if r.when == "call" and not hasattr(r, "context")}
    assert {name for name, report in whole.items() if report.passed} == {"test_honest", "test_nothing_as_it_says"}
    lines = {name: report.longreprtext for name, report in whole.items() if report.failed}
    assert "needs sdpa, which the cell names; have eager 2x (sdpa-fp32)" in lines["test_always_eager"]
    assert "LlamaAttention 1: sdpa was asked for, eager ran (sdpa-fp32)" in lines["test_a_layer"]
    assert "needs sdpa, which the cell names; have no call of attention (sdpa-fp32)" in lines["test_nothing"]
    assert "eager-fp32" not in lines["test_nothing"]
    assert "[witness-ran]" in lines["test_lying"]
    assert witnessed(pytester)["TestIt::test_honest"] == {
        "cells": {"eager-fp32": {"eager": 2}, "sdpa-fp32": {"sdpa": 2}}
    }


def test_a_cell_that_failed_gets_no_finding(pytester: pytest.Pytester) -> None:
    if not hasattr(pytest, "Subtests"):
        pytest.skip("pytest reports subtests since 9")
    body = """
    import unittest
    import pytest_cudaenv

    @pytest.mark.usefixtures("device")
    class TestIt(unittest.TestCase):
        def test_it(self):
            for cell in pytest_cudaenv.current().cells("sdpa", "eager", dtypes=("float32",)):
                with self.subTest(cell=cell.id):
                    if cell.attn_backend == "sdpa":
                        self.fail("said so")
                    cell.build(LlamaForCausalLM, CONFIG)(tiny.IDS)
    """
    result = run(pytester, body)
    assert "said so" in result.stdout.str()
    assert "witness-" not in result.stdout.str()


def test_a_forced_kernel_outlives_subtests(pytester: pytest.Pytester) -> None:
    body = """
    import unittest

    @attn_sdpa_kernel("math")
    class TestIt(unittest.TestCase):
        def test_it(self):
            q = torch.rand(1, 2, 8, 8)
            for part in range(2):
                with self.subTest(part=part):
                    torch.nn.functional.scaled_dot_product_attention(q, q, q)
                    assert not torch.backends.cuda.flash_sdp_enabled()
    """
    result = run(pytester, body)
    assert result.ret == 0
    assert witnessed(pytester)["TestIt::test_it"] == {"kernels": {"sdpa:math": 2}}


def test_each_part_of_a_model_runs_what_the_cell_names_for_it(pytester: pytest.Pytester) -> None:
    body = """
    from transformers import CLIPModel
    CELL = {"text_config": "sdpa", "vision_config": "eager"}

    @attn_backends(CELL)
    @dtypes("fp32")
    class TestIt:
        def test_honest(self, cell):
            tiny.run(tiny.clip(cell.attn_backend))

        def test_with_a_reference(self, cell):
            tiny.run(tiny.clip("eager"))
            tiny.run(tiny.clip(cell.attn_backend))

        def test_text_alone(self, cell):
            tiny.clip(cell.attn_backend).get_text_features(tiny.IDS)
            tiny.clip(cell.attn_backend).get_image_features(torch.rand(1, 3, 16, 16))

        def test_exchanged(self, cell):
            tiny.run(tiny.clip({"text_config": "eager", "vision_config": "sdpa"}))
    """
    result = run(pytester, body)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*[[]witness-unseen] needs sdpa in text_config, which the cell names; have eager 2x*",
            "*[[]witness-unseen] needs eager in vision_config, which the cell names; have sdpa 2x*",
        ]
    )


def test_a_kernel_that_the_cpu_has_not_needs_a_device(pytester: pytest.Pytester) -> None:
    body = """
    @attn_sdpa_kernel("efficient")
    def test_it(): ...

    @attn_sdpa_kernel("cudnn", "efficient")
    class TestIt:
        def test_of_a_class(self): ...

        @attn_sdpa_kernel("math")
        def test_the_closest_says_it_all(self):
            q = torch.rand(1, 2, 8, 8)
            torch.nn.functional.scaled_dot_product_attention(q, q, q)

    @attn_sdpa_kernel("efficient", "math")
    def test_math_will_do():
        q = torch.rand(1, 2, 8, 8)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    """
    result = run(pytester, body, "--cuda-visible=-1", "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*[[]cuda-*needs a CUDA device; have *"])


def test_the_taps_stay_between_tests_of_cells_and_go_before_others(pytester: pytest.Pytester) -> None:
    """What a fixture of a module puts in their place is watched; a test that is not watched finds none of them."""
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.nn.functional as F
        from pytest_cudaenv import attn_backends, dtypes

        OWN = F.scaled_dot_product_attention
        SEEN = []

        def attend():
            q = torch.ones(1, 1, 2, 4)
            return F.scaled_dot_product_attention(q, q, q)

        @pytest.fixture(scope="class")
        def mine():
            with pytest.MonkeyPatch.context() as patch:
                inner = F.scaled_dot_product_attention
                def other(*args, **kwargs):
                    SEEN.append(len(args))
                    return inner(*args, **kwargs)
                patch.setattr(F, "scaled_dot_product_attention", other)
                yield

        class TestCells:
            @attn_backends("sdpa")
            @dtypes("fp32")
            @pytest.mark.parametrize("n", range(2))
            def test_first(self, cell, n): attend()

        class TestPatched:
            @attn_backends("sdpa")
            @dtypes("fp32")
            @pytest.mark.parametrize("n", range(3))
            def test_second(self, mine, cell, n):
                attend()
                assert len(SEEN) == n + 1

        class TestOther:
            @attn_backends("sdpa")
            @dtypes("fp32")
            def test_third(self, cell): attend()

        def test_plain():
            assert F.scaled_dot_product_attention is OWN
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly", "--cuda-strict")
    result.assert_outcomes(passed=7)
