"""Activation functions, gated or not, and their output to packed codes and scale bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format
from .reference import quantize_ref


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_new(x: Tensor) -> Tensor:
    """Return GELU by tanh, each step rounded to x's dtype, as transformers' GPT2 writes it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


# By the name that crosses the operator.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_new,
}


def activate_quantize_ref(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of x [..., K], times `up` [..., K] if given, as eager PyTorch."""
    active = ACTIVATIONS[activation](x)
    return quantize_ref(active if up is None else active * up, global_scale, fmt, scale_method)
