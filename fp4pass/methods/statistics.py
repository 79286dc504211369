"""What calibration collects of the input of a linear layer: a field of Stats each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.rotate.reference import rotate_blocks, rotate_hessian
from ..kernels.statistics.reference import HESSIAN_BLOCK, diagonal_blocks, observe_cross_ref

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
    """

    block_hessian: Tensor | None = _statistic(_blocks, rotate_blocks)  # noqa: RUF009
    tokens: int = 0
    input_amax: float = 0.0
    hessian: Tensor | None = _statistic(_square, rotate_hessian)  # noqa: RUF009
    cross: Tensor | None = _statistic(_square, update=_add_cross)  # noqa: RUF009

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

# Average tokens that are worth as much as those of an expert itself, of K columns.
_PRIORS: dict[str, Callable[[int], float]] = {
    "block_hessian": lambda columns: 32.0,
    "hessian": lambda columns: columns / 2,
}


@dataclass(frozen=True, eq=False)
class ExpertStats(Stats):
    """Statistics of the inputs of a stack of experts; Hessians are [E, ...], `tokens` the sum.

    Attributes:
        counts: int64 [E], tokens of each expert.
        routing: float32 [E], the sum of the weights that its tokens gave it.
        prior_block_hessian: the same sums over tokens that each expert was shown, chosen or not;
            without them the average is that of all experts.
        prior_hessian: the whole sums.
        prior_counts: int64 [E], so many tokens.
    """

    counts: Tensor | None = None
    routing: Tensor | None = None
    prior_block_hessian: Tensor | None = None
    prior_hessian: Tensor | None = None
    prior_counts: Tensor | None = None

    def to(self, device: torch.device) -> ExpertStats:
        """Return the same statistics on a device."""
        moved = {name: each.to(device) for name, each in vars(self).items() if _is_tensor(each)}
        return dataclasses.replace(self, **moved)

    def merged(self, other: Stats) -> ExpertStats:
        """Return the statistics of both sequences of inputs, as far as both have them."""
        pairs = ((name, each, getattr(other, name)) for name, each in vars(self).items())
        sums: dict[str, Any] = {
            name: ours + theirs.to(ours.device) if _is_tensor(ours) and _is_tensor(theirs) else None
            for name, ours, theirs in pairs
        }
        amax = max(self.input_amax, other.input_amax)
        return ExpertStats(**{**sums, "tokens": self.tokens + other.tokens, "input_amax": amax})

    def expert(self, index: int, prior: float | None) -> Stats:
        """Return the statistics of one expert, blended with `prior` average tokens."""
        assert self.counts is not None, "the observer counts"
        found = {}
        for name, own in self.totals().items():
            shown = getattr(self, f"prior_{name}")
            if shown is not None and self.prior_counts is not None and self.prior_counts[index]:
                average = shown[index] / self.prior_counts[index]
            else:
                average = own.sum(0) / max(self.tokens, 1)
            worth = _PRIORS[name](own.shape[-1]) if prior is None else prior
            found[name] = own[index] + worth * average
        tokens = int(self.counts[index])
        return Stats(tokens=tokens, input_amax=self.input_amax, **found)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
