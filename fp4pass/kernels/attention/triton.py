"""Attend with few queries on a GPU, the keys split over programs (docs/kernels.md).

New tokens are normalized, rotated and written into the cache in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.elements import Record
from ..common.tiles import PTX, cdiv, launch, rounded, wait
from ..quantize.triton import narrow
from .naive import COUNTERS, Cache, NewTokens

# Keys of a tile, bytes of one of its two tensors, and tiles on their way, fewer for many rows and
# for short caches.
_KEYS, _TILE, _STAGES = (16, 32, 64), 1 << 14, (3, 2)

# Programs that read a long cache best on a large GPU, and warps of each.
_PROGRAMS, _WARPS = 264, 4

# Parts of a sum, and the numbers of all of them: of a long cache, and of one with few tiles.
_SPLITS, _PARTS = (64, 16), (1 << 17, 1 << 15)

# Numbers of parts that a warp holds while it adds them.
_HELD = 1 << 11

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, repr=False)
class Sizes(Record):
    """Sizes of a program, which kernels read as SIZES; powers of two but for the widths."""

    __hash__ = Record.__hash__

    width: int  # columns of keys and of values, and what holds them
    out_width: int
    d: int
    e: int
    rows: int  # of queries of all heads in a group, and those that are there
    kept: int
    keys: int  # at a time, of one of so many parts of the keys
    splits: int
    group: int  # parts that are added at a time, of so many rows
    chunk: int
    tokens: int  # new ones of each text, 0 for none
    stages: int  # tiles that are under way at a time


class Strides(NamedTuple):
    """Elements between neighbours: of q in texts, heads, queries and columns, and so on."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    keys: int  # of the mask
    # Of new k and v in texts, tokens and heads; of cos and sin in texts, 0 for one of all, and
    # tokens; of places.
    new: tuple[int, ...] | None


def attention_triton(q: Tensor, cache: Cache) -> Tensor:
    """Attend with few queries (`attention_ref`), in one launch."""
    return attend(q, None, cache)


def rotary_attention_triton(q: Tensor, new: NewTokens, cache: Cache) -> Tensor:
    """Write new tokens into a cache and attend (`rotary_attention_ref`), in one launch."""
    k, v, cos, sin, q = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (new.k, new.v, new.cos, new.sin, q)
    )
    weights = (None if x is None else x.contiguous() for x in (new.q_weight, new.k_weight))
    new = NewTokens(k, v, *weights, new.eps, cos, sin, new.places.contiguous())
    return attend(q.transpose(1, 2), new, cache)


def attend(q: Tensor, new: NewTokens | None, cache: Cache) -> Tensor:
    """Attend with few queries; of new tokens, turn the queries and write keys and values before."""
    # The last program of a head of keys to finish adds the parts. `counters` tell which that is:
    # `attention_span` has zeroed them, and that program leaves zeros. So they need no launch of
    # their own, and belong to a mask of one graph. Calls that share them must follow each other.
    keys, values, mask, span = cache[:4]
    batch, heads, queries, width = q.shape
    groups, size, out_width = values.shape[1:]
    count, pairs = heads // groups, batch * groups
    tokens = 0 if new is None else triton.next_power_of_2(queries)
    sizes = sizes_of(size, pairs, count * queries, (width, out_width), q.element_size(), tokens)
    out = q.new_empty((batch, queries, heads, out_width))
    sums = tops = None
    if sizes.splits > 1:
        parts = (pairs, sizes.splits, sizes.kept)
        sums = q.new_empty((*parts, out_width), dtype=torch.float32)
        tops = q.new_empty((2, *parts), dtype=torch.float32)
    # Dimensions of one are read by all.
    of_mask = [s if n > 1 else 0 for n, s in zip(mask.shape[:3], mask.stride(), strict=False)]
    of_new = None
    if new is not None:
        tables = ((x.stride(0) if len(x) > 1 else 0, x.stride(1)) for x in (new.cos, new.sin))
        rows = (*new.k.stride()[:3], *new.v.stride()[:3])
        of_new = (*rows, *(stride for each in tables for stride in each), new.places.ndim)
    strides = Strides(q.stride(), keys.stride(), values.stride(), mask.stride(3), of_new)
    attention_kernel[(sizes.splits, pairs)](
        q, cache._replace(mask=plain_mask(mask)), new, sums, tops, out, strides,
        *of_mask, 2 if len(span) > 1 else 0, size, groups, queries, count,
        SIZES=sizes, num_warps=_WARPS, **launch(q.device, True),
    )  # fmt: skip
    return out


