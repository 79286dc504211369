"""Round rows to E4M3 with their factors, alone or in the launch of what computes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat.torch import has_fp8
from ..common.tiles import LAUNCH, cdiv, overlapping, rounded, wait
from ..linear.around_triton import gate_times_up
from ..norm.triton import normal_row, serves
from .naive import activate_round_ref, norm_round_ref
from .operands_triton import Rows, divided, empty_rows, row_divisor

# Columns of x that a warp takes at a time, and those that it has room for.
_COLUMNS, _MOST = 256, 2048


def activate_round_triton(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Round the activation of x, times `up`, to E4M3 (`activate_round_ref`)."""
    if x.dtype == torch.float64 or not x.numel() or not _rounds(x.device):
        return activate_round_ref(x, up, activation)
    rows = round_rows(*(each.reshape(-1, x.shape[-1]) for each in (x, up)), activation)
    return rows.values.view(x.shape), rows.factors.view(*x.shape[:-1], 1)


def norm_round_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sum and its RMSNorm, rounded to E4M3 (`norm_round_ref`)."""
    if not serves(x) or not x.numel() or not _rounds(x.device):
        return norm_round_ref(x, residual, weight, eps)
    k = x.shape[-1]
    rows = empty_rows(x.numel() // k, k, x.device)
    total = x.new_empty(0 if residual is None else x.shape)
    block = triton.next_power_of_2(k)
    _norm_round_kernel[(len(rows.values),)](
        x.contiguous(), None if residual is None else residual.contiguous(), weight.contiguous(),
        total, rows.values.view(torch.uint8), rows.factors, eps, K=k, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **LAUNCH, **overlapping(x.device, False),
    )  # fmt: skip
    return total, rows.values.view(x.shape), rows.factors.view(*x.shape[:-1], 1)


def _rounds(device: torch.device) -> bool:
    """Return whether kernels convert to E4M3: on every GPU with it, and in the interpreter."""
    return device.type != "cuda" or has_fp8(device)


def round_rows(x: Tensor, up: Tensor | None = None, activation: str | None = None) -> Rows:
    """Return rows x [M, K], or the activation of x times `up`, as operands; K >= 1."""
    # Rows that are slices of longer ones are read where they are.
    x = x if x.stride(1) == 1 else x.contiguous()
    if up is not None and up.stride(1) != 1:
        up = up.contiguous()
    m, k = x.shape
    found = empty_rows(m, k, x.device)
    warps = min(max(4, triton.next_power_of_2(cdiv(k, _MOST))), 32)
    _round_rows_kernel[(m,)](
        x, up, found.values.view(torch.uint8), found.factors,
        x.stride(0), None if up is None else up.stride(0), K=k, TILE=warps * _COLUMNS,
        ACTIVATION=activation, num_warps=warps, **LAUNCH, **overlapping(x.device, True),
    )  # fmt: skip
    return found


@triton.jit
def _round_rows_kernel(
    x, up, out, factors, stride, up_stride,
    K: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Round a row of numbers, or of gates times factors, which are read once."""
    wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    values = ()
    largest = tl.zeros((TILE,), tl.float32)
    for start in tl.static_range(0, K, TILE):
        at = start + column
        value = tl.load(x + row * stride + at, mask=at < K, other=0.0)
        if up is not None:
            beside = tl.load(up + row * up_stride + at, mask=at < K, other=0.0).to(tl.float32)
            product = gate_times_up(value.to(tl.float32), beside, ACTIVATION, DTYPE)
            value = rounded(product, DTYPE)
        values = values + (value,)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factors + row, factor)
    for i in tl.static_range(len(values)):
        at = i * TILE + column
        bits = divided(values[i].to(tl.float32), divisor, inverse)
        tl.store(out + row * K + at, bits, mask=at < K)


@triton.jit
def _norm_round_kernel(
    x, residual, weight, total, out, factors, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """residual: None where there is none; then nothing is written to `total`."""
    column = tl.arange(0, BLOCK)
    inside = column < K
    wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    at = row * K + column
    normal = normal_row(x, residual, weight, total, at, column, inside, eps, K).to(tl.float32)
    factor, divisor, inverse = row_divisor(tl.abs(normal))
    tl.store(factors + row, factor)
    tl.store(out + at, divided(normal, divisor, inverse), mask=inside)
