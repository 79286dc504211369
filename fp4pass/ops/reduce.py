"""Declare the operators that reduce a tensor over processes."""

from __future__ import annotations

from ..kernels.norm.naive import sums_of_squares
from ..kernels.reduce.naive import all_reduce_add_ref, all_reduce_ref
from .checks import require_residual
from .registration import operator

all_reduce = operator(all_reduce_ref, shapes=lambda x: x.new_empty(x.shape))
# Only a pass makes calls of it.
all_reduce_add = operator(
    all_reduce_add_ref,
    shapes=lambda x: (x.new_empty(x.shape), sums_of_squares(x)),
    checks=(require_residual,),
)
