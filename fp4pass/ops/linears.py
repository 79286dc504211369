"""Declare the operators that multiply activations and packed weights, or packed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.packing import PackedWeight, empty_rows
from ..kernels.experts.naive import (
    experts_dense_ref,
    experts_linear_quantized_ref,
    experts_linear_ref,
    experts_linear_transposed_ref,
    experts_mixture_ref,
    experts_outer_ref,
    experts_quantize_ref,
    observe_experts_ref,
)
from ..kernels.linear.naive import (
    ALONE,
    Around,
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from ..kernels.norm.naive import sums_of_squares
from .activations import ROUNDING, rotate
from .checks import (
    require_compute,
    require_float,
    require_pairs,
    require_pairs_of_codes,
    require_quantizable,
    require_stack,
)
from .registration import Backward, operator, save_product
from .weights import dequantize


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.packed.shape[0]))


def _products(x: Tensor, weights: Sequence[PackedWeight], around: Around = ALONE) -> list[Tensor]:
    dtype = x.dtype if around.factors is None else torch.bfloat16
    sizes = [each.packed.shape[0] for each in weights]
    sizes = sizes if around.gate is None else [sum(sizes) // 2]
    found = [x.new_empty((*x.shape[:-1], n), dtype=dtype) for n in sizes]
    return found if around.residual is None else [*found, sums_of_squares(found[0])]


def gradients_of(
    bias: int, save: Callable[..., Any], dense: Callable[..., Tensor], rotation: int | None = None
) -> Backward:
    """Return the derivatives in x, the first argument, and in the bias, at that place."""
    # save: (ctx, inputs) to the weight's tensors; dense: (ctx, tensors, dtype) to the weight.

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save_product(ctx, inputs, save(ctx, inputs), bias)
        ctx.rotation = 0 if rotation is None else inputs[rotation]

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * ctx.arguments
        if ctx.needs_input_grad[0]:
            back = grad @ dense(ctx, ctx.saved_tensors, grad.dtype)
            grads[0] = rotate(back, ctx.rotation) if ctx.rotation else back
        if ctx.needs_input_grad[bias]:
            grads[bias] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return tuple(grads)

    return Backward(gradients, setup)


def _blocks_gradients(bias: int, rotation: int | None = None) -> Backward:
    """Return the derivatives for a weight in blocks: its tensors, the bias, its format in order."""

    def save(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ctx.fmt = inputs[bias + 1]
        return inputs[bias - 3 : bias]

    def dense(ctx: Any, stored: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return dequantize(*stored, ctx.fmt, dtype)

    return gradients_of(bias, save, dense, rotation)


linear = operator(
    linear_ref,
    triton="kernels.linear.triton:linear_triton",
    cpu="kernels.cpu.operators:linear_cpu",
    shapes=_product,
    checks=(require_float, require_compute),
    backward=_blocks_gradients(bias=4),
)
linear_quantized = operator(
    linear_quantized_ref,
    triton="kernels.linear.triton:linear_quantized_triton",
    cpu="kernels.cpu.operators:linear_quantized_cpu",
    shapes=_product,
    checks=(require_compute,),
    backward=_blocks_gradients(bias=7, rotation=9),
)
# Passes put these into graphs whose gradients are made already, in place of operators that have
# checked their arguments: they have no gradients and no checks of their own.
linear_group = operator(
    linear_group_ref,
    triton="kernels.linear.triton:linear_group_triton",
    cpu="kernels.cpu.operators:linear_group_cpu",
    shapes=_products,
)
linear_quantized_group = operator(
    linear_quantized_group_ref,
    triton="kernels.linear.triton:linear_quantized_group_triton",
    cpu="kernels.cpu.operators:linear_quantized_group_cpu",
    shapes=lambda x, weights: _products(x, weights),
)


def _expert_products(x: Tensor, ids: Tensor, weight: PackedWeight) -> Tensor:
    return x.new_empty((*ids.shape, weight.packed.shape[1]))


def _expert_gradients(ids: int) -> Backward:
    """Return the derivatives in x, the first argument, and in the bias; ids: the place of these."""
    # The stack's tensors, the bias and the format follow the ids.
    bias = ids + 4

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save_product(ctx, inputs, inputs[ids:bias], bias)
        ctx.fmt, ctx.dimensions = inputs[bias + 1], inputs[0].ndim

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chosen, *stack = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * ctx.arguments
        if ctx.needs_input_grad[0]:
            back = experts_linear_transposed(grad, chosen, *stack, None, ctx.fmt)
            grads[0] = back if ctx.dimensions == 3 else back.sum(1)
        if ctx.needs_input_grad[bias]:
            grads[bias] = _of_bias(ctx, grad, chosen, stack[0])
        return tuple(grads)

    return Backward(gradients, setup)


def _one_hot(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [E, T * k], 1 where a pair is an expert's."""
    experts = torch.arange(packed.shape[0], device=ids.device)
    return (experts.unsqueeze(1) == ids.reshape(-1)).to(dtype)


