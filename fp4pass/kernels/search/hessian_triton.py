"""Hessian-optimal block scales: one matrix product a scale, and float64 where it is close.

Three launches: the search below in float32, and before and after it those of float64_triton.py,
for blocks whose best two scales float32 cannot tell apart. docs/kernels.md explains the arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, PTX, cdiv, power, scale_value
from ..statistics.naive import HESSIAN_BLOCK
from .float64_triton import decide_kernel, factorize_kernel
from .tiles import (
    SLACK,
    code_scale,
    codes_at,
    floor_byte,
    metric_error,
    needs_division,
    normalization,
    octave_start,
    packs_pairs,
    through_dot,
    zero_exponent,
)

# Rows of one program of the search, in one warp.
_ROWS = 16

# Programs of one block column that decide in float64.
_SPLIT = 64


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
    packs = PTX.value and not divides and packs_pairs(weight.dtype, fmt)
    shape = (rows, blocks, global_scale)
    factorize_kernel[(blocks,)](
        hessian, metric, factor, bounds, n, HESSIAN_BLOCK, num_warps=1, **LAUNCH
    )
    _search_kernel[(blocks, cdiv(rows, _ROWS))](
        *(weight, factor, bounds, packed, scale, undecided, count),
        *shape,
        *(_ROWS, fmt, divides, packs),
        num_warps=1,
        # No bit of the result depends on it.
        enable_fp_fusion=True,
    )
    decide_kernel[(blocks, _SPLIT)](
        *(weight, metric, packed.view(torch.int64), scale, undecided, count),
        *shape,
        *(32, fmt),
        num_warps=1,
        # In float64 no bit that matters depends on it.
        enable_fp_fusion=True,
    )


@triton.jit
def _keep_best(error, byte, best, least, next_least):
    """Return the best byte, its error and the next error, with one more candidate."""
    next_least = tl.minimum(next_least, tl.maximum(error, least))
    best = tl.where(error < least, byte, best)
    return best, tl.minimum(error, least), next_least


@triton.jit
def _search_octave(
    x, unit, start, factor, FMT: tl.constexpr, DIVIDES: tl.constexpr, PACKS: tl.constexpr
):
    """Try the octave of scales from byte `start` on: the best byte, its error and the next."""
    ELEMENT: tl.constexpr = FMT.element
    SCALE: tl.constexpr = FMT.scale
    best = tl.minimum(start, SCALE.last)
    least = tl.full(unit.shape, float("inf"), tl.float32)
    next_least = least
    for step in range(SCALE.octave):
        byte = start + step
        scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
        error = metric_error(x, scale, factor, ELEMENT, DIVIDES, PACKS, False)
        error = tl.where(byte <= SCALE.last, error, float("inf"))
        best, least, next_least = _keep_best(error, byte, best, least, next_least)
    return best, least, next_least


@triton.jit
def _scales_between(
    x,
    amax,
    bound,
    delta,
    full_trace,
    roots_ptr,
    factor,
    FMT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Return what a scale must lie between for an error <= bound (reference.hessian_interval)."""
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    magnitude = tl.abs(x)
    most = tl.sqrt(bound) * (1 + SLACK)
    reach = most[:, None] * tl.load(roots_ptr + tl.arange(0, N))[None, :] * (1 + SLACK)
    clipped = tl.max(magnitude - reach, axis=1) / ELEMENT.max
    weight = tl.sqrt(metric_error(x, most * 0 + 1.0, factor, ELEMENT, DIVIDES, PACKS, False))
    vanished = (weight - delta - most) / (tl.sqrt(N * full_trace) * ELEMENT.max)
    floor = tl.maximum(clipped, vanished) * (1 - SLACK)
    kept = tl.min(tl.where(magnitude > reach, magnitude, 2 * amax[:, None]), axis=1)
    return floor, kept * ((1 + SLACK) / ELEMENT.dead_zone)


