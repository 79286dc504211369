"""Attend with few queries on a GPU, the keys split over programs (docs/kernels.md)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, PTX, cdiv, overlapping, rounded, wait

# Keys of a tile, bytes of one of its two tensors, and tiles on their way, fewer for many rows.
_KEYS, _TILE, _STAGES = (16, 32, 64), 1 << 14, (3, 2)

# Programs that read a long cache best on a large GPU. Where there are less than twice as many
# tiles, programs only have to finish their parts soon.
_PROGRAMS = 264

# Parts of a sum, and numbers that a program of the second launch holds.
_SPLITS, _HELD = 64, 1 << 13

# The keys of a mask that a program looks at together.
_LINE = 2048

_LOG2E = tl.constexpr(1.4426950408889634)


def attention_span_triton(mask: Tensor) -> Tensor:
    """Find the keys that a mask lets any query read (`attention_span_ref`)."""
    batch, heads, queries, size = mask.shape
    span = mask.new_empty((batch, 2), dtype=torch.int32)
    attention_span_kernel[(batch,)](
        _plain(mask), span, *mask.stride(), heads, queries, size, LINE=_LINE, num_warps=8,
        **overlapping(mask.device, False), **LAUNCH,
    )  # fmt: skip
    return span


def attention_triton(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, span: Tensor, scale: float
) -> Tensor:
    """Attend with few queries (`attention_ref`)."""
    batch, heads, queries, width = q.shape
    groups, size, out_width = v.shape[1:]
    count, pairs = heads // groups, batch * groups
    rows = triton.next_power_of_2(count * queries)
    keys, splits = _tiles(size, pairs, max(width, out_width) * q.element_size())
    out = q.new_empty((batch, queries, heads, out_width))
    sums = tops = None
    if splits > 1:
        sums = q.new_empty((pairs, splits, rows, out_width), dtype=torch.float32)
        tops = q.new_empty((2, pairs, splits, rows), dtype=torch.float32)
    # Dimensions of one are read by all.
    strides = [s if n > 1 else 0 for n, s in zip(mask.shape[:3], mask.stride(), strict=False)]
    sizes = (groups, queries, count, splits)
    columns = triton.next_power_of_2(out_width)
    attention_kernel[(splits, pairs)](
        q, k, v, _plain(mask), span, sums, tops, out, *q.stride(), *k.stride(), *v.stride(),
        *strides, mask.stride(3), 2 if len(span) > 1 else 0, scale, *sizes,
        WIDTH=width, OUT_WIDTH=out_width, D=max(16, triton.next_power_of_2(width)),
        E=max(16, columns), ROWS=max(16, rows), KEPT=rows, KEYS=keys, STAGES=_STAGES[rows > 16],
        # The second launch waits for this one.
        num_warps=4, **overlapping(q.device, releases=splits > 1), **LAUNCH,
    )  # fmt: skip
    if splits > 1:
        parts = triton.next_power_of_2(splits)
        chunk = max(1, min(rows, _HELD // (parts * columns)))
        add_splits_kernel[(pairs, rows // chunk)](
            sums, tops, out, *sizes, OUT_WIDTH=out_width, E=columns, KEPT=rows, CHUNK=chunk,
            SPLITS=parts, num_warps=4, **overlapping(q.device, False), **LAUNCH,
        )  # fmt: skip
    return out


def _tiles(size: int, pairs: int, row_bytes: int) -> tuple[int, int]:
    """Return the keys of a tile and into how many parts they are split."""
    keys = next((n for n in _KEYS[::-1] if n * row_bytes <= _TILE), _KEYS[0])
    few = cdiv(size, keys) * pairs <= 2 * _PROGRAMS
    if few or _PROGRAMS < 2 * pairs:
        keys = min(keys, 32)
    programs = 2 * _PROGRAMS if few else _PROGRAMS
    splits = max(1, min(_SPLITS, cdiv(size, keys), programs // pairs))
    return keys, 1 << (splits.bit_length() - 1)


def _plain(mask: Tensor) -> Tensor:
    """Return a mask as Triton reads it."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


