"""Linear layers on packed weights: dequantize, then one dense product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format
from ..dequantize.naive import dequantize_ref
from ..fp8.naive import expand_ref, multiply_ref, quantize_rows_ref, uses_fp8


def linear_ref(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return x [..., K] times a packed weight [N, K], dequantized to the dtype of x."""
    # compute: "fp8" rounds both operands of many rows to E4M3 (kernels/fp8).
    if uses_fp8(compute, math.prod(x.shape[:-1]), len(packed)):
        rows = quantize_rows_ref(x.reshape(-1, x.shape[-1]))
        y = multiply_ref(rows, packed, scale, global_scale, bias, fmt)
        return y.to(x.dtype).view(*x.shape[:-1], -1)
    weight = dequantize_ref(packed, scale, global_scale, fmt, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def linear_quantized_ref(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
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
    if uses_fp8(compute, math.prod(x_packed.shape[:-1]), len(packed)):
        codes, bits = (each.reshape(-1, each.shape[-1]) for each in (x_packed, x_scale))
        rows = expand_ref(codes, bits, x_global_scale, fmt)
        y = multiply_ref(rows, packed, scale, global_scale, bias, fmt)
        return y.to(x.dtype).view(*x_packed.shape[:-1], -1)
    # The values that float16 numbers are rounded to may leave its range.
    exact = torch.float32 if x.dtype == torch.float16 else x.dtype
    rounded = dequantize(x_packed, x_scale, x_global_scale, fmt, exact)
    return linear(rounded, packed, scale, global_scale, bias, fmt).to(x.dtype)


def linear_group_ref(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    compute: str = "input",
    *,
    linear: Callable[..., Tensor] = linear_ref,
) -> list[Tensor]:
    """Multiply activations and several packed weights, as `linear_ref` does one."""
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [linear(x, *weight, fmt, compute) for weight in weights]


def linear_quantized_group_ref(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    compute: str = "input",
    *,
    linear_quantized: Callable[..., Tensor] = linear_quantized_ref,
) -> list[Tensor]:
    """Multiply quantized activations and several packed weights (`linear_quantized_ref`)."""
    activations = (x, x_packed, x_scale, x_global_scale)
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [linear_quantized(*activations, *weight, fmt, compute=compute) for weight in weights]
