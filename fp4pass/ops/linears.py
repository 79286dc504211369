"""Products of activations and packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core.formats import get_format
from ..kernels.linear.reference import (
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from .dispatch import differentiable, operator, require_float, run
from .rotations import rotate
from .weights import dequantize


def _fake_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@operator(_fake_linear)
def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    """x [..., K] times a packed weight [N, P], transposed, plus bias: [..., N] in x's dtype."""
    form = get_format(fmt)
    require_float(x)
    return run(linear_ref, x, form, x, packed, scale, global_scale, bias, form)


def _fake_linear_quantized(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: str,
    rotation: int = 0,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@operator(_fake_linear_quantized)
def linear_quantized(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: str,
    rotation: int = 0,
) -> Tensor:
    """The product of quantized activations and a packed weight, plus bias: [..., N].

    x [..., K] is what was quantized. Only its dtype, that of the result, is read; its gradient
    is that of the dense product, as if rounding were the identity (straight-through). rotation:
    of x before it was quantized.
    """
    form = get_format(fmt)
    activations = (x_packed, x_scale, x_global_scale)
    weight = (packed, scale, global_scale)
    return run(linear_quantized_ref, x, form, *activations, *weight, bias, form, x.dtype)


def _fake_linear_group(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: str,
) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], each.shape[0])) for each in packed]


@operator(_fake_linear_group)
def linear_group(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: str,
) -> list[Tensor]:
    """`linear` of one x and several weights: the same bits, in one launch for few rows.

    A pass puts it into graphs whose gradients are made already; it has none of its own.
    """
    form = get_format(fmt)
    require_float(x)
    return run(linear_group_ref, x, form, x, packed, scale, global_scale, bias, form)


def _fake_linear_quantized_group(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: str,
) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], each.shape[0])) for each in packed]


@operator(_fake_linear_quantized_group)
def linear_quantized_group(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: str,
) -> list[Tensor]:
    """`linear_quantized` of one x and several weights, as `linear_group` is of `linear`."""
    form = get_format(fmt)
    activations = (x_packed, x_scale, x_global_scale)
    weights = (packed, scale, global_scale, bias)
    return run(linear_quantized_group_ref, x, form, *activations, *weights, form, x.dtype)


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _remember(ctx, inputs, bias=4, rotation=0)


def _setup_quantized(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _remember(ctx, inputs, bias=7, rotation=inputs[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], bias: int, rotation: int) -> None:
    """bias: its place, behind those of the weight and before that of the format."""
    ctx.save_for_backward(*inputs[bias - 3 : bias])
    ctx.bias_dtype = None if inputs[bias] is None else inputs[bias].dtype
    ctx.fmt, ctx.rotation = inputs[bias + 1], rotation
    ctx.bias, ctx.arguments = bias, len(inputs)


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, the first argument, and of the bias."""
    packed, scale, global_scale = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * ctx.arguments
    if ctx.needs_input_grad[0]:
        back = grad @ dequantize(packed, scale, global_scale, ctx.fmt, grad.dtype)
        grads[0] = rotate(back, ctx.rotation) if ctx.rotation else back
    if ctx.needs_input_grad[ctx.bias]:
        grads[ctx.bias] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return tuple(grads)


differentiable("linear", _backward_linear, _setup_linear)
differentiable("linear_quantized", _backward_linear, _setup_quantized)
