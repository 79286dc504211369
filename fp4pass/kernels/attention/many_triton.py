"""Attention of many queries on a GPU, past the keys that a mask hides (docs/kernels.md)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.tiles import LAUNCH, PTX, cdiv, overlapping, rounded, wait
from .reference import QUERIES
from .triton import is_read

# The keys of a mask that a program looks at together.
_LINE = 256

_LOG2E = tl.constexpr(1.4426950408889634)


def attention_ranges_triton(mask: Tensor) -> Tensor:
    """Find the keys that tiles of queries read (`attention_ranges_ref`)."""
    batch, heads, queries, size = mask.shape
    tiles = cdiv(queries, QUERIES)
    ranges = mask.new_empty((batch, heads, tiles, 4), dtype=torch.int32)
    attention_ranges_kernel[(tiles, batch * heads)](
        *(_plain(mask), ranges, *mask.stride(), heads, queries, size),
        ROWS=min(QUERIES, triton.next_power_of_2(queries)),
        TILE=QUERIES,
        LINE=_LINE,
        **overlapping(mask.device, False),
        num_warps=8,
        **LAUNCH,
    )
    return ranges


def attention_many_triton(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ranges: Tensor, scale: float,
    keys=128, warps=8, stages=2, masked_stages=1, tma=True, reverse=True, pairs_first=False, ws=False,
) -> Tensor:
    """Attend with many queries (`attention_many_ref`)."""
    batch, heads, queries, width = q.shape
    groups, size, out_width = v.shape[1:]
    out = q.new_empty((batch, queries, heads, out_width))
    d, e = (max(16, triton.next_power_of_2(n)) for n in (width, out_width))
    # Dimensions of one are read by all.
    strides = [s if n > 1 else 0 for n, s in zip(mask.shape[:3], mask.stride(), strict=False)]
    spans = [s if n > 1 else 0 for n, s in zip(ranges.shape[:3], ranges.stride(), strict=False)]
    tiles, pairs = cdiv(queries, QUERIES), batch * heads
    if tma:
        k = TensorDescriptor(k, list(k.shape), list(k.stride()), [1, 1, keys, d])
        v = TensorDescriptor(v, list(v.shape), list(v.stride()), [1, 1, keys, e])
        ks = vs = (0, 0, 0, 0)
    else:
        ks, vs = k.stride(), v.stride()
    attention_many_kernel[(pairs, tiles) if pairs_first else (tiles, pairs)](
        *(q, k, v, _plain(mask), ranges, out),
        *q.stride(), *ks, *vs,
        *(*strides, mask.stride(3), *spans),
        *(scale, heads, queries, heads // groups),
        WIDTH=width,
        OUT_WIDTH=out_width,
        D=d,
        E=e,
        QUERIES=QUERIES,
        KEYS=keys,
        STAGES=stages,
        MASKED_STAGES=masked_stages, TMA=tma, REVERSE=reverse, PAIRS_FIRST=pairs_first, WS=ws,
        **overlapping(q.device, False),
        num_warps=warps,
        **LAUNCH,
    )
    return out


def _plain(mask: Tensor) -> Tensor:
    """Return a mask as Triton reads it."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["m_b", "m_h", "heads", "queries", "size"])
