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
    """x @ W^T + bias with W dequantized to x's dtype: x [..., K], packed [N, P] -> [..., N]."""
    weight = dequantize_ref(packed, scale, global_scale, fmt, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def linear_quantized_ref(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    dtype: torch.dtype,
) -> Tensor:
    """The same for activations that are quantized too; the result is in `dtype`."""
    # float16 has not the range of what its own values are rounded to.
    exact = torch.float32 if dtype == torch.float16 else dtype
    x = dequantize_ref(x_packed, x_scale, x_global_scale, fmt, exact)
    return linear_ref(x, packed, scale, global_scale, bias, fmt).to(dtype)


def linear_group_ref(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
) -> list[Tensor]:
    """`linear_ref` of one x and several weights."""
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [linear_ref(x, *weight, fmt) for weight in weights]


def linear_quantized_group_ref(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    dtype: torch.dtype,
) -> list[Tensor]:
    """`linear_quantized_ref` of one x and several weights."""
    weights = zip(packed, scale, global_scale, bias, strict=True)
    return [
        linear_quantized_ref(x_packed, x_scale, x_global_scale, *weight, fmt, dtype)
        for weight in weights
    ]
