"""Linear layers on packed weights: dequantize, then one dense product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format
from ..dequantize.reference import dequantize_ref


def linear_ref(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Multiply activations and a packed weight, dequantized to their dtype.

    Args:
        x: [..., K], floating point.
        packed: [N, P] uint8, the codes of the weight.
        scale: [N, K / block] uint8, the bits of its block scales.
        global_scale: [1] float32 as stored, or None for 1.
        bias: [N], or None.
        fmt: the format of the weight.

    Returns:
        [..., N] in the dtype of x.
    """
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
) -> Tensor:
    """Multiply quantized activations and a packed weight.

    Args:
        x: [..., K], what was quantized. Only its dtype is read, and only its gradient computed:
            that of the dense product, as if rounding were the identity (straight-through).
        x_packed: [..., P] uint8, its codes.
        x_scale: [..., K / block] uint8, the bits of its block scales.
        x_global_scale: [1] float32 as stored, or None for 1.
        packed: [N, P] uint8, the codes of the weight.
        scale: [N, K / block] uint8, the bits of its block scales.
        global_scale: [1] float32 as stored, or None for 1.
        bias: [N], or None.
        fmt: the format of both.
        rotation: columns of x that were rotated together before; its gradient is rotated back.

    Returns:
        [..., N] in the dtype of x.
    """
    # The values that float16 numbers are rounded to may leave its range.
    exact = torch.float32 if x.dtype == torch.float16 else x.dtype
    rounded = dequantize_ref(x_packed, x_scale, x_global_scale, fmt, exact)
    return linear_ref(rounded, packed, scale, global_scale, bias, fmt).to(x.dtype)


def linear_group_ref(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
) -> list[Tensor]:
    """Multiply activations and several packed weights, as `linear_ref` does one."""
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [linear_ref(x, *weight, fmt) for weight in weights]


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
) -> list[Tensor]:
    """Multiply quantized activations and several packed weights (`linear_quantized_ref`)."""
    activations = (x, x_packed, x_scale, x_global_scale)
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [linear_quantized_ref(*activations, *weight, fmt) for weight in weights]