def _of_bias(ctx: Any, grad: Tensor, ids: Tensor, stack: Tensor) -> Tensor:
    """Return the gradient [E, N] in the biases."""
    # A product sums in the same order on every run, which index_add on a GPU does not.
    pairs = grad.reshape(-1, grad.shape[-1])
    found: Tensor = (_one_hot(ids, stack, grad.dtype) @ pairs).to(ctx.bias_dtype)
    return found


def _rows(grad: Tensor, ids: Tensor, weight: PackedWeight, fmt: Format) -> Tensor:
    return grad.new_empty((*ids.shape, fmt.columns(weight.packed.shape[-1])))


def _dense_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    save_product(ctx, inputs, inputs[:3], 3)


def _dense_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, ids, weight = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * 4
    if ctx.needs_input_grad[0]:
        back = experts_dense(grad, ids, weight.mT, None)
        grads[0] = back if x.ndim == 3 else back.sum(1)
    if ctx.needs_input_grad[2]:
        grads[2] = experts_outer(grad, x, ids, weight.shape[0]).to(weight.dtype)
    if ctx.needs_input_grad[3]:
        grads[3] = _of_bias(ctx, grad, ids, weight)
    return tuple(grads)


experts_linear = operator(
    experts_linear_ref,
    triton="kernels.experts.triton:experts_linear_triton",
    shapes=_expert_products,
    checks=(require_float, require_pairs, require_stack),
    backward=_expert_gradients(ids=1),
)
experts_linear_quantized = operator(
    experts_linear_quantized_ref,
    triton="kernels.experts.triton:experts_linear_quantized_triton",
    shapes=_expert_products,
    checks=(require_float, require_pairs_of_codes, require_stack),
    backward=_expert_gradients(ids=4),
)
# The inputs of experts that have a global scale each, as some libraries calibrate them.
experts_quantize = operator(
    experts_quantize_ref,
    triton="kernels.experts.triton:experts_quantize_triton",
    cpu="kernels.cpu.operators:experts_quantize_cpu",
    shapes=lambda x, ids, fmt: empty_rows(x, ids.shape, fmt),
    checks=(require_quantizable, require_pairs),
    backward=ROUNDING,
)
# All that the experts of a mixture compute, where no gradient is asked for. Only the pass over
# compiled graphs calls it, in place of operators that have checked their arguments.
experts_mixture = operator(
    experts_mixture_ref,
    triton="kernels.experts.triton:experts_mixture_triton",
    shapes=lambda x, down_weight: x.new_empty((x.shape[0], down_weight.packed.shape[1])),
    checks=(require_float, require_pairs, require_stack),
)
# The gradient in x of the other two, which has none of its own.
experts_linear_transposed = operator(experts_linear_transposed_ref, shapes=_rows)
# Stacks in floating point, where a mixture is calibrated or keeps one.
experts_dense = operator(
    experts_dense_ref,
    shapes=lambda x, ids, weight: x.new_empty((*ids.shape, weight.shape[1])),
    checks=(require_float, require_pairs),
    backward=Backward(_dense_gradients, _dense_setup),
)
experts_outer = operator(
    experts_outer_ref,
    shapes=lambda grad, x, experts: grad.new_empty((experts, grad.shape[-1], x.shape[-1])),
)
observe_experts = operator(
    observe_experts_ref,
    triton="kernels.statistics.triton:observe_experts_triton",
    shapes=lambda: None,
    checks=(require_pairs,),
    mutates=("hessian", "count", "amax", "routing"),
)
