"""Products of E4M3 weights in Triton: of one row, by words of four codes, and of tiles of rows."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...core.formats import WHOLE
from ..common.e4m3_tiles import power_of_byte, value_at, value_of
from ..common.tiles import rounded, unpack_word, wait

_WHOLE = tl.constexpr(WHOLE)

# Columns whose sum FP8 tensor cores keep, with few bits, before it is added in float32.
_IMPRECISE = tl.constexpr(128)


@dataclass(frozen=True)
class Sizes:
    """The tile of a program, and how it runs."""

    m: int  # rows of x
    n: int  # rows of the weight
    k: int  # columns at a time
    warps: int
    stages: int


@triton.jit
def quad(words, at, inside, DTYPE: tl.constexpr):
    """Return four columns of a row as float32, for each of its words: of codes, or of floats."""
    word = tl.load(words + at, mask=inside, other=0)
    if DTYPE == tl.uint8:
        values = (value_at(word, 0), value_at(word, 1), value_at(word, 2), value_at(word, 3))
    else:
        values = unpack_word(word, DTYPE)
    return values


@triton.jit
def e4m3_row_kernel(
    x, x_scales, words, scales, bias, out, N,
    K: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply one row x [K] and a weight [N, K], both in words of four columns.

    x_scales: of the codes of x, else None. A program has BN rows, of one tile of the weight.
    """
    wait(OVERLAP, RELEASES)
    WORDS: tl.constexpr = K // 4
    start_n = tl.program_id(0).to(tl.int64) * BN
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)
    acc = tl.zeros((BN, BW), tl.float32)
    for start in range(0, WORDS, BW):
        at = start + tl.arange(0, BW)
        inside = at < WORDS
        word = tl.load(words + row[:, None] * WORDS + at[None, :], mask=inside[None, :], other=0)
        a, b, c, d = quad(x, at, inside, DTYPE)
        part = value_at(word, 0) * a[None, :]
        part = tl.fma(value_at(word, 1), tl.broadcast_to(b[None, :], (BN, BW)), part)
        part = tl.fma(value_at(word, 2), tl.broadcast_to(c[None, :], (BN, BW)), part)
        part = tl.fma(value_at(word, 3), tl.broadcast_to(d[None, :], (BN, BW)), part)
        if FMT.block == _WHOLE:
            acc += part
        else:
            SHARE: tl.constexpr = FMT.block // 4
            SCALES: tl.constexpr = (K + FMT.block - 1) // FMT.block
            if FMT.rows == 1:
                own = scales + row[:, None] * SCALES + (at // SHARE)[None, :]
                step = power_of_byte(tl.load(own, mask=inside[None, :], other=0))
            else:
                own = scales + start_n // FMT.rows * SCALES + at // SHARE
                step = tl.load(own, mask=inside, other=0.0)[None, :]
            if x_scales is not None:
                given = tl.load(x_scales + at // SHARE, mask=inside, other=0)
                step *= (power_of_byte(given) if FMT.rows == 1 else given)[None, :]
            acc = tl.fma(part, tl.broadcast_to(step, (BN, BW)), acc)
    y = tl.sum(acc, 1)
    if FMT.block == _WHOLE:
        y *= tl.load(scales + row if FMT.rows == 1 else scales + row * 0)
        if x_scales is not None:
            y *= tl.load(x_scales)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + start_n + n, rounded(y, out.dtype.element_ty), mask=start_n + n < N)


@triton.jit
def times_powers(values, scales, start, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply columns of rows, float32 from `start` on, by the powers of two of their blocks.

    scales: where the bytes of each row begin.
    """
    ROWS: tl.constexpr = values.shape[0]
    COUNT: tl.constexpr = values.shape[1] // BLOCK
    at = start // BLOCK + tl.arange(0, COUNT)
    byte = tl.load(scales[:, None] + at[None, :], mask=(at < SCALES)[None, :], other=0)
    blocks = tl.reshape(values, (ROWS, COUNT, BLOCK)) * power_of_byte(byte)[:, :, None]
    return tl.reshape(blocks, (ROWS, COUNT * BLOCK))


@triton.jit(do_not_specialize=["M"])
def e4m3_tiles_kernel(
    x, x_scales, codes, scales, bias, out, M, N,
    K: tl.constexpr, FMT: tl.constexpr, OPERAND: tl.constexpr, SIZES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply rows x [M, K] and a weight [N, K].

    x_scales: of the codes of x, else None. OPERAND: the dtype in which the tiles are multiplied, in
    which both are exact; if it is E4M3 they are so in memory.
    """
    wait(OVERLAP, RELEASES)
    BM: tl.constexpr = SIZES.m
    BN: tl.constexpr = SIZES.n
    BK: tl.constexpr = SIZES.k
    BLOCK: tl.constexpr = FMT.block
    SCALES: tl.constexpr = 1 if BLOCK == _WHOLE else (K + BLOCK - 1) // BLOCK
    # Programs of eight tiles of rows go together over the weight, which stays in the cache.
    of_m = tl.cdiv(M, BM)
    of_n = tl.cdiv(N, BN)
    program = tl.program_id(0)
    group = program // (8 * of_n)
    height = tl.minimum(of_m - group * 8, 8)
    inner = program % (8 * of_n)
    m = (group * 8 + inner % height) * BM + tl.arange(0, BM)
    n = (inner // height) * BN + tl.arange(0, BN)
    x_row = tl.minimum(m, M - 1).to(tl.int64)
    row = tl.minimum(n, N - 1).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (k < K)[None, :]
        x_at = x + x_row[:, None] * K + k[None, :]
        at = codes + row[:, None] * K + k[None, :]
        if K % BK == 0:
            left = tl.load(x_at)
            right = tl.load(at)
        else:
            left = tl.load(x_at, mask=inside, other=0.0)
            right = tl.load(at, mask=inside, other=0.0)
        if left.dtype == tl.uint8:
            left = value_of(left)
        if right.dtype == tl.uint8:
            right = value_of(right)
        if BLOCK != _WHOLE and FMT.rows == 1:
            right = times_powers(right, scales + row * SCALES, start, SCALES, BLOCK)
            if x_scales is not None:
                left = times_powers(left, x_scales + x_row * SCALES, start, SCALES, BLOCK)
        left = left.to(OPERAND)
        right = tl.trans(right.to(OPERAND))
        if BLOCK == _WHOLE or FMT.rows == 1:
            acc = tl.dot(left, right, acc, input_precision="ieee", max_num_imprecise_acc=_IMPRECISE)
        else:
            tl.static_assert(BK == BLOCK)
            step = tl.load(scales + row // FMT.rows * SCALES + start // BK)[None, :]
            if x_scales is not None:
                step = step * tl.load(x_scales + x_row * SCALES + start // BK)[:, None]
            part = tl.dot(left, right, input_precision="ieee")
            acc += part * tl.broadcast_to(step, (BM, BN))
    if BLOCK == _WHOLE:
        if FMT.rows == 1:
            acc *= tl.load(scales + row)[None, :]
        else:
            acc *= tl.load(scales)
        if x_scales is not None:
            acc *= tl.load(x_scales + x_row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, rounded(acc, out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
