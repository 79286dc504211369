"""RMSNorm, and its output to packed codes and scale bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from .quantize_ref import quantize_ref


def rms_norm_quantize_ref(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: Format
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of `x` over its last dimension, as transformers' Llama computes it.

    x: [..., K] float; weight: [K] in x's dtype; global_divisor: [1] float32 or None.
    Returns packed [..., K / 2] uint8 and scale bits [..., K / block] uint8 (quantize_ref.py).
    """
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return quantize_ref(weight * (wide * inverse).to(x.dtype), global_divisor, fmt)
