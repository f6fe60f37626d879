"""demo-attn-fn + the `flash_attn_forward` marker attribute, which is what gets a custom fn past transformers' check."""

from collections import Counter

import torch

CALLS = Counter()
__all__ = ["CALLS", "demo_attention", "flash_attn_forward"]


def demo_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, **kwargs):
    CALLS["demo_attention"] += 1
    CALLS["mask:" + ("None" if attention_mask is None else str(tuple(attention_mask.shape)))] += 1
    g = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(g, 1), value.repeat_interleave(g, 1)
    s = (query @ key.transpose(-1, -2)).float() * (scaling or query.shape[-1] ** -0.5)
    nq, nk = s.shape[-2:]
    s = s.masked_fill(torch.ones(nq, nk, dtype=torch.bool, device=s.device).triu(nk - nq + 1), float("-inf"))
    if (
        attention_mask is not None
    ):  # transformers hands a 2-D padding mask (flash path) or a 4-D one (AttentionMaskInterface)
        keep = attention_mask.bool() if attention_mask.dim() == 4 else attention_mask[:, None, None, :].bool()
        s = s.masked_fill(~keep, float("-inf")).nan_to_num(neginf=torch.finfo(s.dtype).min)
    return (s.softmax(-1).to(value.dtype) @ value).transpose(1, 2).contiguous(), None


flash_attn_forward = demo_attention
