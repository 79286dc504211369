"""Quantize activations in C++, alone or after a norm or an activation function."""

from __future__ import annotations

import math
from ctypes import byref
from functools import lru_cache, partial

from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common.rounding import global_multiplier
from ..cpu.library import Grid, Rounding, function, tables, threads_for
from ..experts.naive import experts_quantize_ref
from ..rotate.naive import rotate_quantize_ref
from .naive import activate_quantize_ref, norm_quantize_ref, quantize_ref


@lru_cache(maxsize=64)
def _rounding(fmt: Format) -> Rounding | None:
    """Return how blocks are rounded, but for the global scale; None if it is not known there."""
    element, scale = fmt.element, fmt.scale
    if element.minifloat is None or (scale.mantissa_bits and not scale.subnormal):
        return None
    return Rounding(
        element=Grid(*element.minifloat, element.max),
        scale=Grid(scale.mantissa_bits, 1 - scale.bias, scale.max),
        last=scale.last,
        nan=scale.nan,
        carry=element.carry,
        shift=127 - scale.bias + math.frexp(element.max)[1] - 1,
        steps=tables(fmt)[-1],
        full=element.max,
    )


def quantize_cpu(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scale bits of activations x [..., K], as `quantize_ref`."""
    call = function("quantize", x.dtype, fmt)
    rounding = None if call is None else _rounding(fmt)
    if call is None or rounding is None or scale_method != "naive":
        return quantize_ref(x, global_scale, fmt, scale_method)
    if global_scale is not None:
        # As the reference has it in float32.
        factor = global_multiplier(global_scale, fmt)
        full = fmt.element.max * factor
        rounding = Rounding.from_buffer_copy(rounding)
        rounding.has_global_scale = True
        rounding.global_scale, rounding.full = float(factor), float(full)
    x = x.contiguous()
    packed, scale = empty_blocks(x, fmt)
    blocks, threads = scale.numel(), threads_for(x.numel())
    pointers = (each.data_ptr() for each in (x, packed, scale))
    call(*pointers, blocks, fmt.block, byref(rounding), threads)
    return packed, scale


activate_quantize_cpu = partial(activate_quantize_ref, quantize=quantize_cpu)
norm_quantize_cpu = partial(norm_quantize_ref, quantize=quantize_cpu)
experts_quantize_cpu = partial(experts_quantize_ref, quantize=quantize_cpu)
rotate_quantize_cpu = partial(rotate_quantize_ref, quantize=quantize_cpu)
