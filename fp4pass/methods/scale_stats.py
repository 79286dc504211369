"""Counts of the block scales of a quantized weight, and of their distances from naive ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import ShapeError
from ..ops.checks import require_block_scales
from .search import search_scales


def scale_offsets(weight: Tensor, state: QuantState) -> dict[int, int]:
    """Count the blocks of a state by how many steps their scale is above that of `naive`.

    A step goes from one scale of the format to the next larger one. Blocks of zeros of the `weight`
    [N, K] are not counted. Returns {steps: blocks}, ascending; raises ShapeError.
    """
    if weight.shape != state.shape:
        raise ShapeError(
            f"The weight has shape {tuple(weight.shape)} and its quantized state {state.shape}. "
            "Give the dense weight as [N, K]; a transposed one with .t()."
        )
    fmt = state.format
    require_block_scales(fmt)
    naive = search_scales(weight, fmt, state.global_scale, "naive")
    counted = weight.detach().unflatten(1, (-1, fmt.block)).any(-1)  # [N, K / block]
    # Bytes ascend with the scales they stand for.
    steps = (state.scale.int() - naive.scale.int())[counted]
    return {offset - 255: count for offset, count in _counts(steps + 255)}


def scale_counts(scale: QuantState | Tensor, fmt: Format) -> dict[float, int]:
    """Count the blocks by scale, without the global scale: {scale: blocks}, ascending, NaN last."""
    require_block_scales(fmt)
    bits = scale.scale if isinstance(scale, QuantState) else scale.view(torch.uint8)
    found: dict[float, int] = {}
    for byte, count in _counts(bits):
        # One NaN for all bytes that stand for no scale.
        value = fmt.scale.decode(byte) if byte < fmt.scale.nan else math.nan
        found[value] = found.get(value, 0) + count
    return found


def _counts(numbers: Tensor) -> list[tuple[int, int]]:
    """Return the integers >= 0 that occur, ascending, and how often."""
    counts = numbers.flatten().int().bincount().tolist()
    return [(number, count) for number, count in enumerate(counts) if count]
