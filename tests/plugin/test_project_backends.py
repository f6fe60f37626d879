"""Attention backends of a project's own, added by a hook."""

from __future__ import annotations

import pytest

CONFTEST = """
    from pytest_cudaenv import AttnBackend

    def pytest_cudaenv_attn_backends():
        return [
            AttnBackend("ring", aliases=("ring_attn",), dtypes=("bfloat16",)),
            AttnBackend("tiled", distribution="no-such-tiles", modules=("no_such_tiles",), runs_on_cpu=False),
        ]
"""

SUITE = """
    from pytest_cudaenv import attn_backends, dtypes, requires_attn_backend

    @attn_backends("sdpa", "Ring-Attn", "tiled")
    @dtypes("float32", "bfloat16")
    def test_cells(cell): ...

    @requires_attn_backend("tiled")
    def test_tiled(): ...
"""


def test_a_project_adds_backends_that_are_good_everywhere(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("--collect-only", "-q", "--cuda-attn-backends", "ring")
    result.stdout.fnmatch_lines(["*::test_cells[[]ring-bf16[]]", "*::test_tiled"])
    assert "sdpa" not in result.stdout.str()
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "-rs", "-k", "tiled")
    result.assert_outcomes(skipped=3, deselected=3)
    result.stdout.fnmatch_lines(["SKIPPED * [[]attn-missing[]] tiled needs no-such-tiles; have none"])


def test_ini_lists_may_name_them_and_are_printed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\ncuda_attn_backends = eager ring\ncuda_dtypes = bf16")
    pytester.makepyfile("def test_it(cell): ...")
    result = pytester.runpytest_subprocess("--collect-only")
    result.stdout.fnmatch_lines(
        [
            "cudaenv: cuda_attn_backends = eager ring (ini)",
            "cudaenv: cuda_dtypes = bf16 (ini)",
            "*<Function test_it[[]eager-bf16[]]>",
            "*<Function test_it[[]ring-bf16[]]>",
        ]
    )


def test_another_run_does_not_know_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*unknown attention backend*Ring-Attn*"])
