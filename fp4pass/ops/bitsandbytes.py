"""Products of the layers in fp4pass.nn: by weights in codebooks and in 8-bit integers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear.int8_reference import dequantize_rows_ref, linear_int8_ref
from .dispatch import differentiable, operator, require_float


def _fake_linear_codebook(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, rows: int, scheme: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@operator(_fake_linear_codebook)
def linear_codebook(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, rows: int, scheme: str
) -> Tensor:
    """x [..., K] times a weight [rows, K] in a codebook, transposed, plus bias: [..., rows].

    The weight is dequantized to x's dtype, for the gradient of x once more.
    """
    require_float(x)
    weight = torch.ops.fp4pass.dequantize_codebook(
        packed, absmax, scheme, (rows, x.shape[-1]), x.dtype
    )
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _setup_codebook(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, absmax, bias, rows, scheme = inputs
    ctx.save_for_backward(packed, absmax)
    ctx.weight = scheme, (rows, x.shape[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_codebook(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = None
    if ctx.needs_input_grad[0]:
        stored = *ctx.saved_tensors, *ctx.weight
        grad_x = grad @ torch.ops.fp4pass.dequantize_codebook(*stored, grad.dtype)
    return grad_x, None, None, _bias_gradient(ctx, grad), None, None


def _fake_linear_int8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@operator(_fake_linear_int8)
def linear_int8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """x [..., K] times a weight [N, K] of int8 rows, transposed, plus bias: [..., N] in x's dtype.

    x is rounded to int8 rows too, but for its outliers (kernels/int8_ref.py). Its gradient is that
    of the dense product, as if rounding were the identity (straight-through).
    """
    require_float(x)
    return linear_int8_ref(x, codes, scale, bias, threshold)


def _setup_int8(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale, bias, _ = inputs
    ctx.save_for_backward(codes, scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_int8(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = None
    if ctx.needs_input_grad[0]:
        codes, scale = ctx.saved_tensors
        grad_x = grad @ dequantize_rows_ref(codes, scale, grad.dtype)
    return grad_x, None, None, _bias_gradient(ctx, grad), None


def _bias_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Of the bias, which is the fourth argument of both."""
    if not ctx.needs_input_grad[3]:
        return None
    return grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)


differentiable("linear_codebook", _backward_codebook, _setup_codebook)
differentiable("linear_int8", _backward_int8, _setup_int8)
