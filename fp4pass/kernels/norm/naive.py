"""RMSNorm as eager PyTorch computes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Columns that a sum of squares is of, where a row has several.
SQUARES = 16

# Columns of a row that a program of a kernel can hold.
WIDEST = 1 << 14


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [..., K], weight [K], as transformers' Llama computes it."""
    return _scaled(x, x.to(torch.float32).square().mean(-1, keepdim=True), weight, eps)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded to their dtype, and its RMSNorm."""
    total = (x + residual).contiguous()
    return total, rms_norm_ref(total, weight, eps)


def square_sums_ref(x: Tensor) -> Tensor:
    """Return the sums of the squares of every `SQUARES` columns of x [..., K], in float32."""
    squares = F.pad(x.to(torch.float32).square(), (0, -x.shape[-1] % SQUARES))
    return squares.unflatten(-1, (-1, SQUARES)).sum(-1)


def sums_of_squares(x: Tensor) -> Tensor:
    """Return an empty tensor for the `square_sums_ref` of x."""
    return x.new_empty((*x.shape[:-1], -(-x.shape[-1] // SQUARES)), dtype=torch.float32)


def rms_norm_of_squares_ref(x: Tensor, squares: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x, whose `square_sums_ref` are given."""
    return _scaled(x, squares.sum(-1, keepdim=True) / x.shape[-1], weight, eps)


def _scaled(x: Tensor, mean: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x.to(torch.float32) * torch.rsqrt(mean + eps)).to(x.dtype)
