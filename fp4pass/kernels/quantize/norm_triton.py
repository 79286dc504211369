"""Normalize and quantize in one pass: a program takes rows, a lane a block of each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common.tiles import DTYPES, LAUNCH, as_words, cdiv, load_block, unpack_block, unpack_word
from .block_tiles import load_global_scale, quantize_block, store_block, word_count
from .word_tiles import pack_word, scale_word

# Warps of all programs: 16 on each multiprocessor of an H200, whose registers they fill.
_WARPS = 16 * 132


def norm_quantize_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the norm of x, or of x + residual, and return that sum (`norm_quantize_ref`)."""
    # Means are summed in another order than there: inputs differ by a rounding.
    total = x.new_empty(0 if residual is None else x.shape)
    if residual is not None and x.dtype not in DTYPES:
        x = total = (x + residual).contiguous()
        residual = None
    packed, scale = empty_blocks(x, fmt)
    blocks = x.shape[-1] // fmt.block
    if packed.numel():
        rows = scale.numel() // blocks
        lanes, warps = _lanes_and_warps(blocks)
        _norm_quantize_kernel[(min(rows, _WARPS // warps),)](
            *(None if each is None else as_words(each) for each in (x, residual, weight, bias)),
            *(global_scale, None if residual is None else as_words(total)),
            *(packed.view(torch.int64), scale, rows, eps),
            BLOCKS=blocks,
            CENTER=kind == "layer",
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            SEARCHES=scale_method == "sse",
            LANES=lanes,
            num_warps=warps,
            **LAUNCH,
        )
    return total, packed, scale


def _lanes_and_warps(blocks: int) -> tuple[int, int]:
    """Return the lanes and warps of a program, for rows of so many blocks: measured on an H200."""
    # Rows that nearly fill a power of two of lanes are held in registers. Others are read twice,
    # in parts of as many lanes as leave few of the last part idle.
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
    residual,
    weight,
    bias,
    stored,
    total,
    packed,
    scale,
    rows,
    eps,
    BLOCKS: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
):
    """residual, weight, bias, stored: None where there is none; total: None without residual."""
    COUNT: tl.constexpr = word_count(FMT.block, DTYPE)
    HELD: tl.constexpr = BLOCKS <= LANES
    COLUMNS: tl.constexpr = BLOCKS * FMT.block
    lane = tl.arange(0, LANES)
    global_scale = load_global_scale(stored, FMT)
    row = tl.program_id(0).to(tl.int64)
    if HELD:
        mask = lane < BLOCKS
        weights = load_if_any(weight, lane, mask, COUNT)
        biases = load_if_any(bias, lane, mask, COUNT)
        ahead = load_block(words, row * BLOCKS + lane, mask, COUNT)
        beside = load_if_any(residual, row * BLOCKS + lane, mask, COUNT)
    while row < rows:
        first = row * BLOCKS
        row += tl.num_programs(0)
        squares = tl.zeros((LANES,), tl.float32)
        if HELD:
            now, added = ahead, beside
            # The next row's loads, or the last's again, go out before this row's work.
            block = tl.minimum(row, rows - 1) * BLOCKS + lane
            ahead = load_block(words, block, mask, COUNT)
            beside = load_if_any(residual, block, mask, COUNT)
            held = add_words(now, added, DTYPE)
            store_words(total, first + lane, mask, held)
            mean = None
            if CENTER:
                mean = mean_of(add_values(squares, held, DTYPE), COLUMNS)
            squares = add_squares(squares, held, mean, mask, DTYPE)
        else:
            mean = None
            if CENTER:
                sums = tl.zeros((LANES,), tl.float32)
                for start in range(0, BLOCKS, LANES):
                    mask = start + lane < BLOCKS
                    x = load_sum(words, residual, first + start + lane, mask, COUNT, DTYPE)
                    sums = add_values(sums, x, DTYPE)
                mean = mean_of(sums, COLUMNS)
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                x = load_sum(words, residual, first + start + lane, mask, COUNT, DTYPE)
                squares = add_squares(squares, x, mean, mask, DTYPE)
        variance = mean_of(squares, COLUMNS)
        inverse = tl.math.rsqrt(variance + eps)
        if HELD:
            normal = normalize(held, weights, biases, mean, inverse, DTYPE)
            byte, codes = quantize_block(normal, global_scale, DTYPE, FMT, SEARCHES)
            store_block(packed, scale, first + lane, mask, byte, codes)
        else:
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                block = first + start + lane
                x = load_sum(words, residual, block, mask, COUNT, DTYPE)
                each = load_if_any(weight, start + lane, mask, COUNT)
                offset = load_if_any(bias, start + lane, mask, COUNT)
                store_words(total, block, mask, x)
                normal = normalize(x, each, offset, mean, inverse, DTYPE)
                byte, codes = quantize_block(normal, global_scale, DTYPE, FMT, SEARCHES)
                store_block(packed, scale, block, mask, byte, codes)


@triton.jit
def mean_of(sums, COUNT: tl.constexpr):
    """Return the sum of a tensor over COUNT, rounded as IEEE division rounds it."""
    total = tl.sum(sums, axis=0)
    if COUNT & (COUNT - 1) == 0:
        mean = total * (1.0 / COUNT)
    else:
        mean = tl.math.div_rn(total, COUNT)
    return mean


@triton.jit
def load_if_any(words, block, mask, COUNT: tl.constexpr):
    """Return the words of one block per lane, a tuple, which is empty where `words` is None."""
    loaded = ()
    if words is not None:
        loaded = load_block(words, block, mask, COUNT)
    return loaded


@triton.jit
def load_sum(words, residual, block, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the words of one block per lane, with those of the residual added to them."""
    x = load_block(words, block, mask, COUNT)
    return add_words(x, load_if_any(residual, block, mask, COUNT), DTYPE)


@triton.jit
def add_words(words, others, DTYPE: tl.constexpr):
    """Return the sums of two blocks, rounded, as words of DTYPE; `words` if `others` is empty."""
    if len(others) > 0:
        sums = ()
        for i in tl.static_range(len(words)):
            x, y = unpack_word(words[i], DTYPE), unpack_word(others[i], DTYPE)
            each = ()
            for j in tl.static_range(len(x)):
                each = each + (x[j] + y[j],)
            sums = sums + (pack_word(each, DTYPE),)
    else:
        sums = words
    return sums


@triton.jit
def store_words(words, block, mask, values):
    """Store one block of words per lane, unless `words` is None."""
    if words is not None:
        for i in tl.static_range(len(values)):
            tl.store(words + block * len(values) + i, values[i], mask=mask)


@triton.jit
def add_values(sums, words, DTYPE: tl.constexpr):
    """Add a block's values to `sums`."""
    values = unpack_block(words, DTYPE)
    for i in tl.static_range(len(values)):
        sums += values[i]
    return sums


@triton.jit
def add_squares(squares, words, mean, mask, DTYPE: tl.constexpr):
    """Add the squares of a block's values, or of their distances from a mean, to `squares`."""
    # mask: which lanes have values; others hold zeros.
    values = unpack_block(words, DTYPE)
    for i in tl.static_range(len(values)):
        if mean is None:
            squares = tl.fma(values[i], values[i], squares)
        else:
            distance = tl.where(mask, values[i] - mean, 0.0)
            squares = tl.fma(distance, distance, squares)
    return squares


@triton.jit
def normalize(words, weights, biases, mean, inverse, DTYPE: tl.constexpr):
    """Return the norm of a block: words of DTYPE, a tuple."""
    # Without a mean x * inverse is rounded before its product with weight; else only the result is.
    normal = ()
    for i in tl.static_range(len(words)):
        x = unpack_word(words[i], DTYPE)
        if mean is not None:
            values = ()
            for j in tl.static_range(len(x)):
                value = (x[j] - mean) * inverse
                if len(weights) > 0:
                    value *= unpack_word(weights[i], DTYPE)[j]
                if len(biases) > 0:
                    value += unpack_word(biases[i], DTYPE)[j]
                values = values + (value,)
            word = pack_word(values, DTYPE)
        else:
            values = ()
            for j in tl.static_range(len(x)):
                values = values + (x[j] * inverse,)
            word = scale_word(values, weights[i], DTYPE)
        normal = normal + (word,)
    return normal
