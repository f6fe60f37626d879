"""Cells of FlashAttention-3 on a kernel from LOCAL_KERNELS, with a fake of the package's shape, in Python."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("kernels")
pytest.importorskip("transformers")

from tests.hub_kernels.fa3_kernel import (
    INTERFACE,
    LIBRARY,
    REPO,
    SUITE,
    TESTS,
    environment,
    lay_out,
    missing_from,
)

FAKE = '''
"""The names and arguments of FlashAttention-3's interface, for the CPU."""

import torch

import flash_attn_3._C  # registers the operators

flash_attn_3_gpu = torch.ops.flash_attn_3


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool, left: int, right: int
) -> torch.Tensor:
    k, v = (t.float().repeat_interleave(q.shape[-2] // k.shape[-2], -2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * softmax_scale
    nq, nk = s.shape[-2:]
    ahead = torch.arange(nk)[None] - torch.arange(nk - nq, nk)[:, None]
    hidden = torch.zeros(nq, nk, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if left >= 0:
        hidden |= ahead < -left
    s = s.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).to(q.dtype)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, window_size):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return _flash_attn_forward(q, k, v, scale, causal, *window_size)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("This flash attention build does not support backward.")


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False, sinks=None):
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, window_size)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, sinks=None):
    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(), cu_seqlens_k[1:].tolist()))
    parts = [FlashAttnFunc.apply(q[None, a:b], k[None, c:d], v[None, c:d], softmax_scale, causal, window_size)[0]
             for a, b, c, d in ends]
    return torch.cat(parts)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, **more):
    raise NotImplementedError
'''


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A folder as the wheel unpacks to. The library is one that is harmless to load."""
    folder = tmp_path / "wheel"
    (folder / LIBRARY).parent.mkdir(parents=True)
    (folder / INTERFACE).write_text(FAKE)
    libraries = sorted(Path(sysconfig.get_config_var("DESTSHARED") or "").glob("*.so"))
    if not libraries:
        pytest.skip("this Python has no extension module in a file of its own")
    (folder / LIBRARY).symlink_to(libraries[0])
    return folder


def test_what_a_build_lacks_is_named(build: Path, tmp_path: Path) -> None:
    assert missing_from(build) == []
    assert missing_from(tmp_path) == [INTERFACE, LIBRARY]


def test_a_package_on_the_path_is_left_out(build: Path, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(build), ""])}
    assert environment(tmp_path, environ)["PYTHONPATH"] == str(tmp_path)


def test_the_cells_of_a_simulated_hopper_run_the_kernel(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, build: Path, tmp_path: Path
) -> None:
    repository = lay_out(build, tmp_path / "repository", "torch-universal")
    for name, value in (environment(repository, os.environ) | {"FA3_ON_CPU": "1"}).items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(SUITE)
    ran = pytester.runpytest_subprocess("--cuda-simulate", "h200:1", "--cuda-strict", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=TESTS)


def test_on_an_ampere_they_skip_and_say_why(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, build: Path, tmp_path: Path
) -> None:
    repository = lay_out(build, tmp_path / "repository", "torch-universal")
    for name, value in environment(repository, os.environ).items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(SUITE)
    ran = pytester.runpytest_subprocess("--cuda-simulate", "a100:1", "-p", "no:cacheprovider", "-rs")
    ran.assert_outcomes(skipped=TESTS)
    ran.stdout.fnmatch_lines([f"*kernels-arch*{REPO.partition('/')[2]} needs sm_90a; have 8.0*"])
