"""Compute linear layers on packed weights: dequantize, then one dense product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..dequantize.naive import dequantize_ref
from ..fp8.naive import expand_ref, multiply_ref, quantize_rows_ref, uses_fp8
from ..norm.naive import rms_norm_of_squares_ref, square_sums_ref
from ..quantize.naive import ACTIVATIONS


def linear_ref(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Return x [..., K] times a packed weight [N, K], dequantized to the dtype of x."""
    # compute: "fp8" rounds both operands of many rows to E4M3 (kernels/fp8).
    if uses_fp8(compute, math.prod(x.shape[:-1])):
        rows = quantize_rows_ref(x.reshape(-1, x.shape[-1]))
        return multiply_ref(rows, weight, fmt).to(x.dtype).view(*x.shape[:-1], -1)
    # The product of a code and a float32 scale is not exact in 16 bits.
    exact = torch.float32 if fmt.has_float_scale and x.dtype.itemsize == 2 else x.dtype
    dense = dequantize_ref(*weight[:3], fmt, exact)
    bias = None if weight.bias is None else weight.bias.to(exact)
    return F.linear(x.to(exact), dense, bias).to(x.dtype)


def linear_rounded_ref(x: Tensor, factors: Tensor, weight: PackedWeight, fmt: Format) -> Tensor:
    """Return E4M3 x [..., K] with factors [..., 1] times a packed weight, [..., N] in bfloat16."""
    rows = (x.reshape(-1, x.shape[-1]), factors.reshape(-1))
    return multiply_ref(rows, weight, fmt).to(torch.bfloat16).view(*x.shape[:-1], -1)


def linear_quantized_ref(
    x: Tensor,
    x_rows: PackedInput,
    weight: PackedWeight,
    fmt: Format,
    rotation: int = 0,
    compute: str = "input",
    *,
    dequantize: Callable[..., Tensor] = dequantize_ref,
    linear: Callable[..., Tensor] = linear_ref,
) -> Tensor:
    """Return quantized activations times a packed weight, [..., N] in the dtype of x."""
    # Of x, what was quantized, only the dtype is read and only the gradient computed: that of the
    # dense product, as if rounding were the identity (straight-through). rotation: columns of x
    # that were rotated together before; its gradient is rotated back.
    leading = x_rows.packed.shape[:-1]
    if uses_fp8(compute, math.prod(leading)):
        codes, bits = (each.reshape(-1, each.shape[-1]) for each in x_rows[:2])
        rows = expand_ref(PackedInput(codes, bits, x_rows.global_scale), fmt)
        return multiply_ref(rows, weight, fmt).to(x.dtype).view(*leading, -1)
    # The values that float16 numbers are rounded to may leave its range.
    wide = x.dtype == torch.float16 or (fmt.has_float_scale and x.dtype == torch.bfloat16)
    exact = torch.float32 if wide else x.dtype
    return linear(dequantize(*x_rows, fmt, exact), weight, fmt).to(x.dtype)


def linear_group_ref(
    x: Tensor,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
    *,
    linear: Callable[..., Tensor] = linear_ref,
) -> list[Tensor]:
    """Multiply activations and several packed weights, as `linear_ref` does one."""
    return [linear(x, weight, fmt, compute) for weight in weights]


def linear_gated_ref(
    x: Tensor,
    weights: Sequence[PackedWeight],
    activation: str,
    fmt: Format,
    compute: str = "input",
    *,
    linear: Callable[..., Tensor] = linear_ref,
) -> Tensor:
    """Return the activation of the product with a gate, times that with its factor, as eager."""
    # The weights are those of the gate and of its factor, or one that has both, in this order.
    products = [linear(x, weight, fmt, compute) for weight in weights]
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def linear_add_ref(
    x: Tensor,
    weight: PackedWeight,
    residual: Tensor,
    fmt: Format,
    compute: str = "input",
    *,
    linear: Callable[..., Tensor] = linear_ref,
) -> tuple[Tensor, Tensor]:
    """Return residual + product [..., N] and sums of its squares over `SQUARES` columns each."""
    total = residual + linear(x, weight, fmt, compute)
    return total, square_sums_ref(total)


def linear_normed_group_ref(
    x: Tensor,
    squares: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
) -> list[Tensor]:
    """Multiply the RMSNorm of x, whose `square_sums_ref` are given, and several packed weights."""
    normed = rms_norm_of_squares_ref(x, squares, norm_weight, eps)
    return linear_group_ref(normed, weights, fmt, compute)


def linear_normed_gated_ref(
    x: Tensor,
    squares: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[PackedWeight],
    activation: str,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return `linear_gated_ref` of the RMSNorm of x, whose `square_sums_ref` are given."""
    normed = rms_norm_of_squares_ref(x, squares, norm_weight, eps)
    return linear_gated_ref(normed, weights, activation, fmt, compute)


def linear_quantized_group_ref(
    x: Tensor,
    x_rows: PackedInput,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
    *,
    linear: Callable[..., Tensor] = linear_quantized_ref,
) -> list[Tensor]:
    """Multiply quantized activations and several packed weights (`linear_quantized_ref`)."""
    return [linear(x, x_rows, weight, fmt, compute=compute) for weight in weights]
