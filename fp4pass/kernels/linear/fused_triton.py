"""What is computed in the kernels of products before them and behind them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import rounded, wait
from ..quantize.triton import activate, narrow


@triton.jit
def halves(y, BN: tl.constexpr, BM: tl.constexpr):
    """Return the two [BN / 2, BM] of sums [BN, BM] in eights of gates and of their factors."""
    y = tl.permute(tl.reshape(y, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    return tl.split(tl.reshape(y, (BN // 2, BM, 2)))


@triton.jit
def gate_times_up(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the activation of a gate times its factor, rounded where eager rounds but at last."""
    active = activate((narrow(gate, DTYPE),), ACTIVATION, DTYPE)[0]
    return narrow(active, DTYPE) * narrow(up, DTYPE)


@triton.jit
def gate_kernel(
    gate,
    up,
    out,
    N,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply the activation of a part of a row and its factors."""
    wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_stride + n, mask=n < N, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + n, mask=n < N, other=0.0).to(tl.float32)
    y = gate_times_up(x, factor, ACTIVATION, DTYPE)
    tl.store(out + row * N + n, rounded(y, DTYPE), mask=n < N)
