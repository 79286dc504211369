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
    """Quantize the RMSNorm of `x` over its last dimension, as transformers' Llama computes it.

    x: [..., K] float; weight: [K] in x's dtype; global_scale: [1] float32 or None.
    Returns packed [..., P] uint8 and scale bits [..., K / block] uint8 (quantize_ref.py).
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
    """The sum of `x` and `residual` [..., K], and what rms_norm_quantize_ref makes of it."""
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
    """Quantize F.layer_norm of `x` [..., K] over its last dimension.

    weight, bias: [K] in x's dtype, or None. The rest is as for rms_norm_quantize_ref.
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
    """The sum of `x` and `residual` [..., K], and what layer_norm_quantize_ref makes of it."""
    total = (x + residual).contiguous()
    return total, *layer_norm_quantize_ref(
        total, weight, bias, eps, global_scale, fmt, scale_method
    )
