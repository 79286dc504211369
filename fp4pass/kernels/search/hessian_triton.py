"""Hessian-optimal block scales: one matrix product a scale, and float64 where it is close.

Three launches: the search below in float32, and before and after it those of float64_triton.py,
for blocks whose best two scales float32 cannot tell apart. docs/kernels.md explains the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.elements import Record
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
)
from ..statistics.naive import HESSIAN_BLOCK
from .tiles import (
    SLACK,
    code_scale,
    codes_at,
    floor_byte,
    nearby_codes,
    needs_division,
    normalization,
    octave_start,
    pack_words,
    top_code,
    zero_exponent,
)

# Rows of one program of the search, in one warp.
_ROWS = 16

# Programs of one block column that decide in float64.
_SPLIT = 64


@dataclass(frozen=True, repr=False)
class Arithmetic(Record):
    """The arithmetic of a weight's residuals."""

    fmt: Format
    divides: bool  # whether quotients need a true division
    packs: bool  # whether residuals are float16 numbers

    __hash__ = Record.__hash__


def packs_pairs(dtype: torch.dtype, fmt: Format) -> bool:
    """Return whether residuals are float16 numbers, and float16 quotients decide every tie."""
    # docs/kernels.md proves it for bfloat16 weights, the elements of E2M1, and mantissas of E4M3.
    element = fmt.element
    proved = element.minifloat == (1, 0) and element.max == 6.0 and fmt.scale.mantissa_bits <= 3
    return dtype == torch.bfloat16 and proved


def search_hessian(
    weight: Tensor, hessian: Tensor, global_scale: float, fmt: Format, packed: Tensor, scale: Tensor
) -> None:
    """Fill packed [N, K / 2] and scale [N, K / block] with the scales of least r^T H r."""
    # weight: [N, K], finite. hessian: [ceil(K / 32), 32, 32] float32.
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
    how = Arithmetic(fmt, divides, PTX.value and not divides and packs_pairs(weight.dtype, fmt))
    doubts, shape = (undecided, count), (rows, blocks, global_scale)
    factorize_kernel[(blocks,)](
        hessian, metric, factor, bounds, n, HESSIAN_BLOCK, num_warps=1, **LAUNCH
    )
    _search_kernel[(blocks, cdiv(rows, _ROWS))](
        *(weight, (factor, bounds), (packed, scale), doubts, *shape, _ROWS, how),
        num_warps=1,
        # No bit of the result depends on it.
        enable_fp_fusion=True,
    )
    decide_kernel[(blocks, _SPLIT)](
        *(weight, metric, (packed.view(torch.int64), scale), doubts, *shape, 32, fmt),
        num_warps=1,
        # In float64 no bit that matters depends on it.
        enable_fp_fusion=True,
    )


@triton.constexpr_function
def _residual_ptx(ELEMENT, CLIPS):
    """Return the PTX of x - s RTN(x / s) for two float16, given x, 2^-14 / s and -2^14 s."""
    # The quotient is scaled so that the smallest normal element is the smallest normal number: bits
    # from `place` on are its code. Its error is less than an ulp and downward, so that half a code
    # less 1 decides ties of even codes, half a code and 1 those of odd. Residuals have 11 bits.
    place = 10 - ELEMENT.minifloat[0]
    top = top_code(ELEMENT) << place
    half = (1 << (place - 1)) - 1

    def twice(bits: int) -> str:
        return 2 * f"{bits:04X}"

    clip = "min.f16x2 y, y, top; max.f16x2 y, y, bottom;" if CLIPS else ""
    return f"""{{
        .reg .b32 y, odd, top, bottom;
        mov.b32 top, 0x{twice(top)};
        mov.b32 bottom, 0x{twice(0x8000 | top)};
        mul.rn.f16x2 y, $1, $2;
        {clip}
        shr.u32 odd, y, {place - 1};
        and.b32 odd, odd, 0x00020002;
        add.u32 y, y, 0x{twice(half)};
        add.u32 y, y, odd;
        and.b32 y, y, 0x{twice(-(1 << place) & 0xFFFF)};
        fma.rn.f16x2 $0, y, $3, $1;
    }}"""


