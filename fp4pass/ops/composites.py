"""Composite functions of PyTorch, as operators that torch.compile keeps whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import differentiable, operator


@operator(F.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, which torch.compile neither decomposes nor fuses (graph/inductor.py)."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def _fake_gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(input, approximate=approximate)


@operator(_fake_gelu)
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu, which torch.compile neither decomposes nor fuses."""
    return F.gelu(input, approximate=approximate)


@operator(torch.softmax)
def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax, which torch.compile neither decomposes nor fuses."""
    return torch.softmax(input, dim, dtype=dtype)


def _setup_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.shape, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(input, weight, bias)


def _backward_layer_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, bias = ctx.saved_tensors
    _, mean, rstd = torch.native_layer_norm(input, ctx.shape, weight, bias, ctx.eps)
    wanted = [each is not None and each.requires_grad for each in (input, weight, bias)]
    grads = torch.ops.aten.native_layer_norm_backward(
        grad, input, ctx.shape, mean, rstd, weight, bias, wanted
    )
    return grads[0], None, grads[1], grads[2], None


def _setup_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.approximate = inputs
    ctx.save_for_backward(input)


def _backward_gelu(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (input,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(grad, input, approximate=ctx.approximate), None


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
    ctx.save_for_backward(output)


def _backward_softmax(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (output,) = ctx.saved_tensors
    grad = torch.ops.aten._softmax_backward_data(grad, output, ctx.dim, output.dtype)
    return grad.to(ctx.dtype), None, None


differentiable("layer_norm", _backward_layer_norm, _setup_layer_norm)
differentiable("gelu", _backward_gelu, _setup_gelu)
differentiable("softmax", _backward_softmax, _setup_softmax)
