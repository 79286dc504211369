"""Declare attention of few queries, and the rotary write before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attention.naive import attention_ref, attention_span_ref, rotary_write_ref
from .registration import operator


def _output(q: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3]))


attention_span = operator(
    attention_span_ref,
    triton="kernels.attention.triton:attention_span_triton",
    shapes=lambda mask: mask.new_empty((mask.shape[0], 2), dtype=torch.int32),
)
attention = operator(
    attention_ref,
    triton="kernels.attention.triton:attention_triton",
    shapes=_output,
)
rotary_write = operator(
    rotary_write_ref,
    triton="kernels.attention.rotary_triton:rotary_write_triton",
    shapes=lambda q: q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])),
    mutates=("keys", "values"),
)
