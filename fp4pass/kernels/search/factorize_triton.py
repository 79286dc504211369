"""Block Hessians factored in float64: the first launch of the search by the block Hessian."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import bits_of


@triton.jit
def _load_hessian(hessian_ptr, block, N: tl.constexpr, WIDTH: tl.constexpr):
    """Load the Hessian of a block column: float64 [N, N], symmetric, largest in [0.5, 1)."""
    # The identity for a column that was never excited: any scale is optimal there.
    i = tl.arange(0, N)
    start = block * N % WIDTH
    corner = hessian_ptr + (block * N // WIDTH).to(tl.int64) * (WIDTH * WIDTH) + start * (WIDTH + 1)
    upper = tl.load(corner + i[:, None] * WIDTH + i[None, :])
    lower = tl.load(corner + i[None, :] * WIDTH + i[:, None])
    largest = tl.max(tl.max(tl.maximum(tl.abs(upper), tl.abs(lower)), axis=1), axis=0)
    exponent = (bits_of(largest) >> 23) - 126
    shrink = ((1022 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    h = (upper.to(tl.float64) + lower.to(tl.float64)) * shrink
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float64)
    return tl.where(largest > 0, h, identity)


@triton.jit
def factorize_kernel(
    hessian_ptr, metric_ptr, factor_ptr, bounds_ptr, N: tl.constexpr, WIDTH: tl.constexpr
):
    """Factor H + e I = L L^T for one block column, and invert it for the bounds on r^T H r."""
    # Filled are metric, float64 [J, N, N]: H with elements above the diagonal doubled; factor,
    # float16 [J, 2, N, N]: the high and the low part of L; bounds, float32 [J, N + 2]: the roots of
    # the diagonal of (H + e I)^-1, the trace of H and e.
    block = tl.program_id(0)
    h = _load_hessian(hessian_ptr, block, N, WIDTH)
    i = tl.arange(0, N)
    row = i[:, None]
    column = i[None, :]
    trace = tl.sum(tl.sum(tl.where(row == column, h, 0.0), axis=1), axis=0)
    ridge = tl.maximum(trace, 0.5) * 1e-9
    smallest = ridge * 0.0
    lower = h
    inverse = h
    # The last ridge exceeds what the most negative eigenvalue can be.
    for _ in range(9):
        if smallest < ridge * 0.25:
            # Gauss-Jordan turns H into its inverse. Its pivots are those of Cholesky, whose k-th
            # column is the current one over the root of the pivot.
            ridge *= 16.0
            smallest = ridge
            inverse = tl.where(row == column, h + ridge, h)
            for k in range(N):
                pivot_row = tl.sum(tl.where(row == k, inverse, 0.0), axis=0)
                pivot_column = tl.sum(tl.where(column == k, inverse, 0.0), axis=1)
                pivot = tl.sum(tl.where(i == k, pivot_row, 0.0), axis=0)
                smallest = tl.minimum(smallest, pivot)
                pivot = tl.maximum(pivot, ridge * 0.25)
                root = tl.where(i >= k, pivot_column / tl.sqrt(pivot), 0.0)
                lower = tl.where(column == k, root[:, None], lower)
                scaled = tl.where(i == k, 1.0, pivot_row) / pivot
                rest = tl.where(column == k, 0.0, inverse)
                rest -= pivot_column[:, None] * scaled[None, :]
                inverse = tl.where(row == k, scaled[None, :], rest)
    diagonal = tl.sum(tl.where(row == column, inverse, 0.0), axis=1)
    tl.store(metric_ptr + block * (N * N) + row * N + column, tl.where(row < column, 2 * h, h))
    bounds_ptr += block * (N + 2)
    tl.store(bounds_ptr + i, tl.sqrt(diagonal).to(tl.float32))
    tl.store(bounds_ptr + N, trace.to(tl.float32))
    tl.store(bounds_ptr + N + 1, ridge.to(tl.float32))
    factor_ptr += block * (2 * N * N) + row * N + column
    high = lower.to(tl.float16)
    tl.store(factor_ptr, high)
    tl.store(factor_ptr + N * N, (lower - high.to(tl.float64)).to(tl.float16))
