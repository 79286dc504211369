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
    """Quantize the RMSNorm of x [..., K], weight [K], as transformers' Llama computes it."""
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
    """Return x + residual, rounded to their dtype, and what its RMSNorm is quantized to."""
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
    """Quantize F.layer_norm of x [..., K] over its last dimension, weight and bias [K]."""
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
    """Return x + residual, rounded, and what F.layer_norm of it is quantized to."""
    total = (x + residual).contiguous()
    return total, *layer_norm_quantize_ref(
        total, weight, bias, eps, global_scale, fmt, scale_method
    )
