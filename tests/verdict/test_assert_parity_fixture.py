"""The fixture in real runs: it knows the test's cell, and what it found reaches the ledger."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

SUITE = """
    import gc, weakref
    import pytest, torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from pytest_cudaenv import attn_backends, dtypes

    SIZES = dict(hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4)
    CONFIG = LlamaConfig(vocab_size=99, **SIZES)
    KEPT = []

    @attn_backends("eager", "sdpa")
    @dtypes("bfloat16")
    def test_cells(cell, assert_parity):
        model = cell.build(LlamaForCausalLM, CONFIG)
        found = assert_parity(model, torch.arange(12).reshape(2, 6))
        assert found.kind == ("reference" if cell.attn_backend == "eager" else "candidate")

    @attn_backends("sdpa")
    @dtypes("bfloat16")
    def test_wrong_dtype(cell, assert_parity):
        model = cell.build(LlamaForCausalLM, CONFIG, dtype=torch.float32)
        assert_parity(model, torch.arange(12).reshape(2, 6))

    def softmax(x):
        return torch.softmax(x, -1)

    def test_without_a_cell(assert_parity):
        assert_parity(softmax, torch.rand(3, 4), reference=lambda x: x.exp() / x.exp().sum(-1, True))
        KEPT.append(weakref.ref(assert_parity))

    def test_references_are_freed():
        gc.collect()
        assert KEPT[0]() is None or not KEPT[0]()._references

    def test_the_worst_is_recorded(assert_parity):
        x = torch.rand(3, 4)
        assert_parity(softmax, x, reference=lambda x: x.exp() / x.exp().sum(-1, True))
        with pytest.raises(AssertionError):
            assert_parity(lambda x: softmax(x) * 1.5, x, reference=softmax)

    @dtypes("float16")
    def test_a_dtype_is_half_a_cell(dtype, assert_parity):
        assert_parity(torch.nn.Linear(4, 4), torch.rand(2, 4), reference=lambda x: x)
"""


def test_cells_verdicts_and_the_ledger(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    arguments = ("-rf", "-p", "no:randomly", "--cuda-visible", "-1", "--cuda-ledger", "ledger.json")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*[[]parity-dtype[]] the cell is bfloat16, * is float32*",
            "*[[]parity-dtype[]] the cell is float16, weight is float32*",
        ]
    )
    tests = [json.loads(line) for line in (pytester.path / "ledger.json").read_text().splitlines()]
    found = {test["id"].partition("::")[2]: test.get("parity") for test in tests if test["kind"] == "test"}
    assert found["test_cells[eager-bf16]"]["kind"] == "reference"
    assert 0 < found["test_cells[sdpa-bf16]"]["ratio"] <= 1
    assert {"ratio", "error", "reference_error", "floor", "worst", "checked"} <= found["test_cells[sdpa-bf16]"].keys()
    assert found["test_wrong_dtype[sdpa-bf16]"] is None
    assert found["test_references_are_freed"] is None
    assert found["test_without_a_cell"]["comparisons"] == 1
    assert found["test_the_worst_is_recorded"]["ratio"] > 1
    assert found["test_the_worst_is_recorded"]["checked"] == 24
