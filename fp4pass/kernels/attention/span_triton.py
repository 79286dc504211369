"""Find the keys that a mask lets queries read, and zero the counters of attention, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, overlapping, wait
from .naive import COUNTERS

# The keys of a mask that a program looks at together.
_LINE = 2048


def attention_span_triton(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the keys that a mask lets any query read (`attention_span_ref`)."""
    batch, heads, queries, size = mask.shape
    span = mask.new_empty((batch, 2), dtype=torch.int32)
    counters = mask.new_empty(COUNTERS, dtype=torch.int32)
    attention_span_kernel[(batch,)](
        plain_mask(mask), span, counters, *mask.stride(), heads, queries, size, COUNTERS=COUNTERS,
        LINE=_LINE, num_warps=8, **overlapping(mask.device, False), **LAUNCH,
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
