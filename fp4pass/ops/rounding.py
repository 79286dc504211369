"""Operators that quantize activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from ..formats import get_format
from ..kernels.norm_quantize_ref import rms_norm_quantize_ref
from ..kernels.quantize_ref import global_divisor_ref, quantize_ref
from .dispatch import differentiable, empty_blocks, operator, require_blocks, require_float, run


def _fake_global_divisor(x: Tensor, fmt: str) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


@operator(_fake_global_divisor)
def global_divisor(x: Tensor, fmt: str) -> Tensor:
    """1 / global_scale for the amax of this x: [1] float32, a power of two."""
    form = get_format(fmt)
    return run(global_divisor_ref, x, form, x, form)


def _fake_quantize(x: Tensor, global_divisor: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_quantize)
def quantize(x: Tensor, global_divisor: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize activations x [..., K] in blocks along K.

    global_divisor: [1] float32 or None. Returns packed uint8 [..., K / 2] and scale bits
    [..., K / block].
    """
    form = get_format(fmt)
    require_float(x)
    require_blocks(x, form)
    return run(quantize_ref, x, form, x, global_divisor, form)


def _fake_rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: str
) -> tuple[Tensor, Tensor]:
    return empty_blocks(x, fmt)


@operator(_fake_rms_norm_quantize)
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: str
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of x [..., K] with weight [K], as `quantize` does its input."""
    form = get_format(fmt)
    require_float(x)
    require_blocks(x, form)
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ShapeError(
            f"The weight of an RMSNorm is {tuple(weight.shape)} {weight.dtype}; for an input "
            f"{tuple(x.shape)} {x.dtype} it is {tuple(x.shape[-1:])} {x.dtype}."
        )
    return run(rms_norm_quantize_ref, x, form, x, weight, eps, global_divisor, form)


def _setup_rounding(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))
    ctx.arguments = len(inputs)


def _backward_rounding(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    """Codes and scales have no gradient; that of x flows through the product instead."""
    return (None,) * ctx.arguments


differentiable("quantize", _backward_rounding, _setup_rounding)
differentiable("rms_norm_quantize", _backward_rounding, _setup_rounding)
differentiable("global_divisor", _backward_rounding, _setup_rounding)
