"""The kernels of products with packed experts (docs/kernels.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import rounded, wait
from ..linear.decode_triton import offset
from ..linear.matmul_triton import few_rows_sums, finish, padded_columns, rows_sums


@triton.jit
def finish_of(
    y, x_global_scale, global_scales, biases, expert, n, N, FMT: tl.constexpr, SHIFT: tl.constexpr
):
    """Return the float32 result for sums y [BN, BM] of the weights n of an expert (int64)."""
    global_scale = None if global_scales is None else global_scales + expert
    bias = None if biases is None else biases + expert * N
    return finish(y, x_global_scale, global_scale, bias, n, N, FMT, SHIFT)


@triton.jit(do_not_specialize=["M", "E"])
def pairs_kernel(
    x,
    words,
    scales,
    x_global_scale,
    global_scales,
    biases,
    out,
    ids,
    M,
    E,
    N,
    FAN: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply the row of one pair, FAN of which share one, and BN weights of its expert."""
    # M: rows of x. Tensor cores get a row BM times.
    wait(OVERLAP, RELEASES)
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    at = pair.to(tl.int64) * N + n[:, None] + 0 * m[None, :]
    inside = (n < N)[:, None] & (m < 1)[None, :]
    if (expert < 0) | (expert >= E):
        tl.store(out + at, tl.zeros((BN, BM), out.dtype.element_ty), mask=inside)
        return
    row = (expert * N + tl.minimum(n, N - 1))[None, :, None]
    x_row = tl.arange(0, 1)[None, :, None]
    acc = few_rows_sums(
        x + (pair // FAN).to(tl.int64) * K, words, scales, row, x_row, x_row < 1, M, 0,
        K, FMT, TERMS, 1, BM, BN, WORDS, WARPS, 1, FMT.block // 8,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "E"])
def few_rows_experts_kernel(
    x,
    words,
    scales,
    x_global_scale,
    global_scales,
    biases,
    out,
    order,
    tiles,
    M,
    E,
    N,
    FAN: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply a tile of up to BM rows and BN weights of their expert; the warps share K."""
    # order, tiles: what `route_kernel` wrote.
    wait(OVERLAP, RELEASES)
    tile = tiles + 3 * tl.program_id(0)
    start, end = tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    expert = tl.load(tile).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    at = (pair * N)[None, :] + n[:, None]
    inside = (n < N)[:, None] & (m < end)[None, :]
    if expert == E:
        tl.store(out + at, tl.zeros((BN, BM), out.dtype.element_ty), mask=inside)
        return
    row = (expert * N + tl.minimum(n, N - 1))[None, :, None]
    x_m = start + tl.arange(0, BM)[None, :, None]
    x_row = tl.load(order + x_m, mask=x_m < end, other=0) // FAN
    acc = few_rows_sums(
        x, words, scales, row, x_row, x_m < end, M, 0,
        K, FMT, TERMS, BM, BM, BN, WORDS, WARPS, 1, FMT.block // 8,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def rows_tile(
    x,
    words,
    scales,
    x_global_scale,
    global_scales,
    biases,
    out,
    order,
    expert,
    start,
    end,
    M,
    E,
    N,
    FAN: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Multiply the rows from start to end, up to BM, and BN weights of their expert (int64)."""
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    x_row = (pair // FAN)[None, :] * padded_columns(K, WORDS)
    row = (expert * N + tl.minimum(n, N - 1))[:, None]
    live = (m < end)[None, :]
    acc = rows_sums(x, words, scales, row, x_row, live, M, 0, K, FMT, TERMS, BM, BN, WORDS, 1)
    y = finish_of(acc, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    at = (pair * N)[None, :] + n[:, None]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=(n < N)[:, None] & live)


@triton.jit(do_not_specialize=["M", "E"])
def rows_experts_kernel(
    x,
    words,
    scales,
    x_global_scale,
    global_scales,
    biases,
    out,
    order,
    tiles,
    M,
    E,
    N,
    FAN: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    REST: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply a tile of up to BM rows of sorted x, or of REST, and BN weights of their expert."""
    wait(OVERLAP, RELEASES)
    tile = tiles + 3 * tl.program_id(0)
    start, end = tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    expert = tl.load(tile).to(tl.int64)
    if expert == E:
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        m = start + tl.arange(0, BM)
        pair = tl.load(order + m, mask=m < end, other=0)
        zeros = tl.zeros((BN, BM), out.dtype.element_ty)
        inside = (n < N)[:, None] & (m < end)[None, :]
        tl.store(out + (pair * N)[None, :] + n[:, None], zeros, mask=inside)
        return
    # What is left of an expert is often few rows, and a tile takes as long for these as for BM.
    if end - start <= REST:
        rows_tile(
            x, words, scales, x_global_scale, global_scales, biases, out, order,
            expert, start, end, M, E, N, FAN, K, FMT, TERMS, REST, BN, WORDS,
        )  # fmt: skip
    elif BM > REST:
        rows_tile(
            x, words, scales, x_global_scale, global_scales, biases, out, order,
            expert, start, end, M, E, N, FAN, K, FMT, TERMS, BM, BN, WORDS,
        )  # fmt: skip
