"""Block scales from the largest magnitude, as every tool has them; the base line."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.formats import Format
from ..core.quant_state import QuantState
from .base import Stats, method, search_scales


@dataclass(frozen=True)
class Naive:
    """No options."""


@method("naive", Naive)
def naive(
    weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Naive
) -> QuantState:
    """amax / element.max rounded to a scale; for powers of two the exponent of amax."""
    return search_scales(weight, fmt, global_scale, "naive")
