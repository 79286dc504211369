"""Block scale search in Triton: naive and by squared error, one block a thread, and by Hessians.

The pieces of all come first. With Hessians the error of a scale is one matrix product, and there
are three launches: the search in float32, and before and after it those in float64, for blocks
whose best two scales float32 cannot tell apart. docs/kernels.md and docs/search.md explain both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.elements import Record
from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common import tiles
from ..statistics.naive import HESSIAN_BLOCK

# Relative slack on every bound: far above float32 rounding, far below the step between scales.
SLACK = tl.constexpr(1e-5)


def needs_division(weight: Tensor, global_scale: float) -> bool:
    """Return whether quotients need a true division: else they are ties or far from ties."""
    return weight.dtype.itemsize > 2 or math.frexp(global_scale)[0] != 0.5


@triton.constexpr_function
def octave_start(ELEMENT):
    """Return s / amax where the first octave of scales begins, just above 1 / halving_reach."""
    return (1 + 1e-5) / ELEMENT.halving_reach


@triton.constexpr_function
def top_code(ELEMENT):
    """Return the code of the largest magnitude."""
    return len(ELEMENT.magnitudes) - 1


@triton.constexpr_function
def clipping(SCALE):
    """Return 2^60 times the largest scale, or None if no float32 is larger."""
    found = math.ldexp(SCALE.max, 60)
    return found if found < 2.0**127 else None


@triton.constexpr_function
def zero_exponent(ELEMENT):
    """Return the largest k for which all |x| < 2^(k + 1) round to zero at a scale of 1."""
    return math.frexp(ELEMENT.dead_zone)[1] - 2


@triton.jit
def floor_byte(value, SCALE: tl.constexpr):
    """Return the byte (int32) of the largest scale <= value; 0 if there is none."""
    drop: tl.constexpr = 23 - SCALE.mantissa_bits
    byte = (tiles.bits_of(value) >> drop) - ((127 - SCALE.bias) << SCALE.mantissa_bits)
    if SCALE.subnormal:
        least: tl.constexpr = tiles.power(1 - SCALE.bias)
        steps = (tl.minimum(value, least) * tiles.power(SCALE.bias - 1 + SCALE.mantissa_bits)).to(
            tl.int32
        )
        byte = tl.where(value < least, steps, byte)
    return tl.minimum(tl.maximum(byte, 0), SCALE.last)


@triton.jit
def normalization(amax, global_scale, EXPONENT: tl.constexpr):
    """Return two powers of two whose product brings amax to [2^EXPONENT, 2^(EXPONENT + 1))."""
    # The product alone may be beyond float32. Scales of the format are multiplied by it too.
    exponent = tl.minimum(tl.maximum((tiles.bits_of(amax) >> 23) - 127, -126), 127)
    half = exponent >> 1
    first = tiles.float_of((127 - half) << 23)
    second = tiles.float_of((127 + EXPONENT - (exponent - half)) << 23)
    return first, second


@triton.jit
def code_scale(byte, unit, SCALE: tl.constexpr):
    """Return the scales of bytes in the units of normalized blocks, within [2^-100, 1]."""
    # Below 2^-100 all elements saturate and above 1 all round to zero, as they would anyway.
    return tl.minimum(tl.maximum(tiles.scale_value(byte, SCALE) * unit, tiles.power(-100)), 1.0)


@triton.jit
def sum_of_squares(r, CHAINS: tl.constexpr):
    """Return the sum of squares of a tuple: CHAINS chains of fused additions, then a tree."""
    sums = ()
    for k in tl.static_range(CHAINS):
        total = r[k] * r[k]
        for i in tl.static_range(k + CHAINS, len(r), CHAINS):
            total = tl.fma(r[i], r[i], total)
        sums = sums + (total,)
    for _ in tl.static_range(4):
        if len(sums) > 1:
            level = ()
            for i in tl.static_range(len(sums) // 2):
                level = level + (sums[i] + sums[len(sums) // 2 + i],)
            sums = level
    return sums[0]


@triton.jit
def squared_error(x, scale, FMT: tl.constexpr, DIVIDES: tl.constexpr, CLIPS: tl.constexpr):
    """Return the squared error of blocks x, a tuple of tensors, at scales like one of them."""
    # x is so small that a scale of 1 rounds all of it to zero (`zero_exponent`), as larger ones do.
    # CLIPS: whether quotients beyond halving_reach may round to more than the largest element.
    scale = tl.minimum(tl.maximum(scale, tiles.power(-100)), 1.0)
    ELEMENT: tl.constexpr = FMT.element
    r = ()
    if DIVIDES:
        for i in tl.static_range(len(x)):
            code = tiles.round_to_codes(tl.math.div_rn(x[i], scale), ELEMENT)
            r = r + (tl.fma(tiles.code_value(code, ELEMENT), -scale, tl.abs(x[i])),)
    else:
        # So scaled, the smallest normal element is the smallest normal float.
        inverse = tiles.reciprocal(scale) * tiles.power(-126 - tiles.min_exponent(ELEMENT))
        back = scale * -tiles.power(126 + tiles.min_exponent(ELEMENT))
        place: tl.constexpr = tiles.shift(ELEMENT)
        top: tl.constexpr = ELEMENT.max * tiles.power(-126 - tiles.min_exponent(ELEMENT))
        for i in tl.static_range(len(x)):
            y = x[i] * inverse
            if CLIPS:
                y = tl.minimum(tl.maximum(y, -top), top)
            bits = (tiles.bits_of(y) + (1 << (place - 1))) & -(1 << place)
            r = r + (tl.fma(tiles.float_of(bits), back, x[i]),)
    return sum_of_squares(r, len(x) * len(x) // 64)


@triton.jit
def nearby_codes(x, inverse, ELEMENT: tl.constexpr):
    """Return the codes (int32, no sign) of |x| by products with 2^(-126 - min_exponent) / scale."""
    # A quotient within 2^-14 of a tie is one: quotients of 16-bit floats by scales either are ties
    # or are 2^-12 away, and the error of the reciprocal is 2^-22.
    place: tl.constexpr = tiles.shift(ELEMENT)
    half: tl.constexpr = 1 << (place - 1)
    bits = tiles.bits_of(tl.abs(x) * inverse)
    odd = (bits >> (place - 9)) & 0x200
    return tl.minimum((bits + (half - 0x100) + odd) >> place, top_code(ELEMENT))


@triton.jit
def codes_at(x, y, scale, ELEMENT: tl.constexpr, DIVIDES: tl.constexpr):
    """Return the codes (int32) of x, whose quotients are y / scale."""
    SIGN: tl.constexpr = 1 << (ELEMENT.bits - 1)
    if DIVIDES:
        code = tiles.round_to_codes(tl.math.div_rn(y, scale), ELEMENT)
    else:
        inverse = tiles.reciprocal(scale) * tiles.power(-126 - tiles.min_exponent(ELEMENT))
        code = nearby_codes(y, inverse, ELEMENT)
    return code | ((tiles.bits_of(x) >> (32 - ELEMENT.bits)) & SIGN)


@triton.jit
def pack_words(codes):
    """Return the 4-bit codes (int32) of a block, a tuple, as int64 words of sixteen."""
    words = ()
    for start in tl.static_range(0, len(codes), 16):
        low = codes[start]
        high = codes[start + 8]
        for i in tl.static_range(1, 8):
            low = low | (codes[start + i] << (4 * i))
            high = high | (codes[start + 8 + i] << (4 * i))
        words = words + ((high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF),)
    return words


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
    _search_blocks[(tiles.cdiv(blocks, _LANES), count)](
        *(tiles.as_words(weight), packed.view(torch.int64), scale, blocks, global_scale),
        *(_LANES, fmt, tiles.DTYPES.get(weight.dtype, tl.float32), objective == "sse", divides),
        EACH=isinstance(global_scale, Tensor), num_warps=1, **tiles.LAUNCH,
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
        error = squared_error(x, tiles.scale_value(byte, SCALE) * unit, FMT, DIVIDES, False)
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
        scale = tiles.scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
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
    x = tiles.unpack_block(tiles.load_block(words_ptr, lane, mask, COUNT), DTYPE)
    amax = tiles.tree_max([tl.abs(value) for value in x])
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
        byte = tiles.naive_byte(amax, global_scale, FMT)
    scale = code_scale(byte, unit, SCALE)
    codes = ()
    for i in tl.static_range(len(y)):
        codes = codes + (codes_at(x[i], y[i], scale, ELEMENT, DIVIDES),)
    out = pack_words(codes)
    for i in tl.static_range(len(out)):
        tl.store(packed_ptr + lane * len(out) + i, out[i], mask=mask)
    tl.store(scale_ptr + lane, byte.to(tl.uint8), mask=mask)


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
    how = Arithmetic(
        fmt, divides, tiles.PTX.value and not divides and packs_pairs(weight.dtype, fmt)
    )
    doubts, shape = (undecided, count), (rows, blocks, global_scale)
    factorize_kernel[(blocks,)](
        hessian, metric, factor, bounds, n, HESSIAN_BLOCK, num_warps=1, **tiles.LAUNCH
    )
    _search_kernel[(blocks, tiles.cdiv(rows, _ROWS))](
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
        inverse = (tiles.reciprocal(scale) * tiles.power(-14 - tiles.min_exponent(ELEMENT))).to(
            tl.float16
        )
        back = (scale * -tiles.power(14 + tiles.min_exponent(ELEMENT))).to(tl.float16)
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
        scale = tl.maximum(scale, tiles.power(-100))
        if HOW.divides:
            code = tiles.round_to_codes(tl.math.div_rn(x, scale[:, None]), ELEMENT)
        else:
            inverse = tiles.reciprocal(scale) * tiles.power(-126 - tiles.min_exponent(ELEMENT))
            code = nearby_codes(x, inverse[:, None], ELEMENT)
        r = tl.fma(tiles.code_value(code, ELEMENT), -scale[:, None], tl.abs(x))
        r = tl.where(x < 0, -r, r)
        first = r.to(tl.float16)
        second = ((r - first.to(tl.float32)) * tiles.power(12)).to(tl.float16)
        z = tl.dot(first, factor[0])
        z = tl.dot(first, factor[1], z)
        z = tl.fma(tl.dot(second, factor[0]), tiles.power(-12), z)
    return tl.sum(z * z, axis=1)


@triton.jit
def _through_dot(x, N: tl.constexpr, PARTS: tl.constexpr):
    """Return x float32 [R, N] < 1 in the layout of a product, which the search never leaves."""
    i = tl.arange(0, N)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float16)
    y = tl.zeros_like(x)
    for part in tl.static_range(PARTS):
        half = (x * tiles.power(12 * part)).to(tl.float16)
        y = tl.fma(tl.dot(half, identity), tiles.power(-12 * part), y)
        x = x - half.to(tl.float32) * tiles.power(-12 * part)
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
        scale = tiles.scale_value(tl.minimum(byte, SCALE.last), SCALE) * unit
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
        scale = tiles.scale_value(byte, SCALE) * unit
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
    small = (magnitude > 0) & (magnitude < tiles.power(-17))
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
    delta = (N + 16) * tiles.power(-24) * tl.sqrt(full_trace * square)
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
    doubt |= clips | (HOW.packs & (tiles.scale_value(first, SCALE) * unit < amax * tiles.power(-6)))
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
    exponent = (tiles.bits_of(largest) >> 23) - 126
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
            scale = tiles.scale_value(tl.minimum(byte, SCALE.last), SCALE) * global_scale
            r = _residuals(x, scale, ELEMENT)
            # Never anything but 0; it keeps all of the metric from being held in registers.
            error = _energy(r, metric + ((listed + start) >> 30))
            error = tl.where(byte <= last, error, float("inf"))
            smallest = tl.min(error, axis=0)
            found = tl.min(tl.where(error == smallest, byte, 256), axis=0)
            best = tl.where(smallest < least, found, best)
            least = tl.minimum(smallest, least)
        chosen = tiles.scale_value(best, SCALE) * global_scale
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
    finite = tl.minimum(scale.to(tl.float64), tiles.power(128))
    r = ()
    for i in tl.static_range(len(x)):
        code = tiles.round_to_codes(tl.math.div_rn(tl.zeros_like(scale) + x[i], scale), ELEMENT)
        magnitude = tiles.code_value(code, ELEMENT).to(tl.float64)
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
