"""The kernels of products with packed experts (docs/kernels.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import rounded, wait
from ..linear.matmul_triton import finish, padded_columns
from ..linear.ptx_triton import offset
from .gate_triton import gated
from .sums_triton import exact_few_rows_sums, exact_rows_sums


@triton.jit
def finish_of(
    y, x_global_scale, global_scales, biases, expert, n, N, FMT: tl.constexpr, SHIFT: tl.constexpr
):
    """Return the float32 result for sums y [BN, BM] of the weights n of an expert (int64)."""
    global_scale = None if global_scales is None else global_scales + expert
    bias = None if biases is None else biases + expert * N
    return finish(y, x_global_scale, global_scale, bias, n, N, FMT, SHIFT)


@triton.jit
def tile_weights(tile, N, BN: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr):
    """Return the weights [BN] of a tile, of an expert that has N; N for those that are not."""
    i = tl.arange(0, BN)
    if GATE is None:
        n = tile * BN + i
    else:
        # Eight of gates and the eight of their factors are of one thread. Results follow the codes
        # of the next product (`arranged`) in groups of words.
        span: tl.constexpr = 8 * GROUP
        place = tile * (BN // 2) + i // 16 * 8 + i % 8
        column = place // span * span + place % GROUP * 8 + place % span // GROUP
        half = i // 8 % 2
        n = 2 * column + half if GATE.interleaved else column + half * (N // 2)
        n = tl.where(2 * column < N, n, N)
    return n


@triton.jit
def store_tile(
    y, out, pair, live, tile, n, N, BN: tl.constexpr, BM: tl.constexpr, GATE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store float32 results [BN, BM] of the weights n of a tile, for the `live` of pairs [BM]."""
    if GATE is None:
        columns = N
        place = n
    else:
        span: tl.constexpr = 8 * GROUP
        columns = (N // 2 + span - 1) // span * span
        place = tile * (BN // 2) + tl.arange(0, BN // 2)
        y = gated(tl.where((n < N)[:, None], y, 0.0), BN, BM, GATE)
    at = (pair * columns)[None, :] + place[:, None]
    inside = (place < columns)[:, None] & live[None, :]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


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
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply the row of one pair, FAN of which share one, and BN weights of its expert."""
    # M: rows of x. Tensor cores get a row BM times.
    wait(OVERLAP, RELEASES)
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    tile = tl.program_id(1)
    n = tile_weights(tile, N, BN, GATE, GROUP)
    m = tl.arange(0, BM)
    pairs = pair.to(tl.int64) + 0 * m
    if (expert < 0) | (expert >= E):
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pairs, m < 1, tile, n, N, BN, BM, GATE, GROUP)
        return
    row = (expert * N + tl.minimum(n, N - 1))[None, :, None]
    x_row = tl.arange(0, 1)[None, :, None]
    acc = exact_few_rows_sums(
        x + (pair // FAN).to(tl.int64) * K, words, scales, row, x_row, x_row < 1, M,
        K, FMT, TERMS, 1, BM, BN, WORDS, WARPS, WARPS,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pairs, m < 1, tile, n, N, BN, BM, GATE, GROUP)


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
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
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
    n = tile_weights(tl.program_id(1), N, BN, GATE, GROUP)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    if expert == E:
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pair, m < end, tl.program_id(1), n, N, BN, BM, GATE, GROUP)
        return
    row = (expert * N + tl.minimum(n, N - 1))[None, :, None]
    x_m = start + tl.arange(0, BM)[None, :, None]
    x_row = tl.load(order + x_m, mask=x_m < end, other=0) // FAN
    acc = exact_few_rows_sums(
        x, words, scales, row, x_row, x_m < end, M,
        K, FMT, TERMS, BM, BM, BN, WORDS, WARPS, WARPS,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pair, m < end, tl.program_id(1), n, N, BN, BM, GATE, GROUP)


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
    column,
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
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Multiply the rows from start to end, up to BM, and a tile of BN weights of an expert."""
    # expert: int64.
    n = tile_weights(column, N, BN, GATE, GROUP)
    row = (expert * N + tl.minimum(n, N - 1))[:, None]
    columns: tl.constexpr = padded_columns(K, WORDS)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    x_row, live = (pair // FAN)[None, :] * columns, (m < end)[None, :]
    acc = exact_rows_sums(
        x, words, scales, row, x_row, live, M, K, FMT, TERMS, BM, BN, WORDS, SMALL,
    )  # fmt: skip
    y = finish_of(acc, x_global_scale, global_scales, biases, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pair, m < end, column, n, N, BN, BM, GATE, GROUP)


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
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL: tl.constexpr,
    ROWS_STAY: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply a tile of up to BM rows of sorted x, or of REST, and BN weights of their expert."""
    wait(OVERLAP, RELEASES)
    tile = tiles + 3 * tl.program_id(1 if ROWS_STAY else 0)
    start, end = tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    expert = tl.load(tile).to(tl.int64)
    if expert == E:
        column = tl.program_id(0 if ROWS_STAY else 1)
        n = tile_weights(column, N, BN, GATE, GROUP)
        m = start + tl.arange(0, BM)
        pair = tl.load(order + m, mask=m < end, other=0)
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pair, m < end, column, n, N, BN, BM, GATE, GROUP)
        return
    column = tl.program_id(0 if ROWS_STAY else 1)
    # What is left of an expert is often few rows, for which a tile takes as long as for BM.
    if REST > 0:
        if end - start <= REST:
            rows_tile(
                x, words, scales, x_global_scale, global_scales, biases, out, order, expert,
                start, end, column, M, E, N, FAN, K, FMT, TERMS, REST, BN, WORDS, GATE, GROUP,
                SMALL,
            )  # fmt: skip
            return
    rows_tile(
        x, words, scales, x_global_scale, global_scales, biases, out, order, expert,
        start, end, column, M, E, N, FAN, K, FMT, TERMS, BM, BN, WORDS, GATE, GROUP, SMALL,
    )  # fmt: skip
