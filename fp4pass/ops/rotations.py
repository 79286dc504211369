"""The rotation of inputs whose linears have rotated weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from ..kernels.rotate.reference import ROTATIONS, rotate_ref
from .dispatch import differentiable, operator, require_float, run


def _fake_rotate(x: Tensor, rotation: int) -> Tensor:
    return x.new_empty(x.shape)


@operator(_fake_rotate)
def rotate(x: Tensor, rotation: int) -> Tensor:
    """x [..., K] times the block-diagonal Hadamard matrix of `rotation` (kernels/rotate),
    in x's dtype."""
    require_rotation(x, rotation)
    return run(rotate_ref, x, None, x, rotation)


def require_rotation(x: Tensor, rotation: int) -> None:
    """Raise DtypeError, OptionError or ShapeError for what cannot be rotated."""
    require_float(x)
    if rotation not in ROTATIONS[1:]:
        known = ", ".join(map(str, ROTATIONS[1:]))
        raise OptionError(f"rotation is {rotation}; one of {known} is wanted.")
    if x.ndim == 0 or x.shape[-1] % rotation:
        raise ShapeError(
            f"An input of shape {tuple(x.shape)} cannot be rotated: a last dimension that is a "
            f"multiple of {rotation} is wanted."
        )


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rotation = inputs[1]


def _backward_rotate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """The matrix is its own transpose."""
    return torch.ops.fp4pass.rotate(grad, ctx.rotation), None


differentiable("rotate", _backward_rotate, _setup_rotate)
