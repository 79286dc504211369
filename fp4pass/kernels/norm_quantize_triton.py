"""RMSNorm and quantization in one pass: a program takes rows, a lane a block of each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .quantize_triton import (
    join_halves,
    load_global_scale,
    mul_pairs,
    quantize_block,
    store_block,
    word_count,
)
from .tiles import (
    DTYPES,
    LAUNCH,
    PTX,
    as_words,
    bits_of,
    cdiv,
    load_block,
    unpack_block,
    unpack_half,
    unpack_word,
)

# Warps of all programs: 16 on each multiprocessor of an H200, whose registers they fill.
_WARPS = 16 * 132


def rms_norm_quantize_triton(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: Format
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of `x` over its last dimension (norm_quantize_ref.py).

    The mean is summed in another order; what is quantized is within a rounding of the reference's.
    """
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // fmt.block), dtype=torch.uint8)
    blocks = x.shape[-1] // fmt.block
    if packed.numel():
        rows = scale.numel() // blocks
        lanes, warps = _lanes_and_warps(blocks)
        _norm_quantize_kernel[(min(rows, _WARPS // warps),)](
            as_words(x),
            as_words(weight),
            global_divisor,
            packed.view(torch.int64),
            scale,
            rows,
            eps,
            BLOCKS=blocks,
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            LANES=lanes,
            num_warps=warps,
            **LAUNCH,
        )
    return packed, scale


def _lanes_and_warps(blocks: int) -> tuple[int, int]:
    """Of a program, for rows of so many blocks: measured on an H200.

    Rows that nearly fill a power of two of lanes are held in registers. Others are read twice,
    in parts of as many lanes as leave few of the last part idle.
    """
    whole = max(triton.next_power_of_2(blocks), 32)
    if whole == 32 or (whole <= 256 and blocks >= whole * 3 // 4):
        return whole, max(1, whole // 64)
    for lanes in (128, 64):
        if cdiv(blocks, lanes) * lanes <= blocks * 9 // 8:
            return lanes, lanes // 32
    return 32, 1


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_kernel(
    words,
    weight,
    divisor,
    packed,
    scale,
    rows,
    eps,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    LANES: tl.constexpr,
):
    COUNT: tl.constexpr = word_count(FMT.block, DTYPE)
    HELD: tl.constexpr = BLOCKS <= LANES
    lane = tl.arange(0, LANES)
    global_scale = load_global_scale(divisor)
    row = tl.program_id(0).to(tl.int64)
    if HELD:
        mask = lane < BLOCKS
        weights = load_block(weight, lane, mask, COUNT)
        ahead = load_block(words, row * BLOCKS + lane, mask, COUNT)
    while row < rows:
        first = row * BLOCKS
        row += tl.num_programs(0)
        squares = tl.zeros((LANES,), tl.float32)
        if HELD:
            held = ahead
            # The next row's loads, or the last's again, go out before this row's work.
            ahead = load_block(words, tl.minimum(row, rows - 1) * BLOCKS + lane, mask, COUNT)
            squares = add_squares(squares, held, DTYPE)
        else:
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                x = load_block(words, first + start + lane, mask, COUNT)
                squares = add_squares(squares, x, DTYPE)
        mean = tl.math.div_rn(tl.sum(squares, axis=0), BLOCKS * FMT.block)
        inverse = tl.math.rsqrt(mean + eps)
        if HELD:
            normal = normalize(held, weights, inverse, DTYPE)
            byte, codes = quantize_block(normal, global_scale, DTYPE, FMT)
            store_block(packed, scale, first + lane, mask, byte, codes)
        else:
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                x = load_block(words, first + start + lane, mask, COUNT)
                each = load_block(weight, start + lane, mask, COUNT)
                normal = normalize(x, each, inverse, DTYPE)
                byte, codes = quantize_block(normal, global_scale, DTYPE, FMT)
                store_block(packed, scale, first + start + lane, mask, byte, codes)


@triton.jit
def add_squares(squares, words, DTYPE: tl.constexpr):
    """Add to `squares` those of a block's values."""
    values = unpack_block(words, DTYPE)
    for i in tl.static_range(len(values)):
        squares = tl.fma(values[i], values[i], squares)
    return squares


@triton.jit
def normalize(words, weights, inverse, DTYPE: tl.constexpr):
    """x * inverse, rounded, * weight, rounded: words of DTYPE, a tuple."""
    normal = ()
    for i in tl.static_range(len(words)):
        x = unpack_word(words[i], DTYPE)
        if DTYPE == tl.float32:
            weight = unpack_word(weights[i], DTYPE)
            low = bits_of(x[0] * inverse * weight[0])
            high = bits_of(x[1] * inverse * weight[1])
        else:
            low = scale_half(x[0] * inverse, x[1] * inverse, weights[i].to(tl.int32), DTYPE)
            high = scale_half(
                x[2] * inverse, x[3] * inverse, (weights[i] >> 32).to(tl.int32), DTYPE
            )
        normal = normal + (join_halves(low, high),)
    return normal


@triton.jit
def scale_half(a, b, weights, DTYPE: tl.constexpr):
    """Two float32, rounded to 16 bits, times two 16-bit floats in an int32: the same."""
    pair = pack_half(a, b, DTYPE)
    if PTX and DTYPE == tl.bfloat16:
        pair = mul_pairs(pair, weights)
    else:
        x, weight = unpack_half(pair, DTYPE), unpack_half(weights, DTYPE)
        pair = pack_half(x[0] * weight[0], x[1] * weight[1], DTYPE)
    return pair


@triton.jit
def pack_half(a, b, DTYPE: tl.constexpr):
    """Two float32, rounded to 16-bit floats, in an int32."""
    if DTYPE == tl.float16:
        low = a.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        pair = low | (b.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    elif PTX:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        # The interpreter's own conversion truncates.
        low, high = bits_of(a), bits_of(b)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = (high + 0x7FFF + ((high >> 16) & 1)) & -65536
        pair = (low & 0xFFFF) | high
    return pair
