"""Every operator of `torch.ops.fp4pass`, declared once (registration.py).

A format crosses an operator as its key and a block scale as its uint8 bits. `global_scale` is the
stored number, float32 [1] or None for 1, and `Format.multiplies` of the format tells whether it
multiplies or divides. All operators are functional but those that observe. NVIDIA GPUs
run the Triton kernels, everything else the references, which document the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.packing import PackedWeight, empty_blocks, empty_rows, empty_weight
from ..kernels.attention import naive as attentions
from ..kernels.compute_fp8.naive import activate_round_ref, norm_round_ref
from ..kernels.dequantize.naive import dequantize_ref
from ..kernels.experts import naive as mixtures
from ..kernels.linear import naive as products
from ..kernels.norm.naive import add_rms_norm_ref, rms_norm_ref, sums_of_squares
from ..kernels.quantize import naive as quantizers
from ..kernels.reduce.naive import all_reduce_add_ref, all_reduce_ref
from ..kernels.rotate.naive import rotate_quantize_ref, rotate_ref
from ..kernels.search.joint_reference import gptq_ref, joint_ref
from ..kernels.search.reference import search_ref, search_stack_ref
from ..kernels.statistics.naive import observe_full_ref, observe_ref
from . import checks
from .checks import FLOATS as FLOATS
from .registration import Backward, operator, save_product
from .registration import call as call

search = operator(
    search_ref,
    triton="kernels.search.triton",
    shapes=empty_weight,
    checks=(checks.require_objective, checks.require_block_hessian),
)
search_stack = operator(search_stack_ref, triton="kernels.search.triton", shapes=empty_weight)
joint = operator(
    joint_ref,
    triton="kernels.search.joint_triton",
    shapes=empty_weight,
    checks=(checks.require_block_scales, checks.require_block_hessian),
)
gptq = operator(
    gptq_ref,
    triton="kernels.search.joint_triton",
    shapes=lambda weight, fmt, start, stop: empty_weight(weight[start:stop], fmt),
    checks=(checks.require_block_scales, checks.require_hessian),
)
observe = operator(
    observe_ref,
    triton="kernels.statistics.triton",
    shapes=lambda: None,
    checks=(checks.require_observed,),
    mutates=("hessian", "count", "amax"),
)
# One dense product, which needs no kernel.
observe_full = operator(
    observe_full_ref,
    shapes=lambda: None,
    checks=(checks.require_observed,),
    mutates=("hessian", "count", "amax"),
)
dequantize = operator(
    dequantize_ref,
    triton="kernels.dequantize.triton",
    cpu=True,
    shapes=lambda packed, fmt, dtype: packed.new_empty(
        (*packed.shape[:-1], fmt.columns(packed.shape[-1])), dtype=dtype
    ),
)


def _setup_rounding(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.mark_non_differentiable(*outputs)
    ctx.gradients = (None,) * len(inputs)


# Codes and scales have no gradient; that of x flows through the linear operator instead.
ROUNDING = Backward(lambda ctx, *_: ctx.gradients, _setup_rounding)


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # The first result is the sum of the first two arguments where there is a residual.
    ctx.adds, ctx.others = inputs[1] is not None, (None,) * (len(inputs) - 2)
    ctx.mark_non_differentiable(*output[ctx.adds :])


def _norm_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    of_sum = grads[0] if ctx.adds else None
    return of_sum, of_sum, *ctx.others


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rotation = inputs[1]


def _rotate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # The matrix is its own transpose.
    return rotate(grad, ctx.rotation), None


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    factors = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), factors


dynamic_global_scale = operator(
    quantizers.dynamic_global_scale_ref,
    triton="kernels.quantize.triton",
    shapes=lambda x: x.new_empty(1, dtype=torch.float32),
    backward=ROUNDING,
)
quantize = operator(
    quantizers.quantize_ref,
    triton="kernels.quantize.triton",
    cpu=True,
    shapes=empty_blocks,
    checks=(checks.require_quantizable,),
    backward=ROUNDING,
)
norm_quantize = operator(
    quantizers.norm_quantize_ref,
    triton="kernels.quantize.triton",
    cpu=True,
    shapes=lambda x, residual, fmt: (
        x.new_empty(0 if residual is None else x.shape),
        *empty_blocks(x, fmt),
    ),
    checks=(checks.require_quantizable,),
    backward=Backward(_norm_gradients, _setup_norm),
)
activate_quantize = operator(
    quantizers.activate_quantize_ref,
    triton="kernels.quantize.triton",
    cpu=True,
    shapes=empty_blocks,
    checks=(checks.require_quantizable,),
    backward=ROUNDING,
)
# Those without gradients or checks are put into graphs by passes, which have both made.
activate_round = operator(
    activate_round_ref, triton="kernels.compute_fp8.operands_triton", shapes=_rounded
)
norm_round = operator(
    norm_round_ref,
    triton="kernels.compute_fp8.operands_triton",
    shapes=lambda x, residual: (x.new_empty(0 if residual is None else x.shape), *_rounded(x)),
)
rotate = operator(
    rotate_ref,
    triton="kernels.rotate.triton",
    shapes=lambda x: x.new_empty(x.shape),
    checks=(checks.require_float, checks.require_rotation),
    backward=Backward(_rotate_gradients, _setup_rotate),
)
rotate_quantize = operator(
    rotate_quantize_ref,
    triton="kernels.rotate.triton",
    cpu=True,
    shapes=empty_blocks,
    checks=(checks.require_quantizable, checks.require_rotation),
    backward=ROUNDING,
)
rms_norm = operator(
    rms_norm_ref, triton="kernels.norm.triton", shapes=lambda x: x.new_empty(x.shape)
)
add_rms_norm = operator(
    add_rms_norm_ref,
    triton="kernels.norm.triton",
    shapes=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
attention_span = operator(
    attentions.attention_span_ref,
    triton="kernels.attention.triton",
    shapes=lambda mask: (
        mask.new_empty((mask.shape[0], 2), dtype=torch.int32),
        mask.new_empty(attentions.COUNTERS, dtype=torch.int32),
    ),
)
attention = operator(
    attentions.attention_ref,
    triton="kernels.attention.triton",
    shapes=lambda q, cache: q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1], cache.values.shape[3])
    ),
)
rotary_attention = operator(
    attentions.rotary_attention_ref,
    triton="kernels.attention.triton",
    shapes=lambda q, cache: q.new_empty((*q.shape[:3], cache.values.shape[3])),
    mutates=("keys", "values"),
)
all_reduce = operator(
    all_reduce_ref, triton="kernels.reduce.triton", shapes=lambda x: x.new_empty(x.shape)
)
# Only a pass makes calls of it.
all_reduce_add = operator(
    all_reduce_add_ref,
    triton="kernels.reduce.triton",
    shapes=lambda x: (x.new_empty(x.shape), sums_of_squares(x)),
)


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.packed.shape[0]))


def _products(
    x: Tensor, weights: Sequence[PackedWeight], around: products.Around = products.ALONE
) -> list[Tensor]:
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
    products.linear_ref,
    triton="kernels.linear.triton",
    cpu=True,
    shapes=_product,
    checks=(checks.require_float, checks.require_compute),
    backward=_blocks_gradients(bias=4),
)
linear_quantized = operator(
    products.linear_quantized_ref,
    triton="kernels.linear.triton",
    cpu=True,
    shapes=_product,
    checks=(checks.require_compute,),
    backward=_blocks_gradients(bias=7, rotation=9),
)
# Passes put these into graphs whose gradients are made already, in place of operators that have
# checked their arguments: they have no gradients and no checks of their own.
linear_group = operator(
    products.linear_group_ref, triton="kernels.linear.triton", cpu=True, shapes=_products
)
linear_quantized_group = operator(
    products.linear_quantized_group_ref,
    triton="kernels.linear.triton",
    cpu=True,
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


def _of_bias(ctx: Any, grad: Tensor, ids: Tensor, stack: Tensor) -> Tensor:
    """Return the gradient [E, N] in the biases."""
    # A product sums in the same order on every run, which index_add on a GPU does not.
    experts = torch.arange(stack.shape[0], device=ids.device)
    # [E, T * k], 1 where a pair is an expert's.
    chosen = (experts.unsqueeze(1) == ids.reshape(-1)).to(grad.dtype)
    found: Tensor = (chosen @ grad.reshape(-1, grad.shape[-1])).to(ctx.bias_dtype)
    return found


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
    mixtures.experts_linear_ref,
    triton="kernels.experts.triton",
    shapes=_expert_products,
    checks=(checks.require_float, checks.require_pairs, checks.require_stack),
    backward=_expert_gradients(ids=1),
)
experts_linear_quantized = operator(
    mixtures.experts_linear_quantized_ref,
    triton="kernels.experts.triton",
    shapes=_expert_products,
    checks=(checks.require_float, checks.require_pairs_of_codes, checks.require_stack),
    backward=_expert_gradients(ids=4),
)
# The inputs of experts that have a global scale each, as some libraries calibrate them.
experts_quantize = operator(
    mixtures.experts_quantize_ref,
    triton="kernels.experts.triton",
    cpu=True,
    shapes=lambda x, ids, fmt: empty_rows(x, ids.shape, fmt),
    checks=(checks.require_quantizable, checks.require_pairs),
    backward=ROUNDING,
)
# All that the experts of a mixture compute, where no gradient is asked for. Only the pass over
# compiled graphs calls it, in place of operators that have checked their arguments.
experts_mixture = operator(
    mixtures.experts_mixture_ref,
    triton="kernels.experts.triton",
    shapes=lambda x, down_weight: x.new_empty((x.shape[0], down_weight.packed.shape[1])),
    checks=(checks.require_float, checks.require_pairs, checks.require_stack),
)
# The gradient in x of the other two, which has none of its own.
experts_linear_transposed = operator(
    mixtures.experts_linear_transposed_ref,
    shapes=lambda grad, ids, weight, fmt: grad.new_empty(
        (*ids.shape, fmt.columns(weight.packed.shape[-1]))
    ),
)
# Stacks in floating point, where a mixture is calibrated or keeps one.
experts_dense = operator(
    mixtures.experts_dense_ref,
    shapes=lambda x, ids, weight: x.new_empty((*ids.shape, weight.shape[1])),
    checks=(checks.require_float, checks.require_pairs),
    backward=Backward(
        _dense_gradients, lambda ctx, inputs, output: save_product(ctx, inputs, inputs[:3], 3)
    ),
)
experts_outer = operator(
    mixtures.experts_outer_ref,
    shapes=lambda grad, x, experts: grad.new_empty((experts, grad.shape[-1], x.shape[-1])),
)
observe_experts = operator(
    mixtures.observe_experts_ref,
    triton="kernels.statistics.triton",
    shapes=lambda: None,
    checks=(checks.require_pairs,),
    mutates=("hessian", "count", "amax", "routing"),
)
