"""Block scales of least squared error."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.formats import Format
from ..core.quant_state import QuantState
from .base import Stats, method, search_scales


@dataclass(frozen=True)
class Sse:
    """Options of the method "sse": none."""


@method("sse", Sse)
def sse(weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Sse) -> QuantState:
    """Choose the scale of each block that minimizes sum(r^2), over all scales of the format."""
    return search_scales(weight, fmt, global_scale, "sse")
