"""Quantize blocks of a flattened tensor to codes of a table and their absmax, and back, in Triton.

A lane takes eight elements, whose codes are one word. Codes are the reference's to the bit, because
bounds are compared with the same float32 quotients. Equidistant values are counted by rounding. For
other values [-1, 1] is cut into cells: a quotient is compared with the one bound of its cell,
looked up, and with the few bounds that share a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.common.tiles import (
    DTYPES,
    LAUNCH,
    as_words,
    bits_of,
    cdiv,
    float_of,
    load_block,
    power,
    rounded,
    unpack_block,
    wider,
)
from ..kernels.quantize.tiles import join_halves, largest_bits
from .codebooks import Codebook, dequantize_codebook_ref, linear_codebook_ref, table_of

# Lanes and warps of a program; how often a lane takes eight elements, when quantizing and back.
_LANES, _WARPS, _TILES, _WORDS = 128, 4, 2, 4

# The cell of a quotient y is the integer nearest to SLOPE y + CELLS / 2: cells 1 to CELLS - 1. With
# this slope no bound of a registered table is near the edge of a cell.
_CELLS, _SLOPE = tl.constexpr(32), tl.constexpr(15.25)
# The float32 bits of LEAST_ABSMAX, which is subnormal.
_LEAST = tl.constexpr(0x006CE3EE)


def quantize_codebook_triton(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its flattened elements: the bits of the reference."""
    flat, block = x.reshape(-1), codebook.block
    blocks, rest = divmod(len(flat), block)
    whole, size = blocks * block, codebook.packed_bytes(blocks * block)
    codes = x.new_empty(codebook.packed_bytes(len(flat)), dtype=torch.uint8)
    absmax = x.new_empty(codebook.blocks_of(len(flat)), dtype=torch.float32)
    if blocks:
        _launch(flat[:whole], codes[:size], absmax[:blocks], codebook, divide=False)
    if rest:
        # The codes of a block are whole words, which do not fit the end of `codes`.
        last = torch.nn.functional.pad(flat[whole:], (0, block - rest))
        padded = codes.new_empty(codebook.packed_bytes(block))
        _launch(last, padded, absmax[blocks:], codebook, divide=True)
        codes[size:] = padded[: len(codes) - size]
    return codes, absmax


