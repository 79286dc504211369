"""Declare attention of few queries, alone and with the rotary embedding before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attention.naive import (
    COUNTERS,
    attention_ref,
    attention_span_ref,
    rotary_attention_ref,
)
from .registration import operator


def _output(q: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3]))


def _span(mask: Tensor) -> tuple[Tensor, Tensor]:
    sizes = (mask.shape[0], 2), (COUNTERS,)
    span, counters = (mask.new_empty(size, dtype=torch.int32) for size in sizes)
    return span, counters


attention_span = operator(
    attention_span_ref,
    triton="kernels.attention.span_triton:attention_span_triton",
    shapes=_span,
)
attention = operator(
    attention_ref,
    triton="kernels.attention.triton:attention_triton",
    shapes=_output,
)
rotary_attention = operator(
    rotary_attention_ref,
    triton="kernels.attention.triton:rotary_attention_triton",
    shapes=lambda q, v: q.new_empty((*q.shape[:3], v.shape[3])),
    mutates=("keys", "values"),
)
