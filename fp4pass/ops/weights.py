"""Declare the operators on weights and other tensors: searches, statistics, and codes both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.packing import empty_weight
from ..kernels.dequantize.naive import dequantize_ref
from ..kernels.search.joint_reference import gptq_ref, joint_ref
from ..kernels.search.reference import search_ref, search_stack_ref
from ..kernels.statistics.naive import observe_full_ref, observe_ref
from .checks import (
    require_block_hessian,
    require_block_scales,
    require_hessian,
    require_objective,
    require_observed,
)
from .registration import operator


def _dense(packed: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], fmt.columns(packed.shape[-1])), dtype=dtype)


search = operator(
    search_ref,
    triton="kernels.search.triton:search_triton",
    shapes=empty_weight,
    checks=(require_objective, require_block_hessian),
)
search_stack = operator(
    search_stack_ref,
    triton="kernels.search.triton:search_stack_triton",
    shapes=empty_weight,
)
joint = operator(
    joint_ref,
    triton="kernels.search.joint_triton:joint_triton",
    shapes=empty_weight,
    checks=(require_block_scales, require_block_hessian),
)
gptq = operator(
    gptq_ref,
    triton="kernels.search.joint_triton:gptq_triton",
    shapes=lambda weight, fmt, start, stop: empty_weight(weight[start:stop], fmt),
    checks=(require_block_scales, require_hessian),
)
observe = operator(
    observe_ref,
    triton="kernels.statistics.triton:observe_triton",
    shapes=lambda: None,
    checks=(require_observed,),
    mutates=("hessian", "count", "amax"),
)
# One dense product, which needs no kernel.
observe_full = operator(
    observe_full_ref,
    shapes=lambda: None,
    checks=(require_observed,),
    mutates=("hessian", "count", "amax"),
)
dequantize = operator(
    dequantize_ref,
    triton="kernels.dequantize.triton:dequantize_triton",
    cpu="kernels.cpu.operators:dequantize_cpu",
    shapes=_dense,
)
