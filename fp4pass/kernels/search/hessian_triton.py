"""Hessian-optimal block scales on a GPU: one matrix product a scale, float64 where it is close."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import (
    LAUNCH,
    PTX,
    bits_of,
    cdiv,
    code_value,
    min_exponent,
    power,
    reciprocal,
    round_to_codes,
    scale_value,
    shift,
    tree_max,
)
from ..statistics.reference import HESSIAN_BLOCK
from .tiles import (
    SLACK,
    codes_at,
    floor_byte,
    needs_division,
    normalization,
    nudge,
    octave,
    octave_start,
    pack_words,
)

# Rows of one program of the search, in one warp.
_ROWS = 16

# Programs of one block column that decide in float64.
_SPLIT = 64


def search_hessian(
    weight: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """Fill packed and scale: all blocks in float32, then in float64 those that it cannot decide."""
    rows, columns = weight.shape
    weight = (weight.float() if weight.dtype == torch.float64 else weight).contiguous()
    hessian = hessian.contiguous()
    blocks, n = columns // fmt.block, fmt.block
    metric = weight.new_empty((blocks, n, n), dtype=torch.float64)
    factor = weight.new_empty((blocks, 2, n, n), dtype=torch.float16)
    bounds = weight.new_empty((blocks, n + 2), dtype=torch.float32)
    undecided = weight.new_empty((blocks, rows), dtype=torch.int64)
    count = weight.new_zeros(blocks, dtype=torch.int32)
    divides = needs_division(weight, global_scale)
    packs = (
        PTX.value
        and weight.dtype == torch.bfloat16
        and fmt.element.minifloat == (1, 0)
        and not divides
    )
    shape = (rows, blocks, global_scale)
    _factorize[(blocks,)](hessian, metric, factor, bounds, n, HESSIAN_BLOCK, num_warps=1, **LAUNCH)
    _search_metric[(blocks, cdiv(rows, _ROWS))](
        *(weight, factor, bounds, packed, scale, undecided, count),
        *shape,
        *(_ROWS, fmt, divides, packs),
        num_warps=1,
        # No bit of the result depends on it.
        enable_fp_fusion=True,
    )
    _search_exact[(blocks, _SPLIT)](
        *(weight, metric, packed.view(torch.int64), scale, undecided, count),
        *shape,
        *(32, fmt),
        num_warps=1,
        # In float64 no bit that matters depends on it.
        enable_fp_fusion=True,
    )


@triton.jit
def _load_hessian(hessian_ptr, block, N: tl.constexpr, WIDTH: tl.constexpr):
    """The Hessian of a block column, symmetric, of largest magnitude in [0.5, 1): float64 [N, N].

    The identity for a column that was never excited: any scale is optimal there.
    """
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
def _factorize(
    hessian_ptr, metric_ptr, factor_ptr, bounds_ptr, N: tl.constexpr, WIDTH: tl.constexpr
):
    """H of every block column, L with L L^T = H + e I, and what bounds r^T H r.

    metric: float64 [J, N, N], H with each element above the diagonal doubled; factor: L in two
    float16 parts [J, 2, N, N]; bounds [J, N + 2]: the roots of the diagonal of (H + e I)^-1, the
    trace and e.
    """
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


@triton.constexpr_function
def _residual_ptx(clips):
    """x - s RTN(x / s) of two float16, given x, 2^-14 / s and -2^14 s.

    The quotient is scaled so that the smallest normal element is the smallest normal number. Its
    error is less than an ulp and downward, so that 0xFF decides ties of even codes and 0x101 of
    odd ones. The residual is exact: it has 11 bits.
    """
    clip = "min.f16x2 y, y, top; max.f16x2 y, y, bottom;" if clips else ""
    return f"""{{
        .reg .b32 y, odd, top, bottom;
        mov.b32 top, 0x0E000E00;
        mov.b32 bottom, 0x8E008E00;
        mul.rn.f16x2 y, $1, $2;
        {clip}
        shr.u32 odd, y, 8;
        and.b32 odd, odd, 0x00020002;
        add.u32 y, y, 0x00FF00FF;
        add.u32 y, y, odd;
        and.b32 y, y, 0xFE00FE00;
        fma.rn.f16x2 $0, y, $3, $1;
    }}"""


@triton.jit
def _metric_error(
    x,
    scale,
    high,
    low,
    ELEMENT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PACKS: tl.constexpr,
    CLIPS: tl.constexpr,
):
    """r^T (H + e I) r of blocks x float32 [R, N], normalized to amax < 2^-2, at scales [R].

    high + low is the factor L of H + e I. PACKS: whether x and r are float16 numbers.
    """
    scale = tl.minimum(scale, 1.0)
    if PACKS:
        inverse = (reciprocal(scale) * power(-14)).to(tl.float16)
        back = (scale * -power(14)).to(tl.float16)
        r = tl.inline_asm_elementwise(
            _residual_ptx(CLIPS),
            "=r,r,r,r",
            [x.to(tl.float16), inverse[:, None], back[:, None]],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        z = tl.dot(r, high)
        z = tl.dot(r, low, z)
    else:
        scale = tl.maximum(scale, power(-100))
        if DIVIDES:
            code = round_to_codes(tl.math.div_rn(x, scale[:, None]), ELEMENT)
        else:
            inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
            code = nudge(bits_of(tl.abs(x) * inverse[:, None]), ELEMENT) >> shift(ELEMENT)
            code = tl.minimum(code, 7)
        r = tl.fma(code_value(code, ELEMENT), -scale[:, None], tl.abs(x))
        r = tl.where(x < 0, -r, r)
        first = r.to(tl.float16)
        second = ((r - first.to(tl.float32)) * power(12)).to(tl.float16)
        z = tl.dot(first, high)
        z = tl.dot(first, low, z)
        z = tl.fma(tl.dot(second, high), power(-12), z)
    return tl.sum(z * z, axis=1)


@triton.jit
def _through_dot(x, N: tl.constexpr, PARTS: tl.constexpr):
    """x float32 [R, N] < 1, in the layout of a product: no step of the search leaves it again."""
    i = tl.arange(0, N)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float16)
    y = tl.zeros_like(x)
    for part in tl.static_range(PARTS):
        half = (x * power(12 * part)).to(tl.float16)
        y = tl.fma(tl.dot(half, identity), power(-12 * part), y)
        x = x - half.to(tl.float32) * power(-12 * part)
    return y


@triton.jit(do_not_specialize=["rows", "blocks"])
def _search_metric(
    weight_ptr,
    factor_ptr,
    bounds_ptr,
    packed_ptr,
    scale_ptr,
    undecided_ptr,
    count_ptr,
    rows,
    blocks,
    global_scale,
    ROWS: tl.constexpr,
    FMT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Scales and codes of ROWS blocks of a block column; those in doubt are listed as well.

    undecided [J, rows] int64: row << 16 | first byte << 8 | last byte of what is in doubt.
    """
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    OCTAVE: tl.constexpr = octave(SCALE)
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    i = tl.arange(0, N)
    place = row.to(tl.int64) * blocks + block
    loaded = tl.load(weight_ptr + place[:, None] * N + i[None, :], mask=mask[:, None], other=0.0)
    loaded = loaded.to(tl.float32)
    first_factor, second_factor = normalization(tl.max(tl.abs(loaded), axis=1), global_scale, -3)
    normalized = loaded * first_factor[:, None] * second_factor[:, None]
    unit = global_scale * first_factor * second_factor
    # Below 2^-17 float16 has not the bits of a bfloat16.
    magnitude = tl.abs(normalized)
    small = (magnitude > 0) & (magnitude < power(-17))
    doubtful = PACKS & (tl.max(small.to(tl.int32), axis=1) > 0)

    x = _through_dot(normalized, N, 1 if PACKS else 3)
    factor_ptr += block * (2 * N * N) + i[:, None] * N + i[None, :]
    high = tl.load(factor_ptr)
    low = tl.load(factor_ptr + N * N)
    bounds_ptr += block * (N + 2)
    trace = tl.load(bounds_ptr + N)
    ridge = tl.load(bounds_ptr + N + 1)

    magnitude = tl.abs(x)
    amax = tl.max(magnitude, axis=1)
    start = floor_byte(amax * octave_start(ELEMENT) / unit, SCALE) + 1
    # Where even the largest scale clips, all are in doubt.
    clips = start > SCALE.last
    best = tl.minimum(start, SCALE.last)
    least = tl.full(amax.shape, float("inf"), tl.float32)
    next_least = least
    for step in range(OCTAVE):
        byte = start + step
        scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
        error = _metric_error(x, scale, high, low, ELEMENT, DIVIDES, PACKS, False)
        error = tl.where(byte <= SCALE.last, error, float("inf"))
        next_least = tl.minimum(next_least, tl.maximum(error, least))
        best = tl.where(error < least, byte, best)
        least = tl.minimum(error, least)

    square = tl.sum(x * x, axis=1)
    full_trace = trace + N * ridge
    delta = (N + 16) * power(-24) * tl.sqrt(full_trace * square)
    root = tl.sqrt(least) + delta
    most = tl.sqrt(root * root + ridge * square) * (1 + SLACK)
    reach = most[:, None] * tl.load(bounds_ptr + i)[None, :] * (1 + SLACK)
    clipped = tl.max(magnitude - reach, axis=1) / ELEMENT.max
    weight = tl.sqrt(_metric_error(x, most * 0 + 1.0, high, low, ELEMENT, DIVIDES, PACKS, False))
    vanished = (weight - delta - most) / (tl.sqrt(N * full_trace) * ELEMENT.max)
    floor = tl.maximum(clipped, vanished) * (1 - SLACK)
    kept = tl.min(tl.where(magnitude > reach, magnitude, 2 * amax[:, None]), axis=1)
    ceiling = kept * ((1 + SLACK) / ELEMENT.dead_zone)
    first = tl.where(clips, start, floor_byte(floor / unit, SCALE) + 1)
    last = tl.where(clips, 0, floor_byte(ceiling / unit, SCALE))

    # First the scales above the octave, then those below it.
    above = tl.maximum(last - start - (OCTAVE - 1), 0)
    count = above + tl.maximum(start - first, 0)
    for step in range(tl.max(count, axis=0)):
        byte = tl.where(step < above, start + OCTAVE + step, start - 1 + above - step)
        scale = scale_value(byte, SCALE) * unit
        error = _metric_error(x, scale, high, low, ELEMENT, DIVIDES, PACKS, True)
        error = tl.where(step < count, error, float("inf"))
        next_least = tl.minimum(next_least, tl.maximum(error, least))
        best = tl.where(error < least, byte, best)
        least = tl.minimum(error, least)

    upper = tl.sqrt(least) + delta
    lower = tl.maximum(tl.sqrt(next_least) - delta, 0.0)
    doubt = lower * lower - ridge * square <= upper * upper
    # A residual of what is clipped that far has more bits than float16.
    doubt |= clips | (PACKS & (scale_value(first, SCALE) * unit < amax * power(-6)))
    best = tl.where(amax > 0, best, 1)
    first = tl.where(clips, 1, tl.minimum(first, best))
    last = tl.where(clips, SCALE.last, tl.maximum(last, start + OCTAVE - 1))
    last = tl.minimum(tl.maximum(last, best), SCALE.last)
    span = (first << 8) | last
    doubt = (doubt & (amax > 0)).to(tl.int32)

    _store_blocks(loaded, normalized, unit, best, place, packed_ptr, scale_ptr, mask, FMT, DIVIDES)
    listed = mask & ((doubt > 0) | doubtful)
    position = tl.atomic_add(count_ptr + block + row * 0, 1, mask=listed, sem="relaxed")
    entry = (row.to(tl.int64) << 16) | span
    tl.store(undecided_ptr + block.to(tl.int64) * rows + position, entry, mask=listed)


