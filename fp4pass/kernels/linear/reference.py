"""Linear layers on packed weights: dequantize, then one dense product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.codebooks import Codebook
from ...core.formats import Format
from ..codebook.reference import dequantize_codebook_ref
from ..dequantize.reference import dequantize_ref


def linear_ref(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return x [..., K] times a packed weight [N, K], dequantized to the dtype of x."""
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
    """Return quantized activations times a packed weight, [..., N] in the dtype of x."""
    # Of x, what was quantized, only the dtype is read and only the gradient computed: that of the
    # dense product, as if rounding were the identity (straight-through). rotation: columns of x
    # that were rotated together before; its gradient is rotated back.

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


def linear_codebook_ref(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor | None,
    rows: int,
    codebook: Codebook,
    *,
    dequantize: Callable[..., Tensor] = dequantize_codebook_ref,
) -> Tensor:
    """Return x [..., K] times a weight [rows, K] in a codebook, dequantized to the dtype of x."""
    weight = dequantize(packed, absmax, codebook, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
