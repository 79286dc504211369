"""RMSNorm and LayerNorm, of a tensor or a sum, and their output to packed codes and scale bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format
from .reference import quantize_ref


def rms_norm_quantize_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of a tensor, as transformers' Llama computes it.

    Args:
        x: [..., K], floating point.
        weight: [K] in the dtype of x.
        eps: added to the mean of squares.
        global_scale: [1] float32 as stored, or None for 1.
        fmt: the format.
        scale_method: as for `quantize_ref`.

    Returns:
        packed: [..., P] uint8, packed codes.
        scale: [..., K / block] uint8, the bits of the block scales.
    """
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return quantize_ref(weight * (wide * inverse).to(x.dtype), global_scale, fmt, scale_method)


def add_rms_norm_quantize_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, and quantize the RMSNorm of the sum.

    Args:
        x: [..., K], floating point.
        residual: [..., K] in the dtype of x.
        weight: [K] in the dtype of x.
        eps: added to the mean of squares.
        global_scale: [1] float32 as stored, or None for 1.
        fmt: the format.
        scale_method: as for `quantize_ref`.

    Returns:
        total: [..., K], x + residual, rounded to their dtype.
        packed: [..., P] uint8, packed codes.
        scale: [..., K / block] uint8, the bits of the block scales.
    """
    total = (x + residual).contiguous()
    return total, *rms_norm_quantize_ref(total, weight, eps, global_scale, fmt, scale_method)


def layer_norm_quantize_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize F.layer_norm of a tensor over its last dimension.

    Args:
        x: [..., K], floating point.
        weight: [K] in the dtype of x, or None.
        bias: [K] in the dtype of x, or None.
        eps: added to the variance.
        global_scale: [1] float32 as stored, or None for 1.
        fmt: the format.
        scale_method: as for `quantize_ref`.

    Returns:
        packed: [..., P] uint8, packed codes.
        scale: [..., K / block] uint8, the bits of the block scales.
    """
    return quantize_ref(
        F.layer_norm(x, x.shape[-1:], weight, bias, eps), global_scale, fmt, scale_method
    )


def add_layer_norm_quantize_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, and quantize F.layer_norm of the sum.

    Args:
        x: [..., K], floating point.
        residual: [..., K] in the dtype of x.
        weight: [K] in the dtype of x, or None.
        bias: [K] in the dtype of x, or None.
        eps: added to the variance.
        global_scale: [1] float32 as stored, or None for 1.
        fmt: the format.
        scale_method: as for `quantize_ref`.

    Returns:
        total: [..., K], x + residual, rounded to their dtype.
        packed: [..., P] uint8, packed codes.
        scale: [..., K / block] uint8, the bits of the block scales.
    """
    total = (x + residual).contiguous()
    return total, *layer_norm_quantize_ref(
        total, weight, bias, eps, global_scale, fmt, scale_method
    )
