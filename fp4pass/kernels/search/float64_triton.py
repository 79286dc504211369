"""The float64 launches of the search by the block Hessian: factors first, close decisions last."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import bits_of, code_value, power, round_to_codes, scale_value
from .tiles import codes_at, pack_words


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


@triton.jit(do_not_specialize=["rows", "blocks"])
def decide_kernel(
    weight,
    metric,
    out,
    doubts,
    rows,
    blocks,
    global_scale,
    SCALES: tl.constexpr,
    FMT: tl.constexpr,
):
    """Decide the listed blocks of a block column in float64, with H itself: a scale a lane."""
    # metric: of factorize_kernel; doubts: of the search. Overwrites `out`, codes and scales.
    packed_ptr, scale_ptr = out
    undecided_ptr, count_ptr = doubts
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    block = tl.program_id(0)
    count = tl.load(count_ptr + block)
    metric += block * (N * N)
    undecided_ptr += block.to(tl.int64) * rows
    for listed in range(tl.program_id(1), count, tl.num_programs(1)):
        entry = tl.load(undecided_ptr + listed)
        place = (entry >> 16) * blocks + block
        x = ()
        for i in tl.static_range(N):
            x = x + (tl.load(weight + place * N + i).to(tl.float32),)
        span = entry.to(tl.int32)
        last = span & 0xFF
        best = last
        least = tl.zeros_like(x[0]).to(tl.float64) + float("inf")
        for start in range((span >> 8) & 0xFF, last + 1, SCALES):
            byte = start + tl.arange(0, SCALES)
            scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * global_scale
            r = _residuals(x, scale, ELEMENT)
            # Never anything but 0; it keeps all of the metric from being held in registers.
            error = _energy(r, metric + ((listed + start) >> 30))
            error = tl.where(byte <= last, error, float("inf"))
            smallest = tl.min(error, axis=0)
            found = tl.min(tl.where(error == smallest, byte, 256), axis=0)
            best = tl.where(smallest < least, found, best)
            least = tl.minimum(smallest, least)
        chosen = scale_value(best, SCALE) * global_scale
        codes = ()
        for i in tl.static_range(N):
            codes = codes + (codes_at(x[i], x[i], chosen, ELEMENT, True),)
        words = pack_words(codes)
        for i in tl.static_range(len(words)):
            tl.store(packed_ptr + place * len(words) + i, words[i])
        tl.store(scale_ptr + place, best.to(tl.uint8))


@triton.jit
def _residuals(x, scale, ELEMENT: tl.constexpr):
    """Return x - RTN(x) of a block, a tuple, at scales [S]: a tuple of float64 [S]."""
    # Not normalized, which would make zeros of small elements and of small scales. An infinite
    # scale rounds all to zero, and zero times infinity is not a number.
    finite = tl.minimum(scale.to(tl.float64), power(128))
    r = ()
    for i in tl.static_range(len(x)):
        code = round_to_codes(tl.math.div_rn(tl.zeros_like(scale) + x[i], scale), ELEMENT)
        magnitude = code_value(code, ELEMENT).to(tl.float64)
        rest = tl.abs(x[i]).to(tl.float64) - magnitude * finite
        r = r + (tl.where(x[i] < 0, -rest, rest),)
    return r


@triton.jit
def _energy(r, metric_ptr):
    """Return r^T H r of a tuple of float64 [S], by H with doubled elements above the diagonal."""
    N: tl.constexpr = len(r)
    error = tl.zeros_like(r[0])
    for i in tl.static_range(N):
        weighted = tl.load(metric_ptr + i * N + i) * r[i]
        for k in tl.static_range(i + 1, N):
            weighted += tl.load(metric_ptr + i * N + k) * r[k]
        error += weighted * r[i]
    return error