@triton.jit
def _metric_error(x, scale, factor, HOW: tl.constexpr, CLIPS: tl.constexpr):
    """Return r^T (H + e I) r of blocks x float32 [R, N] at scales [R]."""
    # x is normalized so that a scale of 1 rounds all of it to zero. factor: the high and the low
    # part of L, L L^T = H + e I.
    ELEMENT: tl.constexpr = HOW.fmt.element
    scale = tl.minimum(scale, 1.0)
    if HOW.packs:
        inverse = (reciprocal(scale) * power(-14 - min_exponent(ELEMENT))).to(tl.float16)
        back = (scale * -power(14 + min_exponent(ELEMENT))).to(tl.float16)
        r = tl.inline_asm_elementwise(
            _residual_ptx(ELEMENT, CLIPS),
            "=r,r,r,r",
            [x.to(tl.float16), inverse[:, None], back[:, None]],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        z = tl.dot(r, factor[0])
        z = tl.dot(r, factor[1], z)
    else:
        scale = tl.maximum(scale, power(-100))
        if HOW.divides:
            code = round_to_codes(tl.math.div_rn(x, scale[:, None]), ELEMENT)
        else:
            inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
            code = nearby_codes(x, inverse[:, None], ELEMENT)
        r = tl.fma(code_value(code, ELEMENT), -scale[:, None], tl.abs(x))
        r = tl.where(x < 0, -r, r)
        first = r.to(tl.float16)
        second = ((r - first.to(tl.float32)) * power(12)).to(tl.float16)
        z = tl.dot(first, factor[0])
        z = tl.dot(first, factor[1], z)
        z = tl.fma(tl.dot(second, factor[0]), power(-12), z)
    return tl.sum(z * z, axis=1)


@triton.jit
def _through_dot(x, N: tl.constexpr, PARTS: tl.constexpr):
    """Return x float32 [R, N] < 1 in the layout of a product, which the search never leaves."""
    i = tl.arange(0, N)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float16)
    y = tl.zeros_like(x)
    for part in tl.static_range(PARTS):
        half = (x * power(12 * part)).to(tl.float16)
        y = tl.fma(tl.dot(half, identity), power(-12 * part), y)
        x = x - half.to(tl.float32) * power(-12 * part)
    return y


@triton.jit
def _keep_best(error, byte, best, least, next_least):
    """Return the best byte, its error and the next error, with one more candidate."""
    next_least = tl.minimum(next_least, tl.maximum(error, least))
    best = tl.where(error < least, byte, best)
    return best, tl.minimum(error, least), next_least


@triton.jit
def _search_octave(x, unit, start, factor, HOW: tl.constexpr):
    """Try the octave of scales from byte `start` on: the best byte, its error and the next."""
    SCALE: tl.constexpr = HOW.fmt.scale
    best = tl.minimum(start, SCALE.last)
    least = tl.full(unit.shape, float("inf"), tl.float32)
    next_least = least
    for step in range(SCALE.octave):
        byte = start + step
        scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
        error = _metric_error(x, scale, factor, HOW, False)
        error = tl.where(byte <= SCALE.last, error, float("inf"))
        best, least, next_least = _keep_best(error, byte, best, least, next_least)
    return best, least, next_least


@triton.jit
def _scales_between(x, amax, bound, delta, full_trace, roots_ptr, factor, HOW: tl.constexpr):
    """Return what a scale must lie between for an error <= bound (reference.hessian_interval)."""
    ELEMENT: tl.constexpr = HOW.fmt.element
    N: tl.constexpr = HOW.fmt.block
    magnitude = tl.abs(x)
    most = tl.sqrt(bound) * (1 + SLACK)
    reach = most[:, None] * tl.load(roots_ptr + tl.arange(0, N))[None, :] * (1 + SLACK)
    clipped = tl.max(magnitude - reach, axis=1) / ELEMENT.max
    weight = tl.sqrt(_metric_error(x, most * 0 + 1.0, factor, HOW, False))
    vanished = (weight - delta - most) / (tl.sqrt(N * full_trace) * ELEMENT.max)
    floor = tl.maximum(clipped, vanished) * (1 - SLACK)
    kept = tl.min(tl.where(magnitude > reach, magnitude, 2 * amax[:, None]), axis=1)
    return floor, kept * ((1 + SLACK) / ELEMENT.dead_zone)


@triton.jit
def _search_beyond(x, unit, start, first, last, found, factor, HOW: tl.constexpr):
    """Try the scales from `first` to `last` outside the octave that begins at `start`."""
    # found: the best byte so far, its error and the next. Returns them anew.
    SCALE: tl.constexpr = HOW.fmt.scale
    best, least, next_least = found
    # First the scales above the octave, then those below it.
    above = tl.maximum(last - start - (SCALE.octave - 1), 0)
    count = above + tl.maximum(start - first, 0)
    for step in range(tl.max(count, axis=0)):
        byte = tl.where(step < above, start + SCALE.octave + step, start - 1 + above - step)
        scale = scale_value(byte, SCALE) * unit
        error = _metric_error(x, scale, factor, HOW, True)
        error = tl.where(step < count, error, float("inf"))
        best, least, next_least = _keep_best(error, byte, best, least, next_least)
    return best, least, next_least


