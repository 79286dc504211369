"""Declare the norms before products in floating point, which only a pass makes calls of."""

from __future__ import annotations

from torch import Tensor

from ..kernels.norm.naive import add_rms_norm_ref, rms_norm_ref
from .checks import require_float, require_residual, require_rms_weight
from .registration import operator


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


# They stand in graphs whose gradients are made already, and have none of their own.
rms_norm = operator(
    rms_norm_ref,
    triton="kernels.norm.triton:rms_norm_triton",
    shapes=lambda x: x.new_empty(x.shape),
    checks=(require_float, require_rms_weight),
)
add_rms_norm = operator(
    add_rms_norm_ref,
    triton="kernels.norm.triton:add_rms_norm_triton",
    shapes=_two,
    checks=(require_float, require_rms_weight, require_residual),
)
