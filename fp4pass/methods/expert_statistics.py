"""What calibration collects of the inputs of a stack of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.experts.statistics import expert_hessian, hessian_of_all
from ..kernels.statistics.reference import diagonal_blocks
from .statistics import Stats

# Inputs x [T, K] or [T, k, K] and the experts ids [T, k] of each batch.
Inputs = tuple[tuple[Tensor, Tensor], ...]

# Average tokens that are worth as much as those of an expert itself, of K columns; docs/moe.md has
# what others cost.
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

    Example:
        >>> sums = torch.stack([torch.eye(32), 3 * torch.eye(32)])
        >>> counts = torch.tensor([1, 3])
        >>> stats = fp4pass.methods.ExpertStats(hessian=sums, tokens=4, counts=counts)
        >>> stats.expert(1, prior=2.0).hessian[0, 0]
        tensor(5.)
    """

    counts: Tensor | None = None
    routing: Tensor | None = None
    prior_block_hessian: Tensor | None = None
    prior_hessian: Tensor | None = None
    prior_counts: Tensor | None = None

    def to(self, device: torch.device) -> ExpertStats:
        """Return the same statistics on a device."""
        moved: dict[str, Any] = {n: each.to(device) for n, each in self._tensors().items()}
        return dataclasses.replace(self, **moved)

    def merged(self, other: Stats) -> ExpertStats:
        """Return the statistics of both sequences of inputs, as far as both have them."""
        found: dict[str, Any] = dict.fromkeys(self._tensors())
        for name, ours in self._tensors().items():
            theirs = getattr(other, name)
            found[name] = None if theirs is None else ours + theirs.to(ours.device)
        found["input_amax"] = max(self.input_amax, other.input_amax)
        return dataclasses.replace(self, **found, tokens=self.tokens + other.tokens)

    def expert(self, index: int, prior: float | None) -> Stats:
        """Return the statistics of one expert, blended with `prior` average tokens."""
        assert self.counts is not None, "the observer counts"
        found = {}
        for name, own, average in self._sums(index):
            worth = _PRIORS[name](own.shape[-1]) if prior is None else prior
            found[name] = own + worth * average
        tokens = int(self.counts[index])
        return Stats(tokens=tokens, input_amax=self.input_amax, **found)

    def _sums(self, index: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, the sum and the average of each statistic of one expert."""
        shown = self._shown(index)
        for name, own in self.totals().items():
            prior = getattr(self, f"prior_{name}")
            if shown and prior is not None:
                yield name, own[index], prior[index] / shown
            else:
                yield name, own[index], own.sum(0) / max(self.tokens, 1)

    def _shown(self, index: int) -> int:
        """Return how many tokens an expert was shown, chosen or not."""
        return 0 if self.prior_counts is None else int(self.prior_counts[index])

    def _tensors(self) -> dict[str, Tensor]:
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: each for name, each in known.items() if isinstance(each, Tensor)}


@dataclass(frozen=True, eq=False)
class ExpertInputs(ExpertStats):
    """Statistics whose Hessians are made of inputs when they are asked for, one expert at a time.

    Attributes:
        inputs: what the experts were called with.
        prior_inputs: what each expert was shown, chosen or not.

    Example:
        >>> inputs = ((torch.ones(3, 32), torch.tensor([[0], [1], [1]])),)
        >>> counts = torch.tensor([1, 2])
        >>> stats = fp4pass.methods.ExpertInputs(tokens=3, counts=counts, inputs=inputs)
        >>> stats.expert(1, prior=0.0).hessian[0, 0]
        tensor(2.)
    """

    inputs: Inputs = ()
    prior_inputs: Inputs = ()

    def has(self, need: str) -> bool:
        """Return whether a statistic was collected."""
        return need in _PRIORS and bool(self.inputs)

    def merged(self, other: Stats) -> ExpertInputs:
        """Return the statistics of both sequences of inputs."""
        assert isinstance(other, ExpertInputs), "stacks that share a weight are observed alike"
        found: dict[str, Any] = vars(super().merged(other))
        for name in ("inputs", "prior_inputs"):
            found[name] = getattr(self, name) + getattr(other, name)
        return ExpertInputs(**found)

    def _sums(self, index: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        own = self._hessian(self.inputs, index)
        shown = self._shown(index)
        average = self._hessian(self.prior_inputs, index) / shown if shown else self._average
        yield "hessian", own, average
        yield "block_hessian", diagonal_blocks(own), diagonal_blocks(average)

    def _hessian(self, inputs: Inputs, index: int) -> Tensor:
        assert self.counts is not None, "the observer counts"
        return expert_hessian(inputs, index, self.counts.device)

    @cached_property
    def _average(self) -> Tensor:
        """The average of what all experts read [K, K]."""
        assert self.counts is not None, "the observer counts"
        total = hessian_of_all(self.inputs, len(self.counts), self.counts.device)
        return total / max(self.tokens, 1)
