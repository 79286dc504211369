"""Declare the operators on activations: quantization, rotation, norms, attention, reductions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.packing import empty_blocks
from ..kernels.attention.naive import (
    COUNTERS,
    attention_ref,
    attention_span_ref,
    rotary_attention_ref,
)
from ..kernels.norm.naive import add_rms_norm_ref, rms_norm_ref, sums_of_squares
from ..kernels.quantize.naive import (
    activate_quantize_ref,
    dynamic_global_scale_ref,
    norm_quantize_ref,
    quantize_ref,
)
from ..kernels.reduce.naive import all_reduce_add_ref, all_reduce_ref
from ..kernels.rotate.naive import rotate_quantize_ref, rotate_ref
from .checks import require_float, require_quantizable, require_rotation
from .registration import Backward, operator


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


dynamic_global_scale = operator(
    dynamic_global_scale_ref,
    triton="kernels.quantize.triton:dynamic_global_scale_triton",
    shapes=lambda x: x.new_empty(1, dtype=torch.float32),
    backward=ROUNDING,
)
quantize = operator(
    quantize_ref,
    triton="kernels.quantize.triton:quantize_triton",
    cpu="kernels.cpu.operators:quantize_cpu",
    shapes=empty_blocks,
    checks=(require_quantizable,),
    backward=ROUNDING,
)
norm_quantize = operator(
    norm_quantize_ref,
    triton="kernels.quantize.triton:norm_quantize_triton",
    cpu="kernels.cpu.operators:norm_quantize_cpu",
    shapes=lambda x, residual, fmt: (
        x.new_empty(0 if residual is None else x.shape),
        *empty_blocks(x, fmt),
    ),
    checks=(require_quantizable,),
    backward=Backward(_norm_gradients, _setup_norm),
)
activate_quantize = operator(
    activate_quantize_ref,
    triton="kernels.quantize.triton:activate_quantize_triton",
    cpu="kernels.cpu.operators:activate_quantize_cpu",
    shapes=empty_blocks,
    checks=(require_quantizable,),
    backward=ROUNDING,
)
rotate = operator(
    rotate_ref,
    triton="kernels.rotate.triton:rotate_triton",
    shapes=lambda x: x.new_empty(x.shape),
    checks=(require_float, require_rotation),
    backward=Backward(_rotate_gradients, _setup_rotate),
)
rotate_quantize = operator(
    rotate_quantize_ref,
    triton="kernels.rotate.triton:rotate_quantize_triton",
    cpu="kernels.cpu.operators:rotate_quantize_cpu",
    shapes=empty_blocks,
    checks=(require_quantizable, require_rotation),
    backward=ROUNDING,
)
# Those without gradients or checks are put into graphs by passes, which have both made.
rms_norm = operator(
    rms_norm_ref,
    triton="kernels.norm.triton:rms_norm_triton",
    shapes=lambda x: x.new_empty(x.shape),
)
add_rms_norm = operator(
    add_rms_norm_ref,
    triton="kernels.norm.triton:add_rms_norm_triton",
    shapes=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
attention_span = operator(
    attention_span_ref,
    triton="kernels.attention.triton:attention_span_triton",
    shapes=lambda mask: (
        mask.new_empty((mask.shape[0], 2), dtype=torch.int32),
        mask.new_empty(COUNTERS, dtype=torch.int32),
    ),
)
attention = operator(
    attention_ref,
    triton="kernels.attention.triton:attention_triton",
    shapes=lambda q, cache: q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1], cache.values.shape[3])
    ),
)
rotary_attention = operator(
    rotary_attention_ref,
    triton="kernels.attention.triton:rotary_attention_triton",
    shapes=lambda q, cache: q.new_empty((*q.shape[:3], cache.values.shape[3])),
    mutates=("keys", "values"),
)
all_reduce = operator(
    all_reduce_ref,
    triton="kernels.reduce.triton:all_reduce_triton",
    shapes=lambda x: x.new_empty(x.shape),
)
# Only a pass makes calls of it.
all_reduce_add = operator(
    all_reduce_add_ref,
    triton="kernels.reduce.triton:all_reduce_add_triton",
    shapes=lambda x: (x.new_empty(x.shape), sums_of_squares(x)),
)