@triton.jit(do_not_specialize=["m_b", "m_h", "m_t", "heads", "queries", "size"])
def attention_span_kernel(
    mask, span, m_b, m_h, m_t, m_s, heads, queries, size,
    LINE: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Find the first key that a text reads, and the one behind the last."""
    text = tl.program_id(0)
    wait(OVERLAP, RELEASES)
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


_LOOSE = ["m_b", "m_h", "m_t", "span_stride", "groups", "queries", "count", "splits"]


@triton.jit(do_not_specialize=_LOOSE)
def attention_kernel(
    q, k, v, mask, span, sums, tops, out,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_t, m_s, span_stride,
    scale, groups, queries, count, splits,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEPT: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Attend with all heads that read one head of keys, to a part of these."""
    # sums: [pairs, splits, KEPT, OUT_WIDTH], not divided; tops: [2, pairs, splits, KEPT], the
    # largest logit times log2(e) and the sum of weights.
    split, pair = tl.program_id(0), tl.program_id(1)
    text, group = (pair // groups).to(tl.int64), pair % groups
    row, d, e = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, E)
    head, query = (group * count + row // queries).to(tl.int64), (row % queries).to(tl.int64)
    kept = row < count * queries
    wait(OVERLAP, RELEASES)
    begin, end = tl.load(span + text * span_stride), tl.load(span + text * span_stride + 1)
    x_at = (q + text * q_b + head * q_h + query * q_t)[:, None] + d[None, :] * q_d
    x = tl.load(x_at, mask=kept[:, None] & (d < WIDTH)[None, :], other=0.0)
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
    begin += split * share
    end = tl.minimum(begin + share, end)
    k += text * k_b + group.to(tl.int64) * k_h
    v += text * v_b + group.to(tl.int64) * v_h
    mask += (text * m_b + head * m_h + query * m_t)[:, None]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, E), tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        inside, place = key < end, key.to(tl.int64)
        key_at = k + place[None, :] * k_s + d[:, None] * k_d
        key_tile = tl.load(key_at, mask=inside[None, :] & (d < WIDTH)[:, None], other=0.0)
        value_at = v + place[:, None] * v_s + e[None, :] * v_d
        value_tile = tl.load(value_at, mask=inside[:, None] & (e < OUT_WIDTH)[None, :], other=0.0)
        read = inside[None, :] & kept[:, None]
        bias = tl.load(mask + place[None, :] * m_s, mask=read, other=0)
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
    if sums is None:
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        at = out + ((text * queries + query) * (groups * count) + head) * OUT_WIDTH
        tl.store(at[:, None] + e[None, :], rounded(found, out.dtype.element_ty), mask=there)
    else:
        place = (pair * splits + split).to(tl.int64) * KEPT + row
        size = tl.num_programs(1).to(tl.int64) * splits * KEPT
        tl.store(tops + place, top, mask=kept)
        tl.store(tops + size + place, total, mask=kept)
        tl.store(sums + place[:, None] * OUT_WIDTH + e[None, :], found, mask=there)


@triton.jit(do_not_specialize=["groups", "queries", "count", "splits"])
def add_splits_kernel(
    sums, tops, out, groups, queries, count, splits,
    OUT_WIDTH: tl.constexpr, E: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Add the parts of CHUNK rows of attention, and divide by the sum of their weights."""
    pair = tl.program_id(0)
    row = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    split, e = tl.arange(0, SPLITS), tl.arange(0, E)
    kept = row < count * queries
    there = (split < splits)[:, None] & kept[None, :]
    place = (pair * splits + split[:, None]).to(tl.int64) * KEPT + row[None, :]
    size = tl.num_programs(0).to(tl.int64) * splits * KEPT
    wait(OVERLAP, RELEASES)
    top = tl.load(tops + place, mask=there, other=float("-inf"))
    total = tl.load(tops + size + place, mask=there, other=0.0)
    columns = there[:, :, None] & (e < OUT_WIDTH)[None, None, :]
    parts = tl.load(sums + place[:, :, None] * OUT_WIDTH + e, mask=columns, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
    whole = tl.sum(total * weight, 0)
    found = tl.sum(parts * weight[:, :, None], 0) / tl.where(whole > 0, whole, 1.0)[:, None]
    text, group = (pair // groups).to(tl.int64), pair % groups
    head, query = group * count + row // queries, row % queries
    at = out + ((text * queries + query) * (groups * count) + head) * OUT_WIDTH
    columns = kept[:, None] & (e < OUT_WIDTH)[None, :]
    tl.store(at[:, None] + e[None, :], rounded(found, out.dtype.element_ty), mask=columns)


@triton.jit
def product(a, b):
    """Return a b in float32."""
    if not PTX:
        # The interpreter would multiply the bits of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
