"""Block scales of least output error, by the block Hessians of the calibration inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..formats import Format
from ..packing import QuantState
from .base import Stats, method, search_scales


@dataclass(frozen=True)
class Hessian:
    """No options yet: codes are rounded to nearest."""


@method("hessian", Hessian, needs=("block_hessian",))
def hessian(
    weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Hessian
) -> QuantState:
    """The scale of each block that minimizes r^T H r, over all scales of the format."""
    return search_scales(weight, fmt, global_scale, "hessian", stats.block_hessian)
