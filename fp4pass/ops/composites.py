"""Composite functions of PyTorch, as operators that torch.compile keeps whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .registration import Backward, operator


def layer_norm_ref(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, which torch.compile neither decomposes nor fuses (graph/inductor.py)."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def gelu_ref(input: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu, which torch.compile neither decomposes nor fuses."""
    return F.gelu(input, approximate=approximate)


def softmax_ref(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
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


layer_norm = operator(
    layer_norm_ref,
    shapes=layer_norm_ref,
    backward=Backward(_backward_layer_norm, _setup_layer_norm),
)
gelu = operator(gelu_ref, shapes=gelu_ref, backward=Backward(_backward_gelu, _setup_gelu))
softmax = operator(
    softmax_ref, shapes=softmax_ref, backward=Backward(_backward_softmax, _setup_softmax)
)
