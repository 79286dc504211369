"""What calibration collects of the input of a linear layer: a field of Stats each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.rotate.naive import rotate_blocks, rotate_hessian
from ..kernels.statistics.naive import HESSIAN_BLOCK, diagonal_blocks, observe_cross_ref

Update = Callable[[Tensor, Tensor, Tensor | None], None]


def _statistic(
    shape: Callable[[int], tuple[int, ...]],
    rotate: Callable[[Tensor, int], Tensor] | None = None,
    update: Update | None = None,
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Any:
    """Return a field of Stats: a float32 total over the tokens of inputs x [..., K], first zero.

    Args:
        shape: that of the total, given K.
        rotate: returns the total of inputs that are rotated in blocks; None if it cannot be told.
        update: adds x to a total in place, given both and the same tokens in the float model, None
            outside of layer-by-layer calibration; None for what the operators `observe` add to.
        merge: returns the total of two sequences of inputs.
    """
    metadata = {"shape": shape, "rotate": rotate, "update": update, "merge": merge}
    return field(default=None, metadata=metadata)


def _square(columns: int) -> tuple[int, int]:
    return columns, columns


def _blocks(columns: int) -> tuple[int, int, int]:
    return math.ceil(columns / HESSIAN_BLOCK), HESSIAN_BLOCK, HESSIAN_BLOCK


def _add_cross(total: Tensor, x: Tensor, reference: Tensor | None) -> None:
    if reference is not None:
        observe_cross_ref(x, reference, total)


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of the input of one linear layer; None for what was not collected.

    Attributes:
        block_hessian: float32 [ceil(K / 32), 32, 32], the sum over tokens of x x^T in blocks.
        tokens: number of tokens.
        input_amax: largest magnitude; 0.0 without tokens.
        hessian: float32 [K, K], the whole sum.
        cross: float32 [K, K], the sum of (a - x) x^T, where the float model has the input a.

    Example:
        >>> stats = fp4pass.methods.Stats(hessian=torch.eye(32), tokens=1)
        >>> both = stats.merged(stats)
        >>> both.tokens, both.hessian[0, 0]
        (2, tensor(2.))
    """

    block_hessian: Tensor | None = _statistic(_blocks, rotate_blocks)  # noqa: RUF009
    tokens: int = 0
    input_amax: float = 0.0
    hessian: Tensor | None = _statistic(_square, rotate_hessian)  # noqa: RUF009
    cross: Tensor | None = _statistic(_square, update=_add_cross)  # noqa: RUF009

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return getattr(self, need) is not None

    def totals(self) -> dict[str, Tensor]:
        """Return the tensors that were collected, by name."""
        return {name: value for name in STATISTICS if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Stats:
        """Return the same statistics on a device."""
        moved: dict[str, Any] = {name: total.to(device) for name, total in self.totals().items()}
        return dataclasses.replace(self, **moved)

    def merged(self, other: Stats) -> Stats:
        """Return the statistics of both sequences of inputs, as far as both have them."""
        theirs, found = other.totals(), {}
        for name, total in self.totals().items():
            if name in theirs:
                merge = STATISTICS[name]["merge"]
                found[name] = merge(total, theirs[name].to(total.device))
        amax = max(self.input_amax, other.input_amax)
        return Stats(tokens=self.tokens + other.tokens, input_amax=amax, **found)

    def rotated(self, rotation: int) -> Stats:
        """Return the statistics of rotated inputs, with an upper bound as the largest magnitude.

        A rotation by more than 32 needs the whole Hessian, else blocks count as uncorrelated.
        """
        found = {
            name: STATISTICS[name]["rotate"](total, rotation)
            for name, total in self.totals().items()
            if STATISTICS[name]["rotate"] is not None
        }
        if self.hessian is not None:
            found["block_hessian"] = diagonal_blocks(found["hessian"])
        return Stats(tokens=self.tokens, input_amax=self.input_amax * math.sqrt(rotation), **found)


# How each statistic is kept, by its name (`_statistic`).
STATISTICS = {each.name: each.metadata for each in dataclasses.fields(Stats) if each.metadata}
