"""The float64 decision between scales: the last launch of the search by the block Hessian."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import code_value, round_to_codes, tree_max
from .tiles import code_scale, codes_at, normalization, pack_words, zero_exponent


@triton.jit(do_not_specialize=["rows", "blocks"])
def decide_kernel(
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
    # metric: of factorize_kernel; undecided, count: of the search, per block column. Codes and
    # scales of listed blocks are overwritten.
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
        first_factor, second_factor = normalization(amax, global_scale, zero_exponent(ELEMENT))
        y = [value * first_factor * second_factor for value in x]
        unit = global_scale * first_factor * second_factor
        span = entry.to(tl.int32)
        last = span & 0xFF
        best = last
        least = amax.to(tl.float64) + float("inf")
        for start in range((span >> 8) & 0xFF, last + 1, SCALES):
            byte = start + tl.arange(0, SCALES)
            r = _residuals(y, code_scale(tl.minimum(byte, SCALE.last), unit, SCALE), ELEMENT)
            # Never anything but 0; it keeps all of the metric from being held in registers.
            here = metric_ptr + ((listed + start) >> 30)
            error = _energy(r, here)
            error = tl.where(byte <= last, error, float("inf"))
            smallest = tl.min(error, axis=0)
            found = tl.min(tl.where(error == smallest, byte, 256), axis=0)
            best = tl.where(smallest < least, found, best)
            least = tl.minimum(smallest, least)
        scale = code_scale(best, unit, SCALE)
        codes = ()
        for i in tl.static_range(N):
            codes = codes + (codes_at(x[i], y[i], scale, ELEMENT, True),)
        words = pack_words(codes)
        for i in tl.static_range(len(words)):
            tl.store(packed_ptr + place * len(words) + i, words[i])
        tl.store(scale_ptr + place, best.to(tl.uint8))


@triton.jit
def _residuals(y, scale, ELEMENT: tl.constexpr):
    """Return y - RTN(y) of a normalized block, a tuple, at scales [S]: a tuple of float64 [S]."""
    r = ()
    for i in tl.static_range(len(y)):
        code = round_to_codes(tl.math.div_rn(tl.zeros_like(scale) + y[i], scale), ELEMENT)
        magnitude = code_value(code, ELEMENT).to(tl.float64)
        rest = tl.abs(y[i]).to(tl.float64) - magnitude * scale.to(tl.float64)
        r = r + (tl.where(y[i] < 0, -rest, rest),)
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
