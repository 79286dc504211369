"""Rows as E4M3 with their factors: of floats, and of packed codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import (
    LAUNCH,
    bits_of,
    cdiv,
    corrected_quotient,
    decode_scale,
    float_of,
    global_multiplier,
    overlapping,
    scale_value,
    wait,
)
from .decode_triton import decode_sixteen, e4m3_bits, joined_quarters
from .reference import BELOW_MAX, E4M3_MAX, EXPONENT, MAX_SHIFT, SMALLEST

_MAX, _SMALLEST, _MAX_SHIFT = (tl.constexpr(each) for each in (E4M3_MAX, SMALLEST, MAX_SHIFT))
_EXPONENT, _MANTISSA = tl.constexpr(EXPONENT + 127), tl.constexpr(BELOW_MAX)

# Rows of scales that a program takes, and columns of which it takes eight times as many of x.
_ROWS = 16
TRIAL = dict(warps=4, x_tile=2048, releases=False, fast=True)

# Columns that are sorted together.
SORTED = 64


class Packed(NamedTuple):
    """Packed rows, of a weight or of x."""

    codes: Tensor  # uint8 [R, K / 2]
    scale: Tensor  # uint8 [R, K / block]
    global_scale: Tensor | None  # float32 [1] as it is stored


class Rows(NamedTuple):
    """Rows of numbers as E4M3 operands."""

    values: Tensor | None  # E4M3 [R, K], sorted; None for a weight that the product decodes
    powers: Tensor  # float32 [R], what codes times scales are multiplied by
    factors: Tensor  # float32 [R], what products are multiplied by


def decoded_operands(x: Tensor | Packed, weight: Packed, fmt: Format, columns: int, zeros: int):
    k, n = 2 * weight.codes.shape[1], len(weight.codes)
    padded = cdiv(k, columns) * columns
    powers, factors = torch.empty((2, n), dtype=torch.float32, device=weight.codes.device)
    arrived = None
    if zeros:
        arrived = powers.new_empty((cdiv(n, _ROWS), zeros), dtype=torch.int32)
    rows = make_rows(x, (weight.scale.contiguous(), weight.global_scale, powers, factors, arrived), k, padded, n, fmt, zeros)
    return rows, Rows(None, powers, factors), arrived


def make_rows(x, of_weight, k, padded, n, fmt, zeros):
    packed = isinstance(x, Packed)
    m = len(x.codes if packed else x)
    device = (x.codes if packed else x).device
    values = torch.empty((m, padded), dtype=torch.float8_e4m3fn, device=device)
    factors = torch.empty(m, dtype=torch.float32, device=device)
    warps = TRIAL["warps"]
    tile = min(TRIAL["x_tile"], triton.next_power_of_2(padded // 8))
    _rows_kernel[(m + cdiv(n, _ROWS),)](
        *_read(x), values.view(torch.uint8), factors, *of_weight, m, n,
        K=k, PADDED=padded, SORTED=n > 0, FMT=fmt, BLOCKS=triton.next_power_of_2(k // fmt.block),
        FAST=TRIAL["fast"], TILE=32 * warps if packed else tile, ROWS=_ROWS, ZEROS=zeros, num_warps=warps,
        **LAUNCH, **overlapping(device, TRIAL["releases"]),
    )  # fmt: skip
    return Rows(values, None, factors)


def expanded_operands(x, weight, fmt, warps=1):
    k, n = 2 * weight.codes.shape[1], len(weight.codes)
    rows = None if x is None else make_rows(x, (None,) * 5, k, k, 0, fmt, 0)
    values = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.codes.device)
    factors = torch.empty(n, dtype=torch.float32, device=weight.codes.device)
    _expand_kernel[(n,)](
        *_read(weight), values.view(torch.int32), factors, K=k, FMT=fmt, BLOCKS=triton.next_power_of_2(k // fmt.block), TILE=32 * warps,
        num_warps=warps, **LAUNCH, **overlapping(values.device, False),
    )  # fmt: skip
    return rows, Rows(values, None, factors)


def blocks_of(codes):
    codes = codes.contiguous()
    if codes.data_ptr() % 8:
        codes = codes.clone()
    return codes.view(torch.int64)


def _read(x: Tensor | Packed) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(x, Packed):
        return blocks_of(x.codes), x.scale.contiguous(), x.global_scale
    return x, None, None


@triton.jit
def shift_from(largest, FMT: tl.constexpr):
    """Return the exponent of `shift_of` for the largest scale bytes of rows, int32."""
    SCALE: tl.constexpr = FMT.scale
    bits = bits_of(scale_value(largest, SCALE) * FMT.element.max)
    exponent = (bits + _MANTISSA) >> 23
    return tl.minimum(tl.maximum(_EXPONENT - exponent, -_MAX_SHIFT), _MAX_SHIFT)


@triton.jit
def two_to_the(exponent):
    """Return 2^exponent as float32, for int32 exponents in [-126, 127]."""
    return float_of((exponent + 127) << 23)


@triton.jit
def row_factor(shift, global_scale, FMT: tl.constexpr):
    """Return what the E4M3 numbers of a row are multiplied by."""
    factor = two_to_the(-shift)
    if global_scale is not None:
        factor *= global_multiplier(global_scale, FMT)
    return factor


@triton.jit
def quantize_row(
    x, out, factor_at, K: tl.constexpr, PADDED: tl.constexpr, SORTED: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr
):
    """Round a row of numbers to E4M3."""
    column = tl.arange(0, TILE)[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + column, mask=column < K, other=0).to(tl.float32)
    largest = tl.abs(value)
    for start in tl.static_range(8 * TILE, K, 8 * TILE):
        value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    factor = tl.maximum(tl.math.div_rn(tl.max(largest), _MAX), _SMALLEST)
    tl.store(factor_at, factor)
    # Normal unless the row has an infinity or a NaN: then all its quotients are to be NaN or 0.
    inverse = tl.math.div_rn(1.0, factor)
    for start in tl.static_range(0, PADDED, 8 * TILE):
        if K > 8 * TILE:
            value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        if FAST:
            bits = e4m3_bits(corrected_quotient(value, factor, inverse))
        else:
            bits = e4m3_bits(tl.math.div_rn(value, factor))
        if SORTED:
            bits = tl.permute(tl.reshape(bits, (TILE // 8, 4, 4, 4)), (0, 2, 1, 3))
        at = start + tl.arange(0, 8 * TILE)
        tl.store(out + at, tl.reshape(bits, (8 * TILE,)), mask=at < PADDED)


@triton.jit
def expand_row(
    words,
    scales,
    global_scale,
    out,
    factor_at,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    SORTED: tl.constexpr,
    FMT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round a row of codes to E4M3."""
    SCALE: tl.constexpr = FMT.scale
    share: tl.constexpr = FMT.block // 16
    lane = tl.arange(0, TILE)
    # All loads are under way before the scales are looked through.
    word, byte = (), ()
    for start in tl.static_range(0, PADDED // 16, TILE):
        if start + TILE <= K // 16:
            word = word + (tl.load(words + start + lane),)
            byte = byte + (tl.load(scales + (start + lane) // share),)
        else:
            inside = start + lane < K // 16
            word = word + (tl.load(words + start + lane, mask=inside, other=0),)
            byte = byte + (tl.load(scales + (start + lane) // share, mask=inside, other=0),)
    largest = byte[0].to(tl.int32)
    for i in tl.static_range(1, len(byte)):
        largest = tl.maximum(largest, byte[i].to(tl.int32))
    shift = shift_from(tl.max(largest, axis=0), FMT)
    tl.store(factor_at, row_factor(shift, global_scale, FMT))
    by = two_to_the(shift)
    for i in tl.static_range(len(word)):
        step = (decode_scale(byte[i], SCALE) * by)[None, :]
        four = joined_quarters(decode_sixteen(word[i][None, :], step, FMT))
        if SORTED:
            four = tl.permute(tl.reshape(four, (TILE // 4, 4, 4)), (0, 2, 1))
        at = (i * TILE + lane)[:, None] * 4 + tl.arange(0, 4)[None, :]
        four = tl.reshape(four, (TILE, 4))
        if (i + 1) * TILE <= PADDED // 16:
            tl.store(out + at, four)
        else:
            tl.store(out + at, four, mask=at < PADDED // 4)


@triton.jit(do_not_specialize=["M", "N"])
def _rows_kernel(
    x,
    x_scales,
    x_global_scale,
    x_out,
    x_factors,
    scales,
    global_scale,
    powers,
    factors,
    arrived,
    M,
    N,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    SORTED: tl.constexpr,
    FMT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    ZEROS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Make a row of x; or the powers and factors of ROWS rows of the weight."""
    wait(OVERLAP, RELEASES)
    blocks: tl.constexpr = K // FMT.block
    program = tl.program_id(0)
    row = program.to(tl.int64)
    if program < M:
        if x_scales is None:
            quantize_row(x + row * K, x_out + row * PADDED, x_factors + row, K, PADDED, SORTED, TILE, FAST)
        else:
            out = (x_out + row * PADDED).to(tl.pointer_type(tl.int32), bitcast=True)
            expand_row(
                x + row * (K // 16), x_scales + row * blocks, x_global_scale, out, x_factors + row,
                K, PADDED, SORTED, FMT, TILE,
            )  # fmt: skip
    elif scales is not None:
        share = program - M
        if arrived is not None:
            tl.store(arrived + share * ZEROS + tl.arange(0, ZEROS), 0)
        n = share.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        i = tl.arange(0, BLOCKS)
        inside = (n < N)[:, None] & (i < blocks)[None, :]
        byte = tl.load(scales + n[:, None] * blocks + i[None, :], mask=inside, other=0)
        shift = shift_from(tl.max(byte.to(tl.int32), axis=1), FMT)
        tl.store(powers + n, two_to_the(shift), mask=n < N)
        tl.store(factors + n, row_factor(shift, global_scale, FMT), mask=n < N)


@triton.jit
def _expand_kernel(
    words,
    scales,
    global_scale,
    out,
    factors,
    K: tl.constexpr,
    FMT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Make a row of a weight."""
    wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    expand_row(
        words + row * (K // 16), scales + row * (K // FMT.block), global_scale,
        out + row * (K // 4), factors + row, K, K, False, FMT, TILE,
    )  # fmt: skip
operands = None
