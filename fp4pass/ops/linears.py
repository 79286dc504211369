"""Operators that multiply activations and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..kernels.linear.int8_reference import dequantize_rows_ref, linear_int8_ref
from ..kernels.linear.reference import (
    linear_codebook_ref,
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from .activations import rotate
from .checks import require_float, require_packed_weight
from .registration import Backward, operator
from .weights import dequantize, dequantize_codebook


def _product(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _products(x: Tensor, packed: Sequence[Tensor]) -> list[Tensor]:
    return [_product(x, each) for each in packed]


def _backward(bias: int, save: Callable[..., Any], times: Callable[..., Tensor]) -> Backward:
    """Return the gradients of x, the first argument, and of the bias, at that place."""
    # save: (ctx, inputs) to the weight's tensors; times: (ctx, tensors, grad) to grad times weight.

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*save(ctx, inputs))
        ctx.bias_dtype = None if inputs[bias] is None else inputs[bias].dtype
        ctx.arguments = len(inputs)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * ctx.arguments
        if ctx.needs_input_grad[0]:
            grads[0] = times(ctx, ctx.saved_tensors, grad)
        if ctx.needs_input_grad[bias]:
            grads[bias] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return tuple(grads)

    return Backward(gradients, setup)


def _blocks_backward(bias: int, rotation: int | None = None) -> Backward:
    """Return the backward for a weight in blocks: its tensors, the bias, its format in order."""

    def save(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ctx.fmt = inputs[bias + 1]
        ctx.rotation = 0 if rotation is None else inputs[rotation]
        return inputs[bias - 3 : bias]

    def times(ctx: Any, stored: tuple[Any, ...], grad: Tensor) -> Tensor:
        back = grad @ dequantize(*stored, ctx.fmt, grad.dtype)
        return rotate(back, ctx.rotation) if ctx.rotation else back

    return _backward(bias, save, times)


def _save_codebook(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, packed, absmax, _, rows, codebook = inputs
    ctx.weight = codebook, (rows, x.shape[-1])
    return packed, absmax


def _times_codebook(ctx: Any, stored: tuple[Any, ...], grad: Tensor) -> Tensor:
    return grad @ dequantize_codebook(*stored, *ctx.weight, grad.dtype)


def _times_int8(ctx: Any, stored: tuple[Any, ...], grad: Tensor) -> Tensor:
    codes, scale = stored
    return grad @ dequantize_rows_ref(codes, scale, grad.dtype)


linear = operator(
    linear_ref,
    triton="kernels.linear.triton:linear_triton",
    shapes=_product,
    checks=(require_float,),
    backward=_blocks_backward(bias=4),
)
linear_quantized = operator(
    linear_quantized_ref,
    triton="kernels.linear.triton:linear_quantized_triton",
    shapes=_product,
    backward=_blocks_backward(bias=7, rotation=9),
)
# A pass puts groups into graphs whose gradients are made already: they have none of their own.
linear_group = operator(
    linear_group_ref,
    triton="kernels.linear.triton:linear_group_triton",
    shapes=_products,
    checks=(require_float,),
)
linear_quantized_group = operator(
    linear_quantized_group_ref,
    triton="kernels.linear.triton:linear_quantized_group_triton",
    shapes=_products,
)
linear_codebook = operator(
    linear_codebook_ref,
    triton="kernels.linear.triton:linear_codebook_triton",
    shapes=lambda x, rows: x.new_empty((*x.shape[:-1], rows)),
    checks=(require_float, require_packed_weight),
    backward=_backward(3, _save_codebook, _times_codebook),
)
# Products of integers, which PyTorch has for GPUs too.
linear_int8 = operator(
    linear_int8_ref,
    shapes=lambda x, codes: x.new_empty((*x.shape[:-1], codes.shape[0])),
    checks=(require_float,),
    backward=_backward(3, lambda ctx, inputs: inputs[1:3], _times_int8),
)