@triton.jit
def _store_blocks(
    x, y, unit, byte, place, packed_ptr, scale_ptr, mask, FMT: tl.constexpr, DIVIDES: tl.constexpr
):
    """Store the codes of blocks x [R, N], normalized y, at scale bytes [R]."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    scale = tl.minimum(tl.maximum(scale_value(byte, SCALE) * unit, power(-100)), 1.0)
    codes = codes_at(x, y, scale[:, None], ELEMENT, DIVIDES)
    even, odd = tl.split(tl.reshape(codes, (ROWS, HALF, 2)))
    out = packed_ptr + place[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(out, (even | (odd << 4)).to(tl.uint8), mask=mask[:, None])
    tl.store(scale_ptr + place, byte.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _search_exact(
    weight_ptr,
    metric_ptr,
    packed_ptr,
    scale_ptr,
    undecided_ptr,
    count_ptr,
    rows,
    blocks,
    global_scale,
    SCALES: tl.constexpr,
    FMT: tl.constexpr,
):
    """Decide the listed blocks of a block column in float64, with H itself: a scale a lane."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    block = tl.program_id(0)
    count = tl.load(count_ptr + block)
    metric_ptr += block * (N * N)
    undecided_ptr += block.to(tl.int64) * rows
    for listed in range(tl.program_id(1), count, tl.num_programs(1)):
        entry = tl.load(undecided_ptr + listed)
        place = (entry >> 16) * blocks + block
        x = ()
        for i in tl.static_range(N):
            x = x + (tl.load(weight_ptr + place * N + i).to(tl.float32),)
        amax = tree_max([tl.abs(value) for value in x])
        first_factor, second_factor = normalization(amax, global_scale, -3)
        y = [value * first_factor * second_factor for value in x]
        unit = global_scale * first_factor * second_factor
        span = entry.to(tl.int32)
        last = span & 0xFF
        best = last
        least = amax.to(tl.float64) + float("inf")
        for start in range((span >> 8) & 0xFF, last + 1, SCALES):
            byte = start + tl.arange(0, SCALES)
            scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
            scale = tl.minimum(tl.maximum(scale, power(-100)), 1.0)
            r = ()
            for i in tl.static_range(N):
                code = round_to_codes(tl.math.div_rn(tl.zeros_like(scale) + y[i], scale), ELEMENT)
                magnitude = code_value(code, ELEMENT).to(tl.float64)
                rest = tl.abs(y[i]).to(tl.float64) - magnitude * scale.to(tl.float64)
                r = r + (tl.where(y[i] < 0, -rest, rest),)
            # Never anything but 0; it keeps all of the metric from being held in registers.
            here = metric_ptr + ((listed + start) >> 30)
            error = tl.zeros((SCALES,), tl.float64)
            for i in tl.static_range(N):
                weighted = tl.load(here + i * N + i) * r[i]
                for k in tl.static_range(i + 1, N):
                    weighted += tl.load(here + i * N + k) * r[k]
                error += weighted * r[i]
            error = tl.where(byte <= last, error, float("inf"))
            smallest = tl.min(error, axis=0)
            found = tl.min(tl.where(error == smallest, byte, 256), axis=0)
            best = tl.where(smallest < least, found, best)
            least = tl.minimum(smallest, least)
        scale = scale_value(best, SCALE) * unit
        scale = tl.minimum(tl.maximum(scale, power(-100)), 1.0)
        codes = ()
        for i in tl.static_range(N):
            codes = codes + (codes_at(x[i], y[i], scale, ELEMENT, True),)
        words = pack_words(codes)
        for i in tl.static_range(len(words)):
            tl.store(packed_ptr + place * len(words) + i, words[i])
        tl.store(scale_ptr + place, best.to(tl.uint8))
