"""Block scale search in Triton: naive and by squared error, one block a thread (docs/search.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common.tiles import (
    DTYPES,
    LAUNCH,
    as_words,
    cdiv,
    load_block,
    naive_byte,
    scale_value,
    tree_max,
    unpack_block,
)
from .hessian_triton import search_hessian
from .tiles import (
    SLACK,
    clipping,
    code_scale,
    codes_at,
    floor_byte,
    needs_division,
    normalization,
    octave_start,
    pack_words,
    squared_error,
    zero_exponent,
)

# Blocks of one program of one warp; more are no faster (docs/development/notes.md).
_LANES = 32

# Elements of a launch for a stack, whose memory may have to be copied: 512 MB of 16-bit weights.
_AT_ONCE = 1 << 28


def search_triton(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight with the block scales that minimize `objective` (`search_ref`)."""
    packed, scale = empty_blocks(weight, fmt)
    if not weight.numel():
        return packed, scale
    if objective == "hessian":
        assert hessian is not None
        search_hessian(weight, hessian, global_scale, fmt, packed, scale)
    else:
        divides = needs_division(weight, global_scale)
        _launch(weight, 1, global_scale, fmt, objective, divides, packed, scale)
    return packed, scale


def search_stack_triton(
    weight: Tensor, global_scales: Sequence[float], fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize each weight of a stack [E, N, K] by its global scale (`search_stack_ref`)."""
    packed, scale = empty_blocks(weight, fmt)
    if not weight.numel():
        return packed, scale
    divides = any(needs_division(weight, each) for each in global_scales)
    stored = torch.tensor(global_scales, dtype=torch.float32, device=weight.device)
    some = max(1, _AT_ONCE // weight[0].numel())
    parts = (each.split(some) for each in (weight, stored, packed, scale))
    for own, own_scales, *out in zip(*parts, strict=True):
        _launch(own, len(own), own_scales, fmt, objective, divides, *out)
    return packed, scale


def _launch(
    weight: Tensor,
    count: int,
    global_scale: Tensor | float,
    fmt: Format,
    objective: str,
    divides: bool,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """Fill codes and scales of `count` weights with a global scale each, or of one with a float."""
    blocks = scale.numel() // count
    _search_blocks[(cdiv(blocks, _LANES), count)](
        *(as_words(weight), packed.view(torch.int64), scale, blocks, global_scale),
        *(_LANES, fmt, DTYPES.get(weight.dtype, tl.float32), objective == "sse", divides),
        EACH=isinstance(global_scale, Tensor), num_warps=1, **LAUNCH,
    )  # fmt: skip


@triton.jit
def _search_sse(x, amax, unit, FMT: tl.constexpr, DIVIDES: tl.constexpr):
    """Return the byte (int32) of the scale of least squared error for normalized blocks."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    first = floor_byte(amax * octave_start(ELEMENT) / unit, SCALE) + 1
    best = tl.minimum(first, SCALE.last)
    least = tl.full(amax.shape, float("inf"), tl.float32)
    for i in range(SCALE.octave):
        byte = tl.minimum(first + i, SCALE.last)
        error = squared_error(x, scale_value(byte, SCALE) * unit, FMT, DIVIDES, False)
        better = error < least
        least = tl.where(better, error, least)
        best = tl.where(better, byte, best)
    # Where even the largest scale clips, the octave is empty.
    least = tl.where(first > SCALE.last, float("inf"), least)
    low = (amax - tl.sqrt(least) * (1 + SLACK)) * ((1 - SLACK) / ELEMENT.max)
    last = floor_byte(low / unit, SCALE) + 1
    # The rest below the octave, and above it where some scales have no half.
    below = tl.maximum(first - last, 0)
    above = first + SCALE.octave
    count = below + tl.maximum(SCALE.halving_from - above, 0)
    for step in range(tl.max(count, axis=0)):
        byte = tl.where(step < below, first - 1 - step, above + step - below)
        scale = scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
        error = squared_error(x, scale, FMT, DIVIDES, True)
        better = (error < least) | ((error == least) & (byte < best))
        better = better & (step < count)
        least = tl.where(better, error, least)
        best = tl.where(better, byte, best)
    return best


@triton.jit(do_not_specialize=["blocks"])
def _search_blocks(
    words_ptr, packed_ptr, scale_ptr, blocks, global_scale, LANES: tl.constexpr, FMT: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMAL: tl.constexpr, DIVIDES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Store naive or SSE-optimal scales and their codes of a weight, one block a lane."""
    # blocks: of each weight. EACH: global_scale points to theirs.
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = lane < blocks
    expert = tl.program_id(1).to(tl.int64)
    lane += expert * blocks
    if EACH:
        global_scale = tl.load(global_scale + expert)
    # In the interpreter it is a Python float, whose product below would be one in float64.
    global_scale = tl.cast(global_scale, tl.float32)
    COUNT: tl.constexpr = FMT.block * DTYPE.primitive_bitwidth // 64
    x = unpack_block(load_block(words_ptr, lane, mask, COUNT), DTYPE)
    amax = tree_max([tl.abs(value) for value in x])
    LIMIT: tl.constexpr = clipping(SCALE)
    if LIMIT is not None:
        # At 2^60 times the largest scale all of the larger elements saturate; were it more,
        # elements that do not would be zero, normalized.
        amax = tl.minimum(amax, global_scale * LIMIT)
    # One below what rounds to zero, as a margin for the error of the reciprocal.
    first, second = normalization(amax, global_scale, zero_exponent(ELEMENT) - 1)
    y = [value * first * second for value in x]
    unit = global_scale * first * second
    if OPTIMAL:
        byte = _search_sse(y, amax * first * second, unit, FMT, DIVIDES)
    else:
        byte = naive_byte(amax, global_scale, FMT)
    scale = code_scale(byte, unit, SCALE)
    codes = ()
    for i in tl.static_range(len(y)):
        codes = codes + (codes_at(x[i], y[i], scale, ELEMENT, DIVIDES),)
    out = pack_words(codes)
    for i in tl.static_range(len(out)):
        tl.store(packed_ptr + lane * len(out) + i, out[i], mask=mask)
    tl.store(scale_ptr + lane, byte.to(tl.uint8), mask=mask)