def sizes_of(
    size: int, pairs: int, rows: int, widths: tuple[int, int], itemsize: int, tokens: int
) -> Sizes:
    """Return the sizes of programs for `rows` of queries that read one of `pairs` of caches."""
    kept, columns = triton.next_power_of_2(rows), triton.next_power_of_2(widths[1])
    row_bytes = max(widths) * itemsize
    keys = next((n for n in _KEYS[::-1] if n * row_bytes <= _TILE), _KEYS[0])
    few = cdiv(size, keys) * pairs <= 2 * _PROGRAMS
    if _PROGRAMS < 2 * pairs:
        keys = min(keys, 32)
    # One program adds all parts of a cache, which takes long beside the reading of a short one.
    tiles = triton.next_power_of_2(cdiv(size, keys))
    most = (_SPLITS[few], tiles, _PROGRAMS // pairs, _PARTS[few] // (kept * columns))
    splits = 1 << (max(1, min(most)).bit_length() - 1)
    splits = splits if pairs <= COUNTERS else 1
    columns = max(16, columns)
    held = _HELD * _WARPS // columns
    # A warp has rows of its own.
    group = max(1, min(splits, held // min(kept, _WARPS)))
    return Sizes(
        *widths, max(16, triton.next_power_of_2(widths[0])), columns, max(16, kept), kept, keys,
        splits, group, max(1, min(kept, held // group)), tokens, _STAGES[few or kept > 16],
    )  # fmt: skip


_LOOSE = ["m_b", "m_h", "m_t", "span_stride", "size", "groups", "queries", "count"]


@triton.jit(do_not_specialize=_LOOSE)
def attention_kernel(
    q, cache, new, sums, tops, out, strides,
    m_b, m_h, m_t, span_stride, size, groups, queries, count,
    SIZES: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Attend with all heads that read one head of keys, to a part of these."""
    # new: None, or tokens of each text, whose keys and values are written first.
    # sums: [pairs, splits, kept, out_width], not divided; tops: [2, pairs, splits, kept], the
    # largest logit times log2(e) and the sum of weights.
    WIDTH: tl.constexpr = SIZES.width
    OUT_WIDTH: tl.constexpr = SIZES.out_width
    ROWS: tl.constexpr = SIZES.rows
    E: tl.constexpr = SIZES.e
    KEYS: tl.constexpr = SIZES.keys
    split, pair = tl.program_id(0), tl.program_id(1)
    text, group = (pair // groups).to(tl.int64), pair % groups
    row, d, e = tl.arange(0, ROWS), tl.arange(0, SIZES.d), tl.arange(0, E)
    head, query = (group * count + row // queries).to(tl.int64), (row % queries).to(tl.int64)
    kept = row < count * queries
    # By place: Triton's tuples have values of their own.
    keys, values, mask, span, counters, scale = cache
    span += text * span_stride
    k = keys + text * strides.k[0] + group.to(tl.int64) * strides.k[1]
    v = values + text * strides.v[0] + group.to(tl.int64) * strides.v[1]
    if OVERLAP:
        # A span that is not written yet costs time, and nothing else.
        begin, end, _ = part_of(span, split, size, SIZES)
        fetch(k, strides.k[2], strides.k[3], begin, end, WIDTH, SIZES.d, KEYS * 2)
        fetch(v, strides.v[2], strides.v[3], begin, end, OUT_WIDTH, E, KEYS * 2)
    wait(OVERLAP, RELEASES)
    x_at = q + text * strides.q[0] + head * strides.q[1] + query * strides.q[2]
    if SIZES.tokens == 0:
        there = kept[:, None] & (d < WIDTH)[None, :]
        x = tl.load(x_at[:, None] + d[None, :] * strides.q[3], mask=there, other=0.0)
    else:
        x = turned(x_at, kept, new.q_weight, text, query, new, strides, SIZES)
    begin, end, parts = part_of(span, split, size, SIZES)
    if split >= parts:
        return
    if SIZES.tokens > 0:
        token = tl.arange(0, SIZES.tokens)
        step = strides.new[10]
        slot = tl.load(new.places + token * step, mask=token < queries, other=0)
        slot += token * (1 - step)
        # Each program writes what it reads; the first and the last also what nobody reads.
        low = tl.where(split == 0, 0, begin)
        high = tl.where(split == parts - 1, size, end)
        mine = (slot >= low) & (slot < high) & (token < queries)
        if tl.max(mine.to(tl.int32), 0) > 0:
            rows = (k + slot * strides.k[2], v + slot * strides.v[2])
            write_new(rows, mine, text, group, token, new, strides, SIZES)
            tl.debug_barrier()
    mask += (text * m_b + head * m_h + query * m_t)[:, None]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, E), tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=SIZES.stages):
        key = start + tl.arange(0, KEYS)
        inside, place = key < end, key.to(tl.int64)
        key_at = k + place[None, :] * strides.k[2] + d[:, None] * strides.k[3]
        key_tile = tl.load(key_at, mask=inside[None, :] & (d < WIDTH)[:, None], other=0.0)
        value_at = v + place[:, None] * strides.v[2] + e[None, :] * strides.v[3]
        value_tile = tl.load(value_at, mask=inside[:, None] & (e < OUT_WIDTH)[None, :], other=0.0)
        read = inside[None, :] & kept[:, None]
        bias = tl.load(mask + place[None, :] * strides.keys, mask=read, other=0)
        logits = product(x, key_tile) * (scale * _LOG2E)
        if mask.dtype.element_ty != tl.uint8:
            logits += bias.to(tl.float32) * _LOG2E
        logits = tl.where(read & is_read(bias), logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(logits - finite[:, None]), tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        weighted = product(rounded(weights, value_tile.dtype), value_tile)
        found = found * shrink[:, None] + weighted
        top = highest
    there = kept[:, None] & (e < OUT_WIDTH)[None, :]
    # [T, heads, E] of a text, and where a row is in it.
    out += text * queries * (groups * count) * OUT_WIDTH
    if SIZES.splits == 1:
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        at = out + (query * (groups * count) + head)[:, None] * OUT_WIDTH + e[None, :]
        tl.store(at, rounded(found, out.dtype.element_ty), mask=there)
    else:
        first = pair.to(tl.int64) * (SIZES.splits * SIZES.kept)
        sums, tops, totals = sums + first * OUT_WIDTH, tops + first, tops + first
        totals += tl.num_programs(1).to(tl.int64) * (SIZES.splits * SIZES.kept)
        at = split * SIZES.kept + row
        tl.store(tops + at, top, mask=kept)
        tl.store(totals + at, total, mask=kept)
        tl.store(sums + at[:, None] * OUT_WIDTH + e[None, :], found, mask=there)
        # The last to finish adds all parts, in their order; the atomic orders the memory.
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1) == parts - 1:
            tl.store(counters + pair, 0)
            for start in range(0, count * queries, SIZES.chunk):
                add_parts(
                    sums, tops, totals, out, start, parts, group, groups, queries, count, SIZES
                )


@triton.jit
def part_of(span, split, size, SIZES: tl.constexpr):
    """Return the first key of a part, the one behind its last, and how many parts there are."""
    # Not from L1, which may have them from before they were written.
    begin = tl.minimum(tl.maximum(tl.load(span, cache_modifier=".cg"), 0), size)
    end = tl.minimum(tl.maximum(tl.load(span + 1, cache_modifier=".cg"), begin), size)
    share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, SIZES.keys), SIZES.splits), 1) * SIZES.keys
    parts = tl.maximum(tl.cdiv(end - begin, share), 1)
    begin += split * share
    return begin, tl.minimum(begin + share, end), parts


@triton.jit
def fetch(
    rows, row_stride, stride, begin, end, WIDTH: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr
):
    """Have the first COUNT rows of a part of a cache come into L2, a line of 128 bytes each."""
    LINE: tl.constexpr = min(D, 1024 // rows.dtype.element_ty.primitive_bitwidth)
    row, column = begin + tl.arange(0, COUNT), tl.arange(0, D // LINE) * LINE
    at = rows + row.to(tl.int64)[:, None] * row_stride + column[None, :] * stride
    # Beyond the part, the first row of all.
    inside = (row < end)[:, None] & (column < WIDTH)[None, :]
    at = tl.where(inside, at, rows)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_parts(
    sums, tops, totals, out, start, parts, group, groups, queries, count, SIZES: tl.constexpr
):
    """Add the parts of some rows, a few at a time, and divide by the sum of their weights."""
    OUT_WIDTH: tl.constexpr = SIZES.out_width
    CHUNK: tl.constexpr = SIZES.chunk
    E: tl.constexpr = SIZES.e
    row, e = start + tl.arange(0, CHUNK), tl.arange(0, E)
    kept = row < count * queries
    highest = tl.full((CHUNK,), float("-inf"), tl.float32)
    whole = tl.zeros((CHUNK,), tl.float32)
    found = tl.zeros((CHUNK, E), tl.float32)
    for first in range(0, parts, SIZES.group):
        # Parts in the second dimension: a thread has those of a number, and adds them alone.
        split = first + tl.arange(0, SIZES.group)
        there = kept[:, None] & (split < parts)[None, :]
        at = split[None, :] * SIZES.kept + row[:, None]
        # Other programs' numbers are in L2.
        top = tl.load(tops + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")
        at = sums + at[:, :, None] * OUT_WIDTH + e
        columns = there[:, :, None] & (e < OUT_WIDTH)[None, None, :]
        part = tl.load(at, mask=columns, other=0.0, cache_modifier=".cg")
        before, highest = highest, tl.maximum(highest, tl.max(top, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weight, shrink = tl.exp2(top - finite[:, None]), tl.exp2(before - finite)
        whole = whole * shrink + tl.sum(total * weight, 1)
        found = found * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
    found = found / tl.where(whole > 0, whole, 1.0)[:, None]
    head, query = group * count + row // queries, row % queries
    at = out + (query * (groups * count) + head)[:, None] * OUT_WIDTH + e[None, :]
    columns = kept[:, None] & (e < OUT_WIDTH)[None, :]
    tl.store(at, rounded(found, out.dtype.element_ty), mask=columns)


@triton.jit
def product(a, b):
    """Return a b in float32."""
    if not PTX:
        # The interpreter would multiply the bits of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def write_new(rows, kept, text, group, token, new, strides, SIZES: tl.constexpr):
    """Write a head of keys and values of some tokens to where their rows begin."""
    keys, values = rows
    d, e = tl.arange(0, SIZES.d), tl.arange(0, SIZES.e)
    step = strides.new
    at = new.k + text * step[0] + token * step[1] + group * step[2]
    row = turned(at, kept, new.k_weight, text, token, new, strides, SIZES)
    there = kept[:, None] & (d < SIZES.width)[None, :]
    tl.store(keys[:, None] + d[None, :] * strides.k[3], row, mask=there)
    at = new.v + text * step[3] + token * step[4] + group * step[5]
    there = kept[:, None] & (e < SIZES.out_width)[None, :]
    row = tl.load(at[:, None] + e[None, :], mask=there)
    tl.store(values[:, None] + e[None, :] * strides.v[3], row, mask=there)


@triton.jit
def turned(at, kept, weight, text, token, new, strides, SIZES: tl.constexpr):
    """Return heads of tokens, normed if there is a weight, and rotated."""
    # Pairs are columns j and j + WIDTH / 2. Rounds where eager PyTorch does.
    WIDTH: tl.constexpr = SIZES.width
    d = tl.arange(0, SIZES.d)
    other = (d + WIDTH // 2) % WIDTH
    inside = d < WIDTH
    there = kept[:, None] & inside[None, :]
    DTYPE: tl.constexpr = at.dtype.element_ty
    cos = new.cos + text * strides.new[6] + token * strides.new[7]
    sin = new.sin + text * strides.new[8] + token * strides.new[9]
    x = tl.load(at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.load(at[:, None] + other[None, :], mask=there, other=0.0).to(tl.float32)
    cos = tl.load(cos[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sin[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    if weight is not None:
        of_x = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        of_y = tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
        mean = tl.math.div_rn(tl.sum(x * x, 1), WIDTH * 1.0)
        factor = tl.math.rsqrt(mean + new.eps)[:, None]
        x = narrow(narrow(x * factor, DTYPE) * of_x[None, :], DTYPE)
        y = narrow(narrow(y * factor, DTYPE) * of_y[None, :], DTYPE)
    y = tl.where((d < WIDTH // 2)[None, :], -y, y)
    return rounded(narrow(x * cos, DTYPE) + narrow(y * sin, DTYPE), DTYPE)


# The keys of a mask that a program looks at together.
_LINE = 2048


def attention_span_triton(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the keys that a mask lets any query read (`attention_span_ref`)."""
    batch, heads, queries, size = mask.shape
    span = mask.new_empty((batch, 2), dtype=torch.int32)
    counters = mask.new_empty(COUNTERS, dtype=torch.int32)
    attention_span_kernel[(batch,)](
        plain_mask(mask), span, counters, *mask.stride(), heads, queries, size, COUNTERS=COUNTERS,
        LINE=_LINE, num_warps=8, **launch(mask.device),
    )  # fmt: skip
    return span, counters


def plain_mask(mask: Tensor) -> Tensor:
    """Return a mask as Triton reads it."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


@triton.jit(do_not_specialize=["m_b", "m_h", "m_t", "heads", "queries", "size"])
def attention_span_kernel(
    mask, span, counters, m_b, m_h, m_t, m_s, heads, queries, size,
    COUNTERS: tl.constexpr, LINE: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Find the first key that a text reads, and the one behind the last; zero the counters."""
    text = tl.program_id(0)
    wait(OVERLAP, RELEASES)
    if text == 0:
        for start in tl.static_range(0, COUNTERS, LINE):
            counter = start + tl.arange(0, LINE)
            tl.store(counters + counter, tl.zeros((LINE,), tl.int32), mask=counter < COUNTERS)
    mask += text.to(tl.int64) * m_b
    first = tl.full((LINE,), 2147483647, tl.int32)
    end = tl.zeros((LINE,), tl.int32)
    for row in range(heads * queries):
        line = mask + (row // queries).to(tl.int64) * m_h + (row % queries).to(tl.int64) * m_t
        for start in range(0, size, LINE):
            key = start + tl.arange(0, LINE)
            value = tl.load(line + key.to(tl.int64) * m_s, mask=key < size, other=0)
            read = (key < size) & is_read(value)
            first = tl.minimum(first, tl.where(read, key, 2147483647))
            end = tl.maximum(end, tl.where(read, key + 1, 0))
    last = tl.max(end, 0)
    tl.store(span + text * 2, tl.minimum(tl.min(first, 0), last))
    tl.store(span + text * 2 + 1, last)


@triton.jit
def is_read(value):
    """Return whether a mask lets a key be read: bytes of a bool, or what is added."""
    if value.dtype == tl.uint8:
        read = value != 0
    else:
        read = value.to(tl.float32) != float("-inf")
    return read
