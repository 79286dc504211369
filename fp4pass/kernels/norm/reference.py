"""RMSNorm as eager PyTorch computes it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [..., K], weight [K], as transformers' Llama computes it."""
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their dtype, and its RMSNorm."""
    total = (x + residual).contiguous()
    return total, rms_norm_ref(total, weight, eps)
