"""Declare the operators that multiply activations and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.packing import PackedWeight
from ..kernels.linear.naive import (
    linear_add_ref,
    linear_gated_ref,
    linear_group_ref,
    linear_normed_gated_ref,
    linear_normed_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
    linear_rounded_ref,
)
from ..kernels.norm.naive import sums_of_squares
from .activations import rotate
from .checks import (
    require_activation,
    require_added,
    require_compute,
    require_float,
    require_gate,
    require_norm_weight,
    require_rounded,
    require_squares,
)
from .registration import Backward, operator, save_product
from .weights import dequantize


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.packed.shape[0]))


def _products(x: Tensor, weights: Sequence[PackedWeight]) -> list[Tensor]:
    return [_product(x, each) for each in weights]


def _gate(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    return x.new_empty((*x.shape[:-1], weights[0].packed.shape[0] * len(weights) // 2))


def _narrow_product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.packed.shape[0]), dtype=torch.bfloat16)


def _sum_and_squares(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    total = _product(x, weight)
    return total, sums_of_squares(total)


def gradients_of(
    bias: int, save: Callable[..., Any], dense: Callable[..., Tensor], rotation: int | None = None
) -> Backward:
    """Return the derivatives in x, the first argument, and in the bias, at that place."""
    # save: (ctx, inputs) to the weight's tensors; dense: (ctx, tensors, dtype) to the weight.

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save_product(ctx, inputs, save(ctx, inputs), bias)
        ctx.rotation, ctx.shape = 0 if rotation is None else inputs[rotation], output.shape

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * ctx.arguments
        if ctx.needs_input_grad[0]:
            back = grad @ dense(ctx, ctx.saved_tensors, grad.dtype)
            grads[0] = rotate(back, ctx.rotation) if ctx.rotation else back
        if ctx.needs_input_grad[bias]:
            grads[bias] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return tuple(grads)

    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        x, of_bias = tangents[0], tangents[bias]
        if x is None:
            return None if of_bias is None else of_bias.expand(ctx.shape)
        x = rotate(x, ctx.rotation) if ctx.rotation else x
        moved = x @ dense(ctx, ctx.saved_tensors, x.dtype).t()
        return moved if of_bias is None else moved + of_bias.to(moved.dtype)

    return Backward(gradients, setup, tangent)


def _blocks_gradients(bias: int, rotation: int | None = None) -> Backward:
    """Return the derivatives for a weight in blocks: its tensors, the bias, its format in order."""

    def save(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ctx.fmt = inputs[bias + 1]
        return inputs[bias - 3 : bias]

    def dense(ctx: Any, stored: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return dequantize(*stored, ctx.fmt, dtype)

    return gradients_of(bias, save, dense, rotation)


linear = operator(
    linear_ref,
    triton="kernels.linear.triton:linear_triton",
    e4m3="kernels.linear.e4m3_triton:linear_e4m3",
    cpu="kernels.linear.cpu:linear_cpu",
    shapes=_product,
    checks=(require_float, require_compute),
    backward=_blocks_gradients(bias=4),
)
linear_quantized = operator(
    linear_quantized_ref,
    triton="kernels.linear.triton:linear_quantized_triton",
    e4m3="kernels.linear.e4m3_triton:linear_quantized_e4m3",
    cpu="kernels.linear.cpu:linear_quantized_cpu",
    shapes=_product,
    checks=(require_compute,),
    backward=_blocks_gradients(bias=7, rotation=9),
)
# Passes put these into graphs whose gradients are made already: they have none of their own.
linear_group = operator(
    linear_group_ref,
    triton="kernels.linear.triton:linear_group_triton",
    e4m3="kernels.linear.e4m3_triton:linear_group_e4m3",
    cpu="kernels.linear.cpu:linear_group_cpu",
    shapes=_products,
    checks=(require_float, require_compute),
)
linear_quantized_group = operator(
    linear_quantized_group_ref,
    triton="kernels.linear.triton:linear_quantized_group_triton",
    e4m3="kernels.linear.e4m3_triton:linear_quantized_group_e4m3",
    cpu="kernels.linear.cpu:linear_quantized_group_cpu",
    shapes=_products,
    checks=(require_compute,),
)
linear_rounded = operator(
    linear_rounded_ref,
    triton="kernels.linear.triton:linear_rounded_triton",
    shapes=_narrow_product,
    checks=(require_rounded,),
)
linear_gated = operator(
    linear_gated_ref,
    triton="kernels.linear.fused:linear_gated_triton",
    shapes=_gate,
    checks=(require_float, require_compute, require_activation, require_gate),
)
linear_add = operator(
    linear_add_ref,
    triton="kernels.linear.fused:linear_add_triton",
    shapes=_sum_and_squares,
    checks=(require_float, require_compute, require_added),
)
_NORMED = (require_float, require_compute, require_norm_weight, require_squares)
linear_normed_group = operator(
    linear_normed_group_ref,
    triton="kernels.linear.fused:linear_normed_group_triton",
    shapes=_products,
    checks=_NORMED,
)
linear_normed_gated = operator(
    linear_normed_gated_ref,
    triton="kernels.linear.fused:linear_normed_gated_triton",
    shapes=_gate,
    checks=(*_NORMED, require_activation, require_gate),
)
