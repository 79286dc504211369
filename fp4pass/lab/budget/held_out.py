"""Convert whole models and measure them on held-out text, and find the smallest within a KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...evaluation.intervals import SUMS, Bootstrap, intervals
from ...quantization.observers.batches import fast_dtype
from ...quantization.recipe import Recipe
from .choosing import Schemes, extremes, smallest_within
from .forwards import Forwards, mean_kl
from .groups import FLOAT, Group, Layers
from .models import Converter
from .result import Candidate
from .sensitivity import Costs, total

# Conversions of a search for a KL; a model within so much of it is near enough.
_TRIES, _NEAR = 6, 0.02


@dataclass
class Trials:
    """Whole models, each converted and measured once.

    Attributes:
        schemes: to choose from.
        text: tokens of the parts of the data.
        found: those that were measured for a budget, in order.
    """

    converter: Converter
    layers: Layers
    groups: Sequence[Group]
    costs: Sequence[Costs]
    forwards: Forwards
    schemes: Sequence[str]
    text: Mapping[str, int]
    found: dict[Schemes, Candidate] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """The weights of all groups."""
        return sum(group.weights for group in self.groups)

    def recipe(self, schemes: Schemes) -> Recipe:
        """Return the recipe of a model, whose main scheme is that of most of its weights."""
        sizes: dict[str, int] = {}
        for group, scheme in zip(self.groups, schemes, strict=True):
            sizes[scheme] = sizes.get(scheme, 0) + group.weights
        known = [scheme for scheme in sizes if scheme in self.layers.plans]
        main = max(known or self.layers.plans, key=lambda each: sizes.get(each, 0))
        chosen = {
            name: scheme
            for group, scheme in zip(self.groups, schemes, strict=True)
            for name in group.names
        }
        chosen |= dict.fromkeys(self.layers.unreached(self.groups), FLOAT)
        return self.converter.recipe(main, self.layers.rules_for(chosen))

    def measure(self, schemes: Schemes, label: str) -> Candidate:
        """Return a model, once it is measured; one that stays as it is has no KL.

        The last label that is given for its schemes is that of the model.
        """
        if schemes not in self.found:
            cost = total(self.costs, schemes)
            facts = (8 * cost.bytes / self.weights, cost.bytes, cost.kl)
            if set(schemes) == {FLOAT}:
                measured: tuple[float, float | None, float | None] = (0.0, 0.0, 0.0)
            else:
                model = self.converter.convert(self.recipe(schemes))
                with fast_dtype(model):
                    sums = self.forwards.compare(model)
                measured = (mean_kl(sums), *_interval(sums))
            self.found[schemes] = Candidate(label, *facts, *measured, schemes)
        self.found[schemes] = dataclasses.replace(self.found[schemes], label=label)
        return self.found[schemes]

    def smallest(self, kl: float) -> Candidate:
        """Return the smallest model that is measured to be within a KL, or else the best one."""
        # The predictions between which the wanted one is, and how far they are off.
        good, bad = 0.0, float("inf")
        asked, least = kl, extremes(self.costs)[0]
        for _ in range(_TRIES):
            schemes = smallest_within(self.costs, asked)
            if schemes is None:
                break
            known = schemes in self.found
            each = self.measure(schemes, "allocated")
            if each.kl <= kl:
                good = max(good, asked, each.predicted)
                if each.kl >= (1 - _NEAR) * kl or schemes == least:
                    break
            else:
                bad = min(bad, each.predicted)
            scaled = each.predicted * kl / each.kl if each.kl else 2 * asked
            inside = good < scaled < bad
            if known or not inside:
                scaled = good + (bad - good) / 2 if bad < float("inf") else 2 * asked
            asked = scaled
        within = [each for each in self.found.values() if each.kl <= kl and not _is_float(each)]
        if not within:
            schemes = self._nearest_float()
            return self.measure(schemes, "allocated")
        return min(within, key=lambda each: (each.bytes, each.kl))

    def _nearest_float(self) -> Schemes:
        """Return the choice with the least predicted KL that quantizes something."""
        best = tuple(min(each, key=lambda s: each[s].kl) for each in self.costs)
        if set(best) != {FLOAT}:
            return best
        options = [
            (cost.kl, i, scheme)
            for i, each in enumerate(self.costs)
            for scheme, cost in each.items()
            if scheme != FLOAT
        ]
        _, place, scheme = min(options)
        return (*best[:place], scheme, *best[place + 1 :])


def _is_float(each: Candidate) -> bool:
    return set(each.schemes) == {FLOAT}


def _interval(sums: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the interval of the mean of KL and tokens [sequences, 2]."""
    table = np.full((len(sums), len(SUMS)), np.nan)
    table[:, SUMS.index("kl")], table[:, SUMS.index("tokens")] = sums[:, 0], sums[:, 1]
    return intervals(table, Bootstrap()).get("kl", (None, None))
