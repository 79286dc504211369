"""Compute linear layers on packed weights: dequantize, then one dense product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format, get_format
from ...core.packing import PackedInput, PackedWeight
from ..compute_fp8.naive import expand_ref, multiply_ref, quantize_rows_ref, uses_fp8
from ..dequantize.naive import dequantize_ref
from ..norm.naive import rms_norm_of_squares_ref, square_sums_ref
from ..quantize.naive import ACTIVATIONS


class RowNorm(NamedTuple):
    """An RMSNorm of rows [..., K] whose squares are added already (`square_sums_ref`)."""

    squares: Tensor  # float32 [..., K / SQUARES]
    weight: Tensor  # [K]
    eps: float


class Around(NamedTuple):
    """The work of a call beside its products; it crosses the operator by its fields."""

    # The activation of a gate. The weights are those of the gate and of its factor, or one that has
    # both, in this order.
    gate: str | None = None
    residual: Tensor | None = None  # [..., N], that is added to the one product
    squares: Tensor | None = None  # of the norm that x still needs (`RowNorm`)
    norm_weight: Tensor | None = None
    eps: float = 0.0
    factors: Tensor | None = None  # float32 [..., 1], of rows x that are E4M3 already

    @property
    def norm(self) -> RowNorm | None:
        """The norm that x still needs."""
        if self.squares is None or self.norm_weight is None:
            return None
        return RowNorm(self.squares, self.norm_weight, self.eps)


ALONE = Around()


def linear_ref(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Return x [..., K] times a packed weight [N, K], dequantized to the dtype of x."""
    # compute: "fp8" rounds both operands of many rows to E4M3 (kernels/compute_fp8).
    if uses_fp8(compute, math.prod(x.shape[:-1])):
        rows = quantize_rows_ref(x.reshape(-1, x.shape[-1]))
        return multiply_ref(rows, weight, fmt).to(x.dtype).view(*x.shape[:-1], -1)
    # The product of a code and a float32 scale is not exact in 16 bits.
    exact = torch.float32 if fmt.has_float_scale and x.dtype.itemsize == 2 else x.dtype
    dense = dequantize_ref(*weight[:3], fmt, exact)
    bias = None if weight.bias is None else weight.bias.to(exact)
    return F.linear(x.to(exact), dense, bias).to(x.dtype)


def linear_quantized_ref(
    x: Tensor,
    x_rows: PackedInput,
    weight: PackedWeight,
    fmt: Format,
    rotation: int = 0,
    compute: str = "input",
    inputs: str = "",
    *,
    dequantize: Callable[..., Tensor] = dequantize_ref,
    linear: Callable[..., Tensor] = linear_ref,
) -> Tensor:
    """Return quantized activations times a packed weight, [..., N] in the dtype of x."""
    # Of x, what was quantized, only the dtype is read and only the gradient computed: that of the
    # dense product, as if rounding were the identity (straight-through). rotation: columns of x
    # that were rotated together before; its gradient is rotated back. inputs: the format of x_rows
    # where it is one in FP8, and not that of the weight; many rows then multiply it in E4M3.
    leading = x_rows.packed.shape[:-1]
    if inputs:
        numbers = dequantize(*x_rows, get_format(inputs), torch.float32)
        if not uses_fp8("fp8", math.prod(leading)):
            return linear(numbers, weight, fmt).to(x.dtype)
        values, factor = expand_ref(weight, fmt)
        bias = None if weight.bias is None else weight.bias.float()
        return F.linear(numbers, values.float() * factor[:, None], bias).to(x.dtype)
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
    around: Around = ALONE,
    *,
    linear: Callable[..., Tensor] = linear_ref,
) -> list[Tensor]:
    """Multiply activations and several packed weights, and compute what is around the products."""
    # Return the products; the one gate with `around.gate`; the sum and its `square_sums_ref` with
    # `around.residual`.
    if around.factors is not None:
        rows = (x.reshape(-1, x.shape[-1]), around.factors.reshape(-1))
        found = (multiply_ref(rows, weight, fmt).to(torch.bfloat16) for weight in weights)
        return [each.view(*x.shape[:-1], -1) for each in found]
    if around.norm is not None:
        x = rms_norm_of_squares_ref(x, *around.norm)
    products = [linear(x, weight, fmt, compute) for weight in weights]
    if around.gate is not None:
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        return [ACTIVATIONS[around.gate](gate) * up]
    if around.residual is not None:
        total = around.residual + products[0]
        return [total, square_sums_ref(total)]
    return products


def linear_quantized_group_ref(
    x: Tensor,
    x_rows: PackedInput,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
    inputs: str = "",
    *,
    linear: Callable[..., Tensor] = linear_quantized_ref,
) -> list[Tensor]:
    """Multiply quantized activations and several packed weights (`linear_quantized_ref`)."""
    return [linear(x, x_rows, weight, fmt, compute=compute, inputs=inputs) for weight in weights]
