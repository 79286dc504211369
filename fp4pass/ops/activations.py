"""Operators that rotate and quantize activations, alone or with what computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.packing import empty_blocks
from ..kernels.quantize.naive import (
    activate_quantize_ref,
    add_layer_norm_quantize_ref,
    add_rms_norm_quantize_ref,
    dynamic_global_scale_ref,
    layer_norm_quantize_ref,
    quantize_ref,
    rms_norm_quantize_ref,
)
from ..kernels.rotate.naive import rotate_quantize_ref, rotate_ref
from .checks import (
    require_activation,
    require_factor,
    require_float,
    require_norm_bias,
    require_norm_weight,
    require_quantizable,
    require_residual,
    require_rotation,
)
from .registration import Backward, operator


def _sum_and_blocks(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *empty_blocks(x, fmt)


def _backward_of_sum(addends: int) -> Backward:
    """Return the backward where the first output is the sum of so many first arguments, if any."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*outputs[min(addends, 1) :])
        ctx.arguments, ctx.outputs = len(inputs), len(outputs)

    def gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return (grad,) * addends + (None,) * (ctx.arguments - addends)

    def tangent(ctx: Any, *tangents: Tensor | None) -> Any:
        moved = [each for each in tangents[:addends] if each is not None]
        of_sum = sum(moved[1:], moved[0]) if moved else None
        others = (None,) * (ctx.outputs - min(addends, 1))
        found = (of_sum, *others) if addends else others
        return found if ctx.outputs > 1 else found[0]

    return Backward(gradients, setup, tangent)


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rotation = inputs[1]


def _rotate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # The matrix is its own transpose.
    return rotate(grad, ctx.rotation), None


def _rotate_tangent(ctx: Any, x: Tensor, rotation: None) -> Tensor:
    return rotate(x, ctx.rotation)


# Codes and scales have no gradient; that of x flows through the linear operator instead.
ROUNDING = _backward_of_sum(0)
_SUM = _backward_of_sum(2)

_RMS_NORM = (require_quantizable, require_norm_weight)
_LAYER_NORM = (*_RMS_NORM, require_norm_bias)

dynamic_global_scale = operator(
    dynamic_global_scale_ref,
    triton="kernels.quantize.triton:dynamic_global_scale_triton",
    shapes=lambda x: x.new_empty(1, dtype=torch.float32),
    backward=ROUNDING,
)
quantize = operator(
    quantize_ref,
    triton="kernels.quantize.triton:quantize_triton",
    cpu="kernels.quantize.cpu:quantize_cpu",
    shapes=empty_blocks,
    checks=(require_quantizable,),
    backward=ROUNDING,
)
rms_norm_quantize = operator(
    rms_norm_quantize_ref,
    triton="kernels.quantize.norm_triton:rms_norm_quantize_triton",
    cpu="kernels.quantize.cpu:rms_norm_quantize_cpu",
    shapes=empty_blocks,
    checks=_RMS_NORM,
    backward=ROUNDING,
)
add_rms_norm_quantize = operator(
    add_rms_norm_quantize_ref,
    triton="kernels.quantize.norm_triton:add_rms_norm_quantize_triton",
    cpu="kernels.quantize.cpu:add_rms_norm_quantize_cpu",
    shapes=_sum_and_blocks,
    checks=(*_RMS_NORM, require_residual),
    backward=_SUM,
)
layer_norm_quantize = operator(
    layer_norm_quantize_ref,
    triton="kernels.quantize.norm_triton:layer_norm_quantize_triton",
    cpu="kernels.quantize.cpu:layer_norm_quantize_cpu",
    shapes=empty_blocks,
    checks=_LAYER_NORM,
    backward=ROUNDING,
)
add_layer_norm_quantize = operator(
    add_layer_norm_quantize_ref,
    triton="kernels.quantize.norm_triton:add_layer_norm_quantize_triton",
    cpu="kernels.quantize.cpu:add_layer_norm_quantize_cpu",
    shapes=_sum_and_blocks,
    checks=(*_LAYER_NORM, require_residual),
    backward=_SUM,
)
activate_quantize = operator(
    activate_quantize_ref,
    triton="kernels.quantize.triton:activate_quantize_triton",
    cpu="kernels.quantize.cpu:activate_quantize_cpu",
    shapes=empty_blocks,
    checks=(require_activation, require_quantizable, require_factor),
    backward=ROUNDING,
)
rotate = operator(
    rotate_ref,
    triton="kernels.rotate.triton:rotate_triton",
    shapes=lambda x: x.new_empty(x.shape),
    checks=(require_float, require_rotation),
    backward=Backward(_rotate_gradients, _setup_rotate, _rotate_tangent),
)
rotate_quantize = operator(
    rotate_quantize_ref,
    triton="kernels.rotate.triton:rotate_quantize_triton",
    cpu="kernels.quantize.cpu:rotate_quantize_cpu",
    shapes=empty_blocks,
    checks=(require_quantizable, require_rotation),
    backward=ROUNDING,
)
