"""The operators. Each CUDA one is an autograd function whose forward and backward are Triton kernels."""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def _rms_norm_forward(x_ptr, w_ptr, y_ptr, r_ptr, n, eps, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < n
        x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / n + eps)
        tl.store(r_ptr + row, r)
        w = tl.load(w_ptr + cols, mask=mask, other=0.0)
        # As Llama rounds: the normalised value first, then the product with the weight.
        h = (x * r).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * n + cols, (h * w).to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _rms_norm_backward(x_ptr, w_ptr, r_ptr, g_ptr, dx_ptr, dw_ptr, n, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        mask = cols < n
        x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row)
        h = x * r
        wg = w * g
        dx = r * (wg - h * (tl.sum(wg * h, axis=0) / n))
        tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dw_ptr + row * n + cols, h * g, mask=mask)

    @triton.jit
    def _silu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (x * tl.sigmoid(x)).to(y_ptr.dtype.element_ty), mask=i < n)

    @triton.jit
    def _silu_backward(x_ptr, g_ptr, dx_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        s = tl.sigmoid(x)
        dx = g * s * (1.0 + x * (1.0 - s))
        tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=i < n)

    @triton.jit
    def _rotate(x_ptr, cos_ptr, sin_ptr, y_ptr, heads, length, half, sign, HALF: tl.constexpr):
        # x: (batch, heads, length, 2 * half), cos and sin: (batch, length, 2 * half); one program per vector.
        row = tl.program_id(0).to(tl.int64)
        position = (row // (heads * length)) * length + row % length
        cols = tl.arange(0, HALF)
        mask = cols < half
        a = tl.load(x_ptr + row * 2 * half + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + row * 2 * half + half + cols, mask=mask, other=0.0).to(tl.float32)
        ca = tl.load(cos_ptr + position * 2 * half + cols, mask=mask, other=0.0).to(tl.float32)
        cb = tl.load(cos_ptr + position * 2 * half + half + cols, mask=mask, other=0.0).to(tl.float32)
        sa = tl.load(sin_ptr + position * 2 * half + cols, mask=mask, other=0.0).to(tl.float32) * sign
        sb = tl.load(sin_ptr + position * 2 * half + half + cols, mask=mask, other=0.0).to(tl.float32) * sign
        # Backward is the transposed rotation: the other sign, and the other half's sine.
        s1 = tl.where(sign > 0, sa, sb)
        s2 = tl.where(sign > 0, sb, sa)
        tl.store(y_ptr + row * 2 * half + cols, (a * ca - b * s1).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + row * 2 * half + half + cols, (b * cb + a * s2).to(y_ptr.dtype.element_ty), mask=mask)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        n = x.shape[-1]
        rows = x.contiguous().view(-1, n)
        weight = weight.contiguous()
        y = torch.empty_like(rows)
        r = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        _rms_norm_forward[(rows.shape[0],)](rows, weight, y, r, n, eps, BLOCK=triton.next_power_of_2(n))
        ctx.save_for_backward(rows, weight, r)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, r = ctx.saved_tensors
        n = rows.shape[-1]
        dx = torch.empty_like(rows)
        dw = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        grid, block = (rows.shape[0],), triton.next_power_of_2(n)
        _rms_norm_backward[grid](rows, weight, r, grad.contiguous().view_as(rows), dx, dw, n, BLOCK=block)
        return dx.view_as(grad), dw.sum(0).to(weight.dtype), None


# A global, not an attribute of the autograd function: dynamo can read none of those in a forward that it traces.
_SILU_BLOCK = 1024


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        _silu_forward[(triton.cdiv(x.numel(), _SILU_BLOCK),)](x, y, x.numel(), BLOCK=_SILU_BLOCK)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), _SILU_BLOCK),)
        _silu_backward[grid](x, grad.contiguous(), dx, x.numel(), BLOCK=_SILU_BLOCK)
        return dx


def _launch_rotate(x, cos, sin, sign):
    x = x.contiguous()
    batch, heads, length, width = x.shape
    y = torch.empty_like(x)
    half = width // 2
    _rotate[(batch * heads * length,)](x, cos, sin, y, heads, length, half, sign, HALF=triton.next_power_of_2(half))
    return y


class _Rotary(torch.autograd.Function):
    """Rotates (batch, heads, length, width); cos and sin take no gradient, as they are none of the weights'."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = (t.expand(x.shape[0], -1, -1).contiguous() for t in (cos, sin))
        ctx.save_for_backward(cos, sin)
        return _launch_rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _launch_rotate(grad, cos, sin, -1.0), None, None


def _on_cuda(x: torch.Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype in {torch.float16, torch.bfloat16, torch.float32}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over the root of its mean square, times the weight; the mean in float32."""
    if _on_cuda(x):
        return _RMSNorm.apply(x, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times its sigmoid."""
    return _SiLU.apply(x) if _on_cuda(x) else F.silu(x)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1):
    """Queries and keys, (batch, heads, length, width), turned by their positions' angles."""
    if _on_cuda(q) and unsqueeze_dim == 1:
        return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
