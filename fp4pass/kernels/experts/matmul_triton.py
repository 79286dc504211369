"""Multiply packed experts, and sort pairs of tokens and experts by expert (docs/kernels.md)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import DTYPES, LAUNCH, PTX, cdiv, overlapping, rounded, wait, wider
from ..linear.decode_triton import LARGE, arrange_words, offset, small_scales
from ..linear.matmul_triton import few_rows_sums, finish, padded_columns, rows_sums
from ..quantize.triton import activate

# Sums are decoded faster where the scales of a tile allow it, which is checked with them.


@triton.jit
def exact_few_rows_sums(
    x, words, scales, row, x_row, live_rows, M, K: tl.constexpr, FMT: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Return `few_rows_sums` over K, whose lanes own blocks."""
    SMALL: tl.constexpr = small_scales(FMT)
    RUN: tl.constexpr = FMT.block // 8
    acc, seen = few_rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0,
        K, FMT, TERMS, ROWS, BM, TILES, RUN, SHARE, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = few_rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, ROWS, BM, TILES, RUN, SHARE, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def exact_rows_sums(
    x, words, scales, row, x_row, live_rows, M, K: tl.constexpr, FMT: tl.constexpr,
    TERMS: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Return `rows_sums` over K, decoded faster only if SMALL."""
    acc, seen = rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0, K, FMT, TERMS, BM, TILES, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, BM, TILES, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def unknown_zero(most):
    """Return 0, of which the compiler knows only that it is a multiple of 16."""
    # Else what both loops compute would be kept in registers through the first one.
    if PTX:
        zero = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 31;", "=r,r", [most], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        zero = most >> 31
    return tl.multiple_of(zero, 16)


@triton.jit
def finish_of(y, x_global_scale, weight, expert, n, N, FMT: tl.constexpr, SHIFT: tl.constexpr):
    """Return the float32 result for sums y [BN, BM] of the weights n of an expert (int64)."""
    global_scale = None if weight.global_scale is None else weight.global_scale + expert
    bias = None if weight.bias is None else weight.bias + expert * N
    return finish(y, x_global_scale, global_scale, bias, n, N, FMT, SHIFT)


@triton.jit
def gated(y, BN: tl.constexpr, BM: tl.constexpr, GATE: tl.constexpr):
    """Return the gate [BN / 2, BM] of float32 sums, in eights of gates and of their factors."""
    y = tl.permute(tl.reshape(y, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(y, (BN // 2, BM, 2)))
    if GATE.limit is not None:
        gate = tl.minimum(gate, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -GATE.limit, propagate_nan=tl.PropagateNan.ALL)
    ACTIVATION: tl.constexpr = GATE.activation
    active = activate((gate * GATE.slope,), ACTIVATION, tl.float32)[0]
    return active * (1.0 / GATE.slope) * (up + GATE.shift)


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
    x, x_global_scale, weight, out, ids, M, E, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply the row of one pair, FAN of which share one, and weights of its expert."""
    # M: rows of x. Tensor cores get a row BM times.
    BN: tl.constexpr = TILES.n
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
        x + (pair // FAN).to(tl.int64) * K, weight.packed, weight.scale, row, x_row, x_row < 1, M,
        K, FMT, TERMS, 1, BM, TILES, TILES.warps,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, weight, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pairs, m < 1, tile, n, N, BN, BM, GATE, GROUP)


@triton.jit
def rows_tile(
    x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Multiply the rows from start to end, up to BM, and a tile of weights of an expert."""
    # expert: int64.
    n = tile_weights(column, N, TILES.n, GATE, GROUP)
    row = expert * N + tl.minimum(n, N - 1)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    if TILES.warps_share:
        x_m = start + tl.arange(0, BM)[None, :, None]
        x_row = tl.load(order + x_m, mask=x_m < end, other=0) // FAN
        acc = exact_few_rows_sums(
            x, weight.packed, weight.scale, row[None, :, None], x_row, x_m < end, M,
            K, FMT, TERMS, BM, BM, TILES, TILES.warps,
        )  # fmt: skip
        y = tl.sum(acc, axis=0)
    else:
        columns: tl.constexpr = padded_columns(K, TILES.words)
        x_row, live = (pair // FAN)[None, :] * columns, (m < end)[None, :]
        y = exact_rows_sums(
            x, weight.packed, weight.scale, row[:, None], x_row, live, M,
            K, FMT, TERMS, BM, TILES, SMALL,
        )  # fmt: skip
    y = finish_of(y, x_global_scale, weight, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pair, m < end, column, n, N, TILES.n, BM, GATE, GROUP)


@triton.jit(do_not_specialize=["M", "E"])
def experts_kernel(
    x, x_global_scale, weight, out, order, tiles, M, E, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows and weights of their expert; the warps share K, or x is sorted."""
    # order, tiles: what `route_kernel` wrote.
    BN: tl.constexpr = TILES.n
    BM: tl.constexpr = TILES.m
    wait(OVERLAP, RELEASES)
    tile = tiles + 3 * tl.program_id(1 if TILES.rows_stay else 0)
    start, end = tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    expert = tl.load(tile).to(tl.int64)
    if expert == E:
        column = tl.program_id(0 if TILES.rows_stay else 1)
        n = tile_weights(column, N, BN, GATE, GROUP)
        m = start + tl.arange(0, BM)
        pair = tl.load(order + m, mask=m < end, other=0)
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pair, m < end, column, n, N, BN, BM, GATE, GROUP)
        return
    column = tl.program_id(0 if TILES.rows_stay else 1)
    # The last rows of an expert are often few, and their tile takes as long as a full one.
    if TILES.rest > 0:
        if end - start <= TILES.rest:
            rows_tile(
                x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
                FAN, K, FMT, TERMS, TILES.rest, TILES, GATE, GROUP, SMALL,
            )  # fmt: skip
            return
    rows_tile(
        x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
        FAN, K, FMT, TERMS, BM, TILES, GATE, GROUP, SMALL,
    )  # fmt: skip


# Pairs to a step of a program, at most, and to one of its lanes.
_BLOCK, _WAYS = 16384, 8


def route(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of ids [T, k] by expert and cut them into tiles of up to `rows` of them.

    Args:
        ids: [T, k] int64, contiguous; those of no expert come last, as of expert E.
        experts: E.
        rows: a power of two.

    Returns:
        order: [T * k] int32, the pairs, those of an expert in their own order.
        tiles: [T * k // rows + E + 1, 3] int32, expert, start and end in `order`; of no more rows
            where start is not before end.
    """
    order, tiles, options = _table(ids, experts, rows)
    route_kernel[(experts + 1,)](ids, order, tiles, ids.numel(), experts, **options)
    return order, tiles


def route_and_arrange(
    ids: Tensor, experts: int, rows: int, x: Tensor, group: int, fmt: Format
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Do as `route`, and sort the columns of bfloat16 x [T, K] as `arranged`, in one launch."""
    order, tiles, options = _table(ids, experts, rows)
    words = cdiv(x.shape[1] // 8, group) * group
    out = x.new_empty((1, len(x), 8 * words))
    count = len(x) * words
    block = 32 * options["num_warps"]
    route_and_arrange_kernel[(experts + 1 + cdiv(count, block),)](
        ids, order, tiles, ids.numel(), experts, wider(x, torch.int64), out, count,
        K=x.shape[1], FMT=fmt, DTYPE=DTYPES[x.dtype], GROUP=group, WORDS=block, **options,
    )  # fmt: skip
    return (order, tiles), out


def _table(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return what a launch fills, and its options."""
    # A program counts the pairs of smaller experts itself, so that none waits for another. Tiles
    # of expert e begin at start // rows + e, which leaves room for those of all before.
    pairs = ids.numel()
    order = ids.new_empty(pairs, dtype=torch.int32)
    tiles = ids.new_empty((pairs // rows + experts + 1, 3), dtype=torch.int32)
    block = min(_BLOCK, max(1024, triton.next_power_of_2(pairs)))
    options = dict(
        ROWS=rows, BLOCK=block, WAYS=_WAYS, STEPS=min(2, cdiv(pairs, block)),
        num_warps=min(16, max(4, block // 256)), **LAUNCH, **overlapping(ids.device, True),
    )  # fmt: skip
    return order, tiles, options


@triton.jit(do_not_specialize=["S", "E"])
def route_kernel(
    ids, order, tiles, S, E, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Write where the pairs of one expert are, and its tiles."""
    wait(OVERLAP, RELEASES)
    route_expert(tl.program_id(0), ids, order, tiles, S, E, ROWS, BLOCK, WAYS, STEPS)


@triton.jit(do_not_specialize=["S", "E", "count"])
def route_and_arrange_kernel(
    ids, order, tiles, S, E, x, out, count,
    K: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Do as `route_kernel`, or sort the columns of some words of x."""
    wait(OVERLAP, RELEASES)
    program = tl.program_id(0)
    if program <= E:
        route_expert(program, ids, order, tiles, S, E, ROWS, BLOCK, WAYS, STEPS)
    else:
        i = (program - E - 1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
        arrange_words(x, None, out, i, count, K, FMT, DTYPE, 1, GROUP)


@triton.jit
def route_expert(
    expert, ids, order, tiles, S, E, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write where the pairs of an expert are, and its tiles. STEPS: 1, or 2 for any more."""
    # Pairs that follow each other are one lane's, so that few numbers are summed up.
    lane = tl.arange(0, BLOCK // WAYS)
    pair = lane[:, None] * WAYS + tl.arange(0, WAYS)[None, :]
    if STEPS == 1:
        chosen = expert_at(ids, pair, S, E)
        mine = (chosen == expert).to(tl.int32)
        first = tl.sum(tl.sum((chosen < expert).to(tl.int32), axis=1))
        count = write_order(order, mine, pair, first)
    else:
        before = tl.zeros((BLOCK // WAYS,), tl.int32)
        for start in range(0, S, BLOCK):
            chosen = expert_at(ids, start + pair, S, E)
            before += tl.sum((chosen < expert).to(tl.int32), axis=1)
        first = tl.sum(before)
        count = first - first
        for start in range(0, S, BLOCK):
            mine = (expert_at(ids, start + pair, S, E) == expert).to(tl.int32)
            count += write_order(order, mine, start + pair, first + count)
    end = first + count
    slot = first // ROWS + expert
    last = end // ROWS + expert + 1
    for start in range(slot, last, BLOCK // WAYS):
        at = first + (start - slot + lane) * ROWS
        tile = tiles + 3 * (start + lane)
        inside = start + lane < last
        tl.store(tile, tl.zeros((BLOCK // WAYS,), tl.int32) + expert, mask=inside)
        tl.store(tile + 1, at, mask=inside)
        tl.store(tile + 2, tl.minimum(at + ROWS, end), mask=inside)


@triton.jit
def write_order(order, mine, pair, first):
    """Write those of pairs that are an expert's from `first` on; return how many there are."""
    own = tl.sum(mine, axis=1)
    place = first + (tl.cumsum(own) - own)[:, None] + tl.cumsum(mine, axis=1) - mine
    tl.store(order + place, pair, mask=mine > 0)
    return tl.sum(own)


@triton.jit
def expert_at(ids, pair, S, E):
    """Return the experts of pairs as int32: E for those of none, E + 1 beyond the last pair."""
    chosen = tl.load(ids + pair, mask=pair < S, other=0)
    chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E).to(tl.int32)
    return tl.where(pair < S, chosen, E + 1)