@triton.jit
def _search_beyond(
    x,
    unit,
    start,
    first,
    last,
    found,
    factor,
    FMT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Try the scales from `first` to `last` outside the octave that begins at `start`."""
    # found: the best byte so far, its error and the next. Returns them anew.
    ELEMENT: tl.constexpr = FMT.element
    SCALE: tl.constexpr = FMT.scale
    best, least, next_least = found
    # First the scales above the octave, then those below it.
    above = tl.maximum(last - start - (SCALE.octave - 1), 0)
    count = above + tl.maximum(start - first, 0)
    for step in range(tl.max(count, axis=0)):
        byte = tl.where(step < above, start + SCALE.octave + step, start - 1 + above - step)
        scale = scale_value(byte, SCALE) * unit
        error = metric_error(x, scale, factor, ELEMENT, DIVIDES, PACKS, True)
        error = tl.where(step < count, error, float("inf"))
        best, least, next_least = _keep_best(error, byte, best, least, next_least)
    return best, least, next_least


@triton.jit(do_not_specialize=["rows", "blocks"])
def _search_kernel(
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
    """Store scales and codes of ROWS blocks of a block column, and list those in doubt."""
    # undecided [J, rows] int64: row << 16 | first byte << 8 | last byte of what is in doubt.
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    i = tl.arange(0, N)
    place = row.to(tl.int64) * blocks + block
    loaded = tl.load(weight_ptr + place[:, None] * N + i[None, :], mask=mask[:, None], other=0.0)
    loaded = loaded.to(tl.float32)
    first_factor, second_factor = normalization(
        tl.max(tl.abs(loaded), axis=1), global_scale, zero_exponent(ELEMENT)
    )
    normalized = loaded * first_factor[:, None] * second_factor[:, None]
    unit = global_scale * first_factor * second_factor
    # Below 2^-17 a float16 has fewer bits than a bfloat16.
    magnitude = tl.abs(normalized)
    small = (magnitude > 0) & (magnitude < power(-17))
    doubtful = PACKS & (tl.max(small.to(tl.int32), axis=1) > 0)

    x = through_dot(normalized, N, 1 if PACKS else 3)
    factor_ptr += block * (2 * N * N) + i[:, None] * N + i[None, :]
    factor = (tl.load(factor_ptr), tl.load(factor_ptr + N * N))
    bounds_ptr += block * (N + 2)
    trace = tl.load(bounds_ptr + N)
    ridge = tl.load(bounds_ptr + N + 1)

    amax = tl.max(tl.abs(x), axis=1)
    start = floor_byte(amax * octave_start(ELEMENT) / unit, SCALE) + 1
    # Where even the largest scale clips, all are in doubt.
    clips = start > SCALE.last
    best, least, next_least = _search_octave(x, unit, start, factor, FMT, DIVIDES, PACKS)

    square = tl.sum(x * x, axis=1)
    full_trace = trace + N * ridge
    delta = (N + 16) * power(-24) * tl.sqrt(full_trace * square)
    root = tl.sqrt(least) + delta
    bound = root * root + ridge * square
    floor, ceiling = _scales_between(
        x, amax, bound, delta, full_trace, bounds_ptr, factor, FMT, DIVIDES, PACKS
    )
    first = tl.where(clips, start, floor_byte(floor / unit, SCALE) + 1)
    last = tl.where(clips, 0, floor_byte(ceiling / unit, SCALE))
    best, least, next_least = _search_beyond(
        x, unit, start, first, last, (best, least, next_least), factor, FMT, DIVIDES, PACKS
    )
    upper = tl.sqrt(least) + delta
    lower = tl.maximum(tl.sqrt(next_least) - delta, 0.0)
    doubt = lower * lower - ridge * square <= upper * upper
    # Where x is clipped that far, its residual has more bits than a float16.
    doubt |= clips | (PACKS & (scale_value(first, SCALE) * unit < amax * power(-6)))
    best = tl.where(amax > 0, best, 1)
    first = tl.where(clips, 1, tl.minimum(first, best))
    last = tl.where(clips, SCALE.last, tl.maximum(last, start + SCALE.octave - 1))
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
    ELEMENT: tl.constexpr = FMT.element
    SCALE: tl.constexpr = FMT.scale
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    scale = code_scale(byte, unit, SCALE)
    codes = codes_at(x, y, scale[:, None], ELEMENT, DIVIDES)
    even, odd = tl.split(tl.reshape(codes, (ROWS, HALF, 2)))
    out = packed_ptr + place[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(out, (even | (odd << 4)).to(tl.uint8), mask=mask[:, None])
    tl.store(scale_ptr + place, byte.to(tl.uint8), mask=mask)
