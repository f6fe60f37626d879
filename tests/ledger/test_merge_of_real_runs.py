"""From a suite's own run to the verdict on it: what the writer leaves, the reader reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_cudaenv import cli

SUITE = """
import pytest
from pytest_cudaenv import attn_backends, dtypes, requires_cuda

def test_plain(): pass

@requires_cuda(devices=2)
def test_two(cuda_devices): pass

@attn_backends("sdpa")
@dtypes("bfloat16")
def test_cell(attn_backend, dtype): pass

@pytest.mark.skip("later")
def test_skip(): pass

@pytest.mark.parametrize("x", ["</script>", "a::b"])
def test_p(x): assert x != "a::b"
"""


def test_a_run_on_the_cpu_and_one_that_is_simulated(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytester.makepyfile(test_it=SUITE)
    monkeypatch.setenv("FABRICATED", "cpu")
    run("--cuda-ledger", "ledgers/cpu.json")
    monkeypatch.delenv("FABRICATED")
    run("--cuda-simulate", "h100:2", "--cuda-ledger", "ledgers/simulated.json", "-k", "plain")
    capsys.readouterr()

    assert cli.main(["merge", "ledgers", "--json", "merged.json"]) == 2
    out, err = capsys.readouterr()
    assert "simulated.json: is of a simulated host (h100:2)" in err
    assert out.startswith(
        "RED: 1 failed somewhere, 2 never ran anywhere, 1 ran on the CPU only (6 tests, 4 ran; 1 run of 1 runner)"
    )
    assert "[cuda-none] needs 2 CUDA devices; have none" in out
    assert "[skip-always] needs the suite to stop skipping it" in out
    assert "on CPU: AssertionError" in out
    assert cli.main(["merge", "merged.json", "--expect", "cpu"]) == 1
    assert capsys.readouterr().out == out