@triton.jit(do_not_specialize=["rows", "blocks"])
def _search_kernel(
    weight, metric, out, doubts, rows, blocks, global_scale, ROWS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Store scales and codes of ROWS blocks of a block column, and list those in doubt."""
    # metric: factor and bounds of factorize_kernel; out: codes and scales; doubts: the list, int64
    # [J, rows], of row << 16 | first byte << 8 | last byte, and how many [J].
    SCALE: tl.constexpr = HOW.fmt.scale
    ELEMENT: tl.constexpr = HOW.fmt.element
    N: tl.constexpr = HOW.fmt.block
    factor_ptr, bounds_ptr = metric
    undecided_ptr, count_ptr = doubts
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    i = tl.arange(0, N)
    place = row.to(tl.int64) * blocks + block
    loaded = tl.load(weight + place[:, None] * N + i[None, :], mask=mask[:, None], other=0.0)
    loaded = loaded.to(tl.float32)
    first_factor, second_factor = normalization(
        tl.max(tl.abs(loaded), axis=1), global_scale, zero_exponent(ELEMENT)
    )
    normalized = loaded * first_factor[:, None] * second_factor[:, None]
    unit = global_scale * first_factor * second_factor
    # Below 2^-17 a float16 has fewer bits than a bfloat16.
    magnitude = tl.abs(normalized)
    small = (magnitude > 0) & (magnitude < power(-17))
    doubtful = HOW.packs & (tl.max(small.to(tl.int32), axis=1) > 0)

    x = _through_dot(normalized, N, 1 if HOW.packs else 3)
    factor_ptr += block * (2 * N * N) + i[:, None] * N + i[None, :]
    factor = (tl.load(factor_ptr), tl.load(factor_ptr + N * N))
    bounds_ptr += block * (N + 2)
    trace = tl.load(bounds_ptr + N)
    ridge = tl.load(bounds_ptr + N + 1)

    amax = tl.max(tl.abs(x), axis=1)
    start = floor_byte(amax * octave_start(ELEMENT) / unit, SCALE) + 1
    # Where even the largest scale clips, all are in doubt.
    clips = start > SCALE.last
    best, least, next_least = _search_octave(x, unit, start, factor, HOW)

    square = tl.sum(x * x, axis=1)
    full_trace = trace + N * ridge
    delta = (N + 16) * power(-24) * tl.sqrt(full_trace * square)
    root = tl.sqrt(least) + delta
    bound = root * root + ridge * square
    floor, ceiling = _scales_between(x, amax, bound, delta, full_trace, bounds_ptr, factor, HOW)
    first = tl.where(clips, start, floor_byte(floor / unit, SCALE) + 1)
    last = tl.where(clips, 0, floor_byte(ceiling / unit, SCALE))
    found = (best, least, next_least)
    best, least, next_least = _search_beyond(x, unit, start, first, last, found, factor, HOW)
    upper = tl.sqrt(least) + delta
    lower = tl.maximum(tl.sqrt(next_least) - delta, 0.0)
    doubt = lower * lower - ridge * square <= upper * upper
    # Where x is clipped that far, its residual has more bits than a float16.
    doubt |= clips | (HOW.packs & (scale_value(first, SCALE) * unit < amax * power(-6)))
    best = tl.where(amax > 0, best, 1)
    first = tl.where(clips, 1, tl.minimum(first, best))
    last = tl.where(clips, SCALE.last, tl.maximum(last, start + SCALE.octave - 1))
    last = tl.minimum(tl.maximum(last, best), SCALE.last)
    span = (first << 8) | last
    doubt = (doubt & (amax > 0)).to(tl.int32)

    _store_blocks(loaded, normalized, unit, best, out, place, mask, HOW)
    listed = mask & ((doubt > 0) | doubtful)
    position = tl.atomic_add(count_ptr + block + row * 0, 1, mask=listed, sem="relaxed")
    entry = (row.to(tl.int64) << 16) | span
    tl.store(undecided_ptr + block.to(tl.int64) * rows + position, entry, mask=listed)


@triton.jit
def _store_blocks(x, y, unit, byte, out, place, mask, HOW: tl.constexpr):
    """Store the codes of blocks x [R, N], normalized y, at scale bytes [R]."""
    packed_ptr, scale_ptr = out
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    SCALE: tl.constexpr = HOW.fmt.scale
    ELEMENT: tl.constexpr = HOW.fmt.element
    scale = code_scale(byte, unit, SCALE)
    codes = codes_at(x, y, scale[:, None], ELEMENT, HOW.divides)
    even, odd = tl.split(tl.reshape(codes, (ROWS, HALF, 2)))
    at = packed_ptr + place[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(at, (even | (odd << 4)).to(tl.uint8), mask=mask[:, None])
    tl.store(scale_ptr + place, byte.to(tl.uint8), mask=mask)


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
    weight, metric, out, doubts, rows, blocks, global_scale, SCALES: tl.constexpr,
    FMT: tl.constexpr,
):  # fmt: skip
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
