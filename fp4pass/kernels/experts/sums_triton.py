"""Sums of products that are decoded faster where scales allow it, which is checked with them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import PTX
from ..linear.matmul_triton import few_rows_sums, rows_sums
from ..linear.ptx_triton import LARGE, small_scales


@triton.jit
def exact_few_rows_sums(
    x,
    words,
    scales,
    row,
    x_row,
    live_rows,
    M,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Return `few_rows_sums` over K, whose lanes own blocks, decoded faster if scales allow it."""
    SMALL: tl.constexpr = small_scales(FMT)
    RUN: tl.constexpr = FMT.block // 8
    acc, seen = few_rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0,
        K, FMT, TERMS, ROWS, BM, BN, WORDS, WARPS, 1, RUN, SHARE, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = few_rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, ROWS, BM, BN, WORDS, WARPS, 1, RUN, SHARE, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def exact_rows_sums(
    x,
    words,
    scales,
    row,
    x_row,
    live_rows,
    M,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Return `rows_sums` over K, decoded faster if SMALL and if all scales of the tile allow it."""
    acc, seen = rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0, K, FMT, TERMS, BM, BN, WORDS, 1, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, BM, BN, WORDS, 1, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def unknown_zero(most):
    """Return 0, of which the compiler knows no more than that it is a multiple of 16."""
    # Else what both loops compute would be kept in registers through the first one.
    if PTX:
        zero = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 31;", "=r,r", [most], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        zero = most >> 31
    return tl.multiple_of(zero, 16)
