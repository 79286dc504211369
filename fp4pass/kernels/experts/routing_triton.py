"""Pairs of tokens and experts in the order of the experts, in tiles of rows, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, overlapping, wait

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
    # A program counts the pairs of smaller experts itself, so that none waits for another. Tiles
    # of expert e begin at start // rows + e, which leaves room for those of all before.
    pairs = ids.numel()
    order = ids.new_empty(pairs, dtype=torch.int32)
    tiles = ids.new_empty((pairs // rows + experts + 1, 3), dtype=torch.int32)
    block = min(_BLOCK, max(1024, triton.next_power_of_2(pairs)))
    route_kernel[(experts + 1,)](
        ids, order, tiles, pairs, experts, ROWS=rows, BLOCK=block, WAYS=_WAYS,
        num_warps=min(16, max(1, block // 256)),
        **LAUNCH, **overlapping(ids.device, True),
    )  # fmt: skip
    return order, tiles


@triton.jit(do_not_specialize=["S", "E"])
def route_kernel(
    ids,
    order,
    tiles,
    S,
    E,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Write where the pairs of one expert are, and its tiles."""
    wait(OVERLAP, RELEASES)
    expert = tl.program_id(0)
    # Pairs that follow each other are one lane's, so that few numbers are summed up.
    lane = tl.arange(0, BLOCK // WAYS)
    before = tl.zeros((BLOCK // WAYS,), tl.int32)
    own = tl.zeros((BLOCK // WAYS,), tl.int32)
    for start in range(0, S, BLOCK):
        for j in tl.static_range(WAYS):
            chosen = expert_at(ids, start + lane * WAYS + j, S, E)
            before += (chosen < expert).to(tl.int32)
            own += (chosen == expert).to(tl.int32)
    first, count = tl.sum(before), tl.sum(own)
    at = first
    for start in range(0, S, BLOCK):
        mine = ()
        own = tl.zeros((BLOCK // WAYS,), tl.int32)
        for j in tl.static_range(WAYS):
            chosen = expert_at(ids, start + lane * WAYS + j, S, E)
            mine = mine + ((chosen == expert).to(tl.int32),)
            own += mine[j]
        place = at + tl.cumsum(own) - own
        for j in tl.static_range(WAYS):
            tl.store(order + place, start + lane * WAYS + j, mask=mine[j] > 0)
            place += mine[j]
        at += tl.sum(own)
    slot = first // ROWS + expert
    last = (first + count) // ROWS + expert + 1
    for start in range(slot, last, BLOCK // WAYS):
        at_row = first + (start - slot + lane) * ROWS
        tile = tiles + 3 * (start + lane)
        inside = start + lane < last
        tl.store(tile, tl.zeros((BLOCK // WAYS,), tl.int32) + expert, mask=inside)
        tl.store(tile + 1, at_row, mask=inside)
        tl.store(tile + 2, tl.minimum(at_row + ROWS, first + count), mask=inside)


@triton.jit
def expert_at(ids, pair, S, E):
    """Return the experts of pairs as int32: E for those of none, E + 1 beyond the last pair."""
    chosen = tl.load(ids + pair, mask=pair < S, other=0)
    chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E).to(tl.int32)
    return tl.where(pair < S, chosen, E + 1)
