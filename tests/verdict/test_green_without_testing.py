"""The five ways in which suites have gone green without testing, each planted in a small suite, and caught by name."""

from __future__ import annotations

import pytest

from pytest_cudaenv.cli import main

pytest.importorskip("torch")
pytest.importorskip("transformers")

HEAD = """
import torch
from pytest_cudaenv import attn_backends, dtypes, requires_flash_attn3
pytestmark = [attn_backends("sdpa"), dtypes("float32")]
"""

# A start with transformers takes three times as long: for those that have a model.
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
IDS = torch.arange(24).view(2, 12)
"""


def run(pytester: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body)
    # Not in this process: torch cannot be imported twice, and parts of it come with the first model that runs.
    return pytester.runpytest_subprocess("--cuda-isolation", "off", *arguments)


def test_skipped_on_every_runner(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run is green; who merges them sees what none of them ran."""
    body = "@requires_flash_attn3\ndef test_fa3(cuda_device): ...\ndef test_other(cell): ..."
    ledgers = []
    for runner in ("one", "other"):
        ledgers.append(str(pytester.path / f"{runner}.json"))
        result = run(pytester, body, "--cuda-ledger", ledgers[-1], "-k", "fa3")
        assert result.ret == 0
        result.assert_outcomes(skipped=1, deselected=1)
    assert main(["merge", *ledgers]) != 0
    out = capsys.readouterr().out
    assert "never ran anywhere" in out
    assert "test_fa3" in out


def test_not_collected_and_the_exit_status_masked(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_sessionfinish(session): session.exitstatus = 0")
    body = "class Tests:\n    def __init__(self): ...\n    def test_one(self, cell): ..."
    assert run(pytester, body).ret == 0
    result = run(pytester, body, "--cuda-min-ran", "1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*[[]contract[]] needs 1 tests that ran on a CUDA device*"])


def test_a_body_that_returns_early(pytester: pytest.Pytester) -> None:
    body = "def test_one(cell):\n    if not torch.cuda.is_available() or True: return\n    assert 0"
    run(pytester, body).assert_outcomes(passed=1)
    result = run(pytester, body, "--cuda-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]witness-unseen[]] needs sdpa, which the cell names; have no call of attention*"])


def test_a_backend_compared_with_itself(pytester: pytest.Pytester) -> None:
    body = (
        MODEL
        + """
def test_one(cell, assert_parity):
    model, reference = (cell.build(LlamaForCausalLM, CONFIG) for _ in range(2))
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits)
    assert_parity(model, IDS, reference=reference)
"""
    )
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]parity-same-backend[]] candidate and reference both use sdpa*"])


def test_nothing_compared(pytester: pytest.Pytester) -> None:
    body = (
        MODEL
        + """
def test_one(cell, assert_parity):
    model = cell.build(LlamaForCausalLM, CONFIG)
    torch.testing.assert_close(model(IDS[:1]).logits[1:], torch.ones(0, 12, 64))
    assert_parity(model, IDS[:1], compare=lambda output: output.logits[1:])
"""
    )
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]parity-empty[]] *"])
