"""Declare the operators that reduce a tensor over processes."""

from __future__ import annotations

from ..kernels.reduce.naive import all_reduce_norm_ref, all_reduce_ref
from .registration import operator

all_reduce = operator(all_reduce_ref, shapes=lambda x: x.new_empty(x.shape))
all_reduce_norm = operator(
    all_reduce_norm_ref,
    shapes=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
