"""Packed codes and scale bits back to numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..formats import Element, Format, element_table
from .rounding_ref import scale_values


@lru_cache(maxsize=64)
def _pair_table(element: Element, device: torch.device) -> Tensor:
    """The two values in each byte of packed codes: float32 [256, 2]."""
    values = element_table(element, device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)


def dequantize_ref(
    packed: Tensor, scale: Tensor, global_divisor: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """code * (scale / global_divisor), in float32 and then rounded to `dtype`.

    packed: [..., K / 2] uint8; scale: bits [..., K / block] uint8; global_divisor: [1] or None.
    Returns [..., K]. Exact in bfloat16 when the divisor is a power of two.
    """
    step = scale_values(scale, fmt.scale)
    if global_divisor is not None:
        step = step / global_divisor
    values = _pair_table(fmt.element, packed.device).index_select(0, packed.flatten().int())
    values = values.view(*scale.shape, fmt.block).mul_(step.unsqueeze(-1))
    return values.flatten(-2).to(dtype)
