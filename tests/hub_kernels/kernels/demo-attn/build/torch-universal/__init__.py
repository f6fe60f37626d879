"""flash-attn-shaped kernel in plain torch: gives transformers flash_attn_func + flash_attn_varlen_func."""

from collections import Counter

import torch

CALLS = Counter()
__all__ = ["CALLS", "flash_attn_func", "flash_attn_varlen_func"]


def _attn(q, k, v, scale, causal):  # (S, H, D)
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        nq, nk = s.shape[-2:]
        s = s.masked_fill(torch.ones(nq, nk, dtype=torch.bool).triu(nk - nq + 1).to(s.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.float()).to(q.dtype)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    CALLS["flash_attn_func"] += 1
    scale = softmax_scale or q.shape[-1] ** -0.5
    return torch.stack([_attn(a, b, c, scale, causal) for a, b, c in zip(q, k, v)])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    CALLS["flash_attn_varlen_func"] += 1
    scale = softmax_scale or q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        a, b, c, d = cu_seqlens_q[i], cu_seqlens_q[i + 1], cu_seqlens_k[i], cu_seqlens_k[i + 1]
        out[a:b] = _attn(q[a:b], k[c:d], v[c:d], scale, causal)
    return out
