"""RMSNorm on a GPU: a program holds a row, and is launched before its turn."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import DTYPES, launch, rounded, wait
from .naive import WIDEST, add_rms_norm_ref, rms_norm_ref


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of rows (`rms_norm_ref`)."""
    if not serves(x):
        return rms_norm_ref(x, weight, eps)
    return _launch(x, None, weight, eps)[1]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return a sum and its RMSNorm (`add_rms_norm_ref`)."""
    if not serves(x):
        return add_rms_norm_ref(x, residual, weight, eps)
    return _launch(x, residual, weight, eps)


def serves(x: Tensor) -> bool:
    """Return whether a program can hold a row of x."""
    return x.dtype in DTYPES and 0 < x.shape[-1] <= WIDEST


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    k = x.shape[-1]
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    if rows := x.numel() // k:
        block = triton.next_power_of_2(k)
        rms_norm_kernel[(rows,)](
            x.contiguous(), None if residual is None else residual.contiguous(),
            weight.contiguous(), total, out, eps, K=k, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **launch(x.device),
        )  # fmt: skip
    return total, out


@triton.jit
def normal_row(x, residual, weight, total, at, column, inside, eps, K: tl.constexpr):
    """Return the RMSNorm of a row, or of its sum with that of a residual, which is stored."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        narrow = rounded(wide + added, DTYPE)
        tl.store(total + at, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    mean = tl.math.div_rn(tl.sum(wide * wide, axis=0), K)
    normal = rounded(wide * tl.math.rsqrt(mean + eps), DTYPE).to(tl.float32)
    return rounded(normal * factor, DTYPE)


@triton.jit
def rms_norm_kernel(
    x, residual, weight, total, out, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """residual: None where there is none; then nothing is written to `total`."""
    column = tl.arange(0, BLOCK)
    inside = column < K
    wait(OVERLAP, RELEASES)
    at = tl.program_id(0).to(tl.int64) * K + column
    normal = normal_row(x, residual, weight, total, at, column, inside, eps, K)
    tl.store(out + at, normal, mask=inside)
