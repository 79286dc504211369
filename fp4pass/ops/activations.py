"""Operators that quantize activations, as they are or with what computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.formats import Format, get_format
from ..errors import ShapeError, unknown_name
from ..kernels.quantize.activation_reference import ACTIVATIONS, activate_quantize_ref
from ..kernels.quantize.norm_reference import (
    add_layer_norm_quantize_ref,
    add_rms_norm_quantize_ref,
    layer_norm_quantize_ref,
    rms_norm_quantize_ref,
)
from ..kernels.quantize.reference import ACTIVATION_SCALES, dynamic_global_scale_ref, quantize_ref
from ..kernels.rotate.reference import rotate_quantize_ref
from .dispatch import differentiable, empty_blocks, operator, require_blocks, require_float, run
from .rotations import require_rotation


def _fake_dynamic_global_scale(x: Tensor, fmt: str) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


@operator(_fake_dynamic_global_scale)
def dynamic_global_scale(x: Tensor, fmt: str) -> Tensor:
    """1 / global_scale for the amax of this x: [1] float32, a power of two; 1 if there is none."""
    form = get_format(fmt)
    if not form.has_global_scale:
        return x.new_ones(1, dtype=torch.float32)
    return run(dynamic_global_scale_ref, x, form, x, form)


def _fake_quantize(
    x: Tensor, global_scale: Tensor | None, fmt: str, scales: str = "naive"
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_quantize)
def quantize(
    x: Tensor, global_scale: Tensor | None, fmt: str, scales: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize activations x [..., K] in blocks along K.

    global_scale: [1] float32 or None; scales: of blocks, "naive", from their amax, or "sse", of
    least squared error. Returns packed uint8 [..., P] and scale bits [..., K / block].
    """
    form = get_format(fmt)
    _require_scales(scales)
    require_float(x)
    require_blocks(x, form)
    return run(quantize_ref, x, form, x, global_scale, form, scales)


def _fake_rotate_quantize(
    x: Tensor, rotation: int, global_scale: Tensor | None, fmt: str, scales: str = "naive"
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_rotate_quantize)
def rotate_quantize(
    x: Tensor, rotation: int, global_scale: Tensor | None, fmt: str, scales: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize what `rotate` makes of x [..., K], not rounded to x's dtype before."""
    form = get_format(fmt)
    _require_scales(scales)
    require_rotation(x, rotation)
    require_blocks(x, form)
    return run(rotate_quantize_ref, x, form, x, rotation, global_scale, form, scales)


def _fake_rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_rms_norm_quantize)
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of x [..., K] with weight [K], as `quantize` does its input."""
    form = get_format(fmt)
    _require_norm("an RMSNorm", x, form, scales, weight=weight)
    return run(rms_norm_quantize_ref, x, form, x, weight, eps, global_scale, form, scales)


def _fake_add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *empty_blocks(x, fmt)


@operator(_fake_add_rms_norm_quantize)
def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual, both [..., K], rounded to their dtype, and what `rms_norm_quantize` makes
    of it."""
    form = get_format(fmt)
    _require_norm("an RMSNorm", x, form, scales, weight=weight)
    _require_like("residual", residual, x)
    arguments = (x, residual, weight, eps, global_scale, form, scales)
    return run(add_rms_norm_quantize_ref, x, form, *arguments)


def _fake_layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_layer_norm_quantize)
def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize F.layer_norm of x [..., K] over K with weight and bias [K], as `quantize` does."""
    form = get_format(fmt)
    _require_norm("a LayerNorm", x, form, scales, weight=weight, bias=bias)
    return run(layer_norm_quantize_ref, x, form, x, weight, bias, eps, global_scale, form, scales)


def _fake_add_layer_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *empty_blocks(x, fmt)


@operator(_fake_add_layer_norm_quantize)
def add_layer_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual, both [..., K], rounded to their dtype, and what `layer_norm_quantize` makes
    of it."""
    form = get_format(fmt)
    _require_norm("a LayerNorm", x, form, scales, weight=weight, bias=bias)
    _require_like("residual", residual, x)
    arguments = (x, residual, weight, bias, eps, global_scale, form, scales)
    return run(add_layer_norm_quantize_ref, x, form, *arguments)


def _fake_activate_quantize(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_activate_quantize)
def activate_quantize(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: str,
    scales: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of x [..., K], times up [..., K] if it is given, as `quantize` does.

    activation: "silu", "gelu", "gelu_tanh", or "gelu_new", which is GPT2's: by tanh, every step
    rounded to x's dtype.
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("Activation", activation, ACTIVATIONS)
    form = get_format(fmt)
    _require_scales(scales)
    require_float(x)
    require_blocks(x, form)
    if up is not None:
        _require_like("factor", up, x)
    return run(activate_quantize_ref, x, form, x, up, activation, global_scale, form, scales)


def _require_scales(scales: str) -> None:
    """Raise OptionError unless there is such a way to choose the scales of blocks."""
    if scales not in ACTIVATION_SCALES:
        raise unknown_name("Activation scales", scales, ACTIVATION_SCALES)


def _require_norm(
    kind: str, x: Tensor, form: Format, scales: str, **parameters: Tensor | None
) -> None:
    """Raise unless x can be quantized and what scales and shifts its norm is [K] in its dtype."""
    _require_scales(scales)
    require_float(x)
    require_blocks(x, form)
    for name, each in parameters.items():
        if each is not None and (each.shape != x.shape[-1:] or each.dtype != x.dtype):
            raise ShapeError(
                f"The {name} of {kind} is {tuple(each.shape)} {each.dtype}; for an input "
                f"{tuple(x.shape)} {x.dtype} it is {tuple(x.shape[-1:])} {x.dtype}."
            )


def _require_like(name: str, other: Tensor, x: Tensor) -> None:
    """Raise ShapeError unless another tensor has the shape and the dtype of x."""
    if other.shape != x.shape or other.dtype != x.dtype:
        raise ShapeError(
            f"The {name} is {tuple(other.shape)} {other.dtype}; it must be as the input, "
            f"{tuple(x.shape)} {x.dtype}. Expand or cast it before the call."
        )


def _setup_rounding(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))
    ctx.arguments = len(inputs)


def _backward_rounding(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    """Codes and scales have no gradient; that of x flows through the product instead."""
    return (None,) * ctx.arguments


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.arguments = len(inputs)


def _backward_sum(ctx: Any, grad: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of both addends is that of the sum, the first output."""
    return (grad, grad, *(None,) * (ctx.arguments - 2))


for _name in (
    "quantize",
    "dynamic_global_scale",
    "rms_norm_quantize",
    "layer_norm_quantize",
    "activate_quantize",
    "rotate_quantize",
):
    differentiable(_name, _backward_rounding, _setup_rounding)
for _name in ("add_rms_norm_quantize", "add_layer_norm_quantize"):
    differentiable(_name, _backward_sum, _setup_sum)
