"""Block scales from the largest magnitude: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.formats import Format
from ..core.quant_state import QuantState
from .base import Stats, method, search_scales


@dataclass(frozen=True)
class Naive:
    """Options of the method "naive": none."""


@method("naive", Naive)
def naive(
    weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Naive
) -> QuantState:
    """Round amax / element.max to a scale; for powers of two take the exponent of amax."""
    return search_scales(weight, fmt, global_scale, "naive")