def _launch(x: Tensor, codes: Tensor, absmax: Tensor, codebook: Codebook, *, divide: bool) -> None:
    """Quantize whole blocks x [J * block] into codes [J * block * bits / 8] and absmax [J]."""
    lanes = codebook.block // 8
    together = max(1, _LANES // lanes)
    _quantize[(cdiv(len(absmax), together * _TILES),)](
        *(as_words(x), _bounds(codebook, x.device), _order(codebook, x.device)),
        *(codes.view(torch.int32 if codebook.bits == 4 else torch.int64), absmax, len(absmax)),
        DTYPE=DTYPES.get(x.dtype, tl.float32),
        CODEBOOK=codebook,
        OTHERS=() if codebook.steps else cells_of(codebook)[2],
        DIVIDE=divide,
        BLOCKS=together,
        LANES=lanes,
        TILES=_TILES,
        num_warps=_WARPS,
        **LAUNCH,
    )


def dequantize_codebook_triton(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return values[code] * absmax of its block: the bits of dequantize_codebook_ref."""
    if dtype == torch.float64:
        return dequantize_codebook_ref(packed, absmax, codebook, shape, dtype)
    out = packed.new_empty(tuple(shape), dtype=dtype)
    if count := out.numel():
        groups = cdiv(count, 8)
        _dequantize[(cdiv(groups, _LANES * _WORDS),)](
            *(_code_words(packed, codebook.bits), absmax.contiguous()),
            *(table_of(codebook, "values", packed.device), out, groups, count),
            CODEBOOK=codebook,
            WHOLE=count % 8 == 0,
            LANES=_LANES,
            TILES=_WORDS,
            num_warps=_WARPS,
            **LAUNCH,
        )
    return out


linear_codebook_triton = partial(linear_codebook_ref, dequantize=dequantize_codebook_triton)


def _code_words(packed: Tensor, bits: int) -> Tensor:
    """Return packed codes as words of eight, int32 or int64; copied unless aligned and whole."""
    packed = torch.nn.functional.pad(packed, (0, -len(packed) % bits))
    return wider(packed, torch.int32 if bits == 4 else torch.int64)


@lru_cache(maxsize=64)
def cells_of(codebook: Codebook) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]:
    """Return each cell's first bound, how many bounds precede it, and all other bounds."""
    # Cells without a bound have infinity. All quotients are compared with the other bounds, which
    # do not count as preceding. A bound must be clearly inside its cell, found by rounding.
    cells: list[list[float]] = [[] for _ in range(_CELLS.value)]
    for bound in codebook.bounds:
        place = bound * _SLOPE.value + _CELLS.value / 2
        cells[round(place)].append(bound)
    first = [cell[0] if cell else math.inf for cell in cells]
    before = [sum(map(bool, cells[:i])) for i in range(len(cells))]
    return tuple(first), tuple(before), tuple(bound for cell in cells for bound in cell[1:])


@lru_cache(maxsize=64)
def _bounds(codebook: Codebook, device: torch.device) -> Tensor:
    """Return cells int64 [32]: a bound's float32 bits, and above them how many precede it."""
    if codebook.steps is not None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    first, before, _ = cells_of(codebook)
    bits = torch.tensor(first, dtype=torch.float32).view(torch.int32).long() & 0xFFFFFFFF
    return (bits | torch.tensor(before) << 32).to(device)


@lru_cache(maxsize=64)
def _order(codebook: Codebook, device: torch.device) -> Tensor:
    """Return the code of each rank, int32 [2 ** bits]."""
    return torch.tensor(codebook.order, dtype=torch.int32, device=device)


@triton.constexpr_function
def is_ordered(CODEBOOK):
    """Return whether codes ascend with their values."""
    return CODEBOOK.order == tuple(range(len(CODEBOOK.order)))


@triton.jit(do_not_specialize=["blocks"])
def _quantize(
    words,
    bounds,
    order,
    codes,
    absmax,
    blocks,
    DTYPE: tl.constexpr,
    CODEBOOK: tl.constexpr,
    OTHERS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Quantize TILES times BLOCKS blocks, each LANES lanes of eight elements."""
    # OTHERS: bounds that every quotient is compared with (cells_of).
    start = tl.program_id(0).to(tl.int64) * (TILES * BLOCKS * LANES)
    lane = tl.arange(0, BLOCKS * LANES)
    # All loads are issued before the first store, which they may not pass.
    tiles = ()
    for i in tl.static_range(TILES):
        first = start + i * (BLOCKS * LANES)
        inside = lane < blocks * LANES - first
        tiles = tiles + (load_block(words, first + lane, inside, DTYPE.primitive_bitwidth // 8),)
    for i in tl.static_range(TILES):
        first = start + i * (BLOCKS * LANES)
        inside = lane < blocks * LANES - first
        largest = largest_of_block(largest_bits(tiles[i], DTYPE), BLOCKS, LANES)
        least = tl.maximum(largest, _LEAST)
        kept = float_of(least if DIVIDE else largest)
        tl.store(absmax + (first + lane) // LANES, kept, mask=inside & (lane % LANES == 0))
        divisor = float_of(least)
        inverse = tl.math.div_rn(1.0, divisor)
        values = unpack_block(tiles[i], DTYPE)
        found = ()
        for j in tl.static_range(8):
            quotient = tl.math.div_rn(values[j], divisor) if DIVIDE else values[j] * inverse
            found = found + (codes_of(quotient, bounds, order, CODEBOOK, OTHERS),)
        tl.store(codes + first + lane, pack(found, CODEBOOK), mask=inside)


@triton.jit
def largest_of_block(bits, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Return the largest of a block's lanes, in each of them."""
    largest = tl.max(tl.reshape(bits, (BLOCKS, LANES)), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(largest, (BLOCKS, LANES)), (BLOCKS * LANES,))


@triton.jit
def codes_of(quotient, bounds, order, CODEBOOK: tl.constexpr, OTHERS: tl.constexpr):
    """Return the codes (int32) of float32 quotients as the reference does."""
    if CODEBOOK.steps is not None:
        # Adding 1.5 * 2^23 rounds to an integer, in the lowest bits of the sum.
        integer = quotient * CODEBOOK.steps + (power(23) + power(22))
        code = bits_of(integer) & ((1 << CODEBOOK.bits) - 1)
    else:
        # The sum is the nearest integer, in its lowest bits.
        place = tl.fma(quotient, _SLOPE, power(23) + power(22) + _CELLS // 2)
        # Also a NaN is in some cell.
        cell = tl.load(bounds + (bits_of(place) & (_CELLS - 1)))
        rank = (cell >> 32).to(tl.int32) + is_above(quotient, float_of(cell.to(tl.int32)))
        for i in tl.static_range(len(OTHERS)):
            rank += is_above(quotient, OTHERS[i])
        if is_ordered(CODEBOOK):
            code = rank
        else:
            code = tl.load(order + rank)
    return code


@triton.jit
def is_above(quotient, bound):
    """Return 1 where a quotient is above a bound, else 0."""
    # The sign of a difference: the result of a comparison takes two more instructions to add.
    return (bits_of(bound - quotient).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def pack(codes, CODEBOOK: tl.constexpr):
    """Return eight codes as a word: int32 for 4 bits, the first of two high, else int64."""
    if CODEBOOK.bits == 4:
        word = codes[1] | (codes[0] << 4)
        for j in tl.static_range(1, 4):
            word |= (codes[2 * j + 1] | (codes[2 * j] << 4)) << (8 * j)
    else:
        low = codes[0]
        high = codes[4]
        for j in tl.static_range(1, 4):
            low |= codes[j] << (8 * j)
            high |= codes[4 + j] << (8 * j)
        word = join_halves(low, high)
    return word


@triton.jit(do_not_specialize=["groups", "count"])
def _dequantize(
    words,
    absmax,
    table,
    out,
    groups,
    count,
    CODEBOOK: tl.constexpr,
    WHOLE: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Dequantize TILES words of eight codes a lane. WHOLE: whether all words are whole."""
    start = tl.program_id(0).to(tl.int64) * (TILES * LANES)
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 8 * LANES)
    loaded = ()
    for i in tl.static_range(TILES):
        first = start + i * LANES
        inside = lane < groups - first
        word = tl.load(words + first + lane, mask=inside, other=0)
        block = (first + lane) // (CODEBOOK.block // 8)
        loaded = loaded + ((word, tl.load(absmax + block, mask=inside, other=0)),)
    for i in tl.static_range(TILES):
        first = start + i * LANES
        v = ()
        for j in tl.static_range(8):
            value = value_of(loaded[i][0], j, table, CODEBOOK) * loaded[i][1]
            v = v + (rounded(value, out.dtype.element_ty),)
        # The first join is the highest digit of the column.
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
        values = tl.reshape(tl.join(even, odd), (8 * LANES,))
        rest = (groups - first) * 8 if WHOLE else count - first * 8
        tl.store(out + first * 8 + column, values, mask=column < rest)


@triton.jit
def value_of(word, i: tl.constexpr, table, CODEBOOK: tl.constexpr):
    """Return the float32 value of the i-th of eight codes in words."""
    if CODEBOOK.bits == 4:
        code = (word >> (4 * (i ^ 1))) & 15
    else:
        code = ((word >> (32 * (i // 4))).to(tl.int32) >> (8 * (i % 4))) & 255
    if CODEBOOK.steps is not None:
        n: tl.constexpr = CODEBOOK.steps
        # A code with its sign bit inverted, as the last bits of a float from 2^23 on, is the signed
        # integer plus 2^23 and half the number of codes.
        half: tl.constexpr = 1 << (CODEBOOK.bits - 1)
        k = float_of((code ^ half) | 0x4B000000) - (power(23) + half)
        # k / n, rounded: the product and its error, times the reciprocal (Markstein 1990).
        inverse: tl.constexpr = tl.constexpr(1.0 / n)
        product = k * inverse
        value = tl.fma(tl.fma(product, -n, k), inverse, product)
    else:
        value = tl.load(table + code)
    return value
