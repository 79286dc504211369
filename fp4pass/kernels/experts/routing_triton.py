"""Sort pairs of tokens and experts by expert, and cut them into tiles, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import DTYPES, LAUNCH, cdiv, overlapping, wait, wider
from ..linear.decode_triton import arrange_words

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
