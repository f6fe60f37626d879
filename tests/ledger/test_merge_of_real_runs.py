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


def test_what_a_suite_skips_itself_is_promised_but_skipped(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest
        def test_promised(): pytest.skip("requires the packaging package")
        def test_other(): pytest.skip("requires the nonesuch package")
        def test_ran(): pass
        """,
        test_gone="import pytest; pytest.importorskip('packaging.nonesuch')",
    )
    monkeypatch.setenv("FABRICATED", "cpu")
    result, _ = run("--cuda-require", "packaging", "--cuda-ledger", "cpu.json")
    result.assert_outcomes(passed=1, failed=1, skipped=2)
    capsys.readouterr()

    forms = ("--html", "page.html", "--junit", "out.xml", "--markdown", "out.md", "--json", "merged.json")
    assert cli.main(["merge", "cpu.json", *forms]) == 1
    out = capsys.readouterr().out
    assert out.startswith("RED: 2 promised but skipped, 3 never ran anywhere (4 tests, 1 ran; 1 run of 1 runner)")
    red = out.partition("RED never ran anywhere")[0]
    assert "test_it.py::test_promised" in red
    assert "test_gone.py" in red
    assert "test_it.py::test_other" not in red
    # A run that promises nothing may skip them.
    result, _ = run("--cuda-ledger", "other.json")
    result.assert_outcomes(passed=1, skipped=3)
    capsys.readouterr()
    assert cli.main(["merge", "other.json"]) == 1
    assert "promised but skipped" not in capsys.readouterr().out