def attention_ranges_kernel(
    mask,
    ranges,
    m_b,
    m_h,
    m_t,
    m_s,
    heads,
    queries,
    size,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Find the keys that a tile of queries reads, and the longest run that all of it read freely."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    row = (tile * TILE + tl.arange(0, ROWS)).to(tl.int64)
    wait(OVERLAP, RELEASES)
    mask += (pair // heads).to(tl.int64) * m_b + (pair % heads).to(tl.int64) * m_h
    there = (row < queries)[:, None]
    first, end = 2147483647, 0
    # The last key that is not free, the most free keys in a row, and where these end.
    closed, most, stop = -1, 0, 0
    for start in range(0, size, LINE):
        key = start + tl.arange(0, LINE)
        inside = key < size
        at = mask + row[:, None] * m_t + key.to(tl.int64)[None, :] * m_s
        value = tl.load(at, mask=there & inside[None, :], other=0)
        read = there & inside[None, :] & is_read(value)
        any_reads = tl.max(read.to(tl.int32), 0) > 0
        if mask.dtype.element_ty == tl.uint8:
            free = read | ~there
        else:
            free = (value == 0) | ~there
        all_free = (tl.min(free.to(tl.int32), 0) > 0) & inside
        first = tl.minimum(first, tl.min(tl.where(any_reads, key, 2147483647), 0))
        end = tl.maximum(end, tl.max(tl.where(any_reads, key + 1, 0), 0))
        before = tl.associative_scan(tl.where(all_free, -1, key), 0, _later)
        run = key - tl.maximum(before, closed)
        longest = tl.max(run, 0)
        ends = tl.min(tl.where(run == longest, key + 1, 2147483647), 0)
        stop = tl.where(longest > most, ends, stop)
        most = tl.maximum(most, longest)
        closed = tl.maximum(closed, tl.max(tl.where(all_free, -1, key), 0))
    first = tl.minimum(first, end)
    stop = tl.where(most > 0, stop, first)
    ranges += (pair * tl.num_programs(0) + tile).to(tl.int64) * 4
    tl.store(ranges, first)
    tl.store(ranges + 1, end)
    tl.store(ranges + 2, stop - most)
    tl.store(ranges + 3, stop)


@triton.jit
def load_rows(x, text, group, start, end, stride, x_d, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr):
    if TMA:
        tile = tl.reshape(x.load([text, group, start, 0]), (KEYS, D))
    else:
        key = start + tl.arange(0, KEYS)
        d = tl.arange(0, D)
        at = x + key.to(tl.int64)[:, None] * stride + d[None, :] * x_d
        if MASKED:
            tile = tl.load(at, mask=(key < end)[:, None] & (d < WIDTH)[None, :], other=0.0)
        elif WIDTH == D:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def attention_many_kernel(
    q,
    k,
    v,
    mask,
    ranges,
    out,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_h,
    k_s,
    k_d,
    v_b,
    v_h,
    v_s,
    v_d,
    m_b,
    m_h,
    m_t,
    m_s,
    r_b,
    r_h,
    r_t,
    scale,
    heads,
    queries,
    count,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    REVERSE: tl.constexpr,
    PAIRS_FIRST: tl.constexpr,
    WS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Attend with a tile of queries of a head."""
    if PAIRS_FIRST:
        tile, pair = tl.program_id(1), tl.program_id(0)
        tiles = tl.num_programs(1)
    else:
        tile, pair = tl.program_id(0), tl.program_id(1)
        tiles = tl.num_programs(0)
    # The last tiles of texts read the most.
    if REVERSE:
        tile = tiles - 1 - tile
    text, head = pair // heads, pair % heads
    group = head // count
    text64, head64 = text.to(tl.int64), head.to(tl.int64)
    row, d, e = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D), tl.arange(0, E)
    query = row.to(tl.int64)
    kept = row < queries
    if not TMA:
        k += text64 * k_b + group.to(tl.int64) * k_h
        v += text64 * v_b + group.to(tl.int64) * v_h
    mask += (text64 * m_b + head64 * m_h + query * m_t)[:, None]
    ranges += text64 * r_b + head64 * r_h + tile * r_t
    factor = scale * _LOG2E
    wait(OVERLAP, RELEASES)
    first, end = tl.load(ranges), tl.load(ranges + 1)
    free, stop = tl.load(ranges + 2), tl.load(ranges + 3)
    # Whole tiles of keys that are read freely; those before and behind them are masked.
    lead = tl.cdiv(free - first, KEYS)
    free = first + lead * KEYS
    stop = free + tl.maximum(stop - free, 0) // KEYS * KEYS
    x_at = (q + text64 * q_b + head64 * q_h + query * q_t)[:, None] + d[None, :] * q_d
    x = tl.load(x_at, mask=kept[:, None] & (d < WIDTH)[None, :], other=0.0)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    found = tl.zeros((QUERIES, E), tl.float32)
    for start in tl.range(free, stop, KEYS, num_stages=STAGES, warp_specialize=WS):
        key_tile = load_rows(k, text, group, start, end, k_s, k_d, WIDTH, D, KEYS, TMA, False)
        products = product(x, tl.trans(key_tile))
        highest = tl.maximum(top, tl.max(products, 1) * factor)
        weights = tl.exp2(tl.fma(products, tl.full((QUERIES, KEYS), 1.0, tl.float32) * factor, -highest[:, None] + tl.zeros((QUERIES, KEYS), tl.float32)))
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(weights, 1)
        found = found * shrink[:, None]
        value_tile = load_rows(v, text, group, start, end, v_s, v_d, OUT_WIDTH, E, KEYS, TMA, False)
        found = product(rounded(weights, value_tile.dtype), value_tile, found)
        top = highest
    for i in tl.range(0, lead + tl.cdiv(end - stop, KEYS), num_stages=MASKED_STAGES):
        start = tl.where(i < lead, first + i * KEYS, stop + (i - lead) * KEYS)
        key = start + tl.arange(0, KEYS)
        key_tile = load_rows(k, text, group, start, end, k_s, k_d, WIDTH, D, KEYS, TMA, True)
        there = (key < end)[None, :] & kept[:, None]
        bias = tl.load(mask + key.to(tl.int64)[None, :] * m_s, mask=there, other=0)
        logits = product(x, tl.trans(key_tile)) * factor
        if mask.dtype.element_ty != tl.uint8:
            logits += bias.to(tl.float32) * _LOG2E
        logits = tl.where(there & is_read(bias), logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(logits - finite[:, None]), tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        found = found * shrink[:, None]
        value_tile = load_rows(v, text, group, start, end, v_s, v_d, OUT_WIDTH, E, KEYS, TMA, True)
        found = product(rounded(weights, value_tile.dtype), value_tile, found)
        top = highest
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    at = out + ((text64 * queries + query) * heads + head64) * OUT_WIDTH
    written = kept[:, None] & (e < OUT_WIDTH)[None, :]
    tl.store(at[:, None] + e[None, :], rounded(found, out.dtype.element_ty), mask=written)


@triton.jit
def product(a, b, sums=None):
    """Return a b in float32, added to sums."""
    if not PTX:
        # The interpreter would multiply the bits of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums)
