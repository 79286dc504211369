"""Choose one of several costs for each group under a limit: the multiple-choice knapsack.

Exact, by dynamic programming over the choices that no other one beats. The linear relaxation of the
groups that are left bounds each partial choice from below, and completes it from above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# A choice: its weight, with a limit on the sum, and its value, with the least sum wanted.
Choice = tuple[float, float]
Array = np.ndarray[Any, Any]

# Of the largest sum: sums in another order differ by as much.
_ROUNDING = 1e-12


def cheapest(groups: Sequence[Sequence[Choice]], limit: float) -> list[int] | None:
    """Return the choice of each group with the least sum of values.

    Args:
        groups: the choices (weight, value) of each, finite numbers from 0 on.
        limit: of the sum of weights.

    Returns:
        The place of the choice in each group, of equal sums the one with the least weight; None if
        the lightest choices together are above the limit.
    """
    slack, more = (
        _ROUNDING * math.fsum(max(choice[i] for choice in choices) for choices in groups)
        for i in range(2)
    )
    relaxed = _Relaxed(groups)
    if relaxed.least > limit + slack:
        return None
    # The sums of partial choices, by increasing weight and decreasing value, and how each was made.
    weight, value = np.zeros(1), np.zeros(1)
    steps: list[tuple[Array, Array]] = []
    best = math.inf
    for i, choices in enumerate(groups):
        own = np.array(choices, dtype=np.float64)
        heavier = (weight[:, None] + own[:, 0]).ravel()
        dearer = (value[:, None] + own[:, 1]).ravel()
        lowest, reached = relaxed.behind(i, limit + slack - heavier)
        best = min(best, float((dearer + reached).min()))
        keep = np.flatnonzero(dearer + lowest <= best + more)
        keep = keep[np.lexsort((dearer[keep], heavier[keep]))]
        # Of those that are no heavier, each has to be the cheapest.
        before = np.minimum.accumulate(dearer[keep])
        first = np.ones(len(keep), dtype=bool)
        first[1:] = dearer[keep][1:] < before[:-1]
        keep = keep[first]
        weight, value = heavier[keep], dearer[keep]
        steps.append((keep // len(own), keep % len(own)))
    place, chosen = int(value.argmin()), []
    for parents, choice in reversed(steps):
        chosen.append(int(choice[place]))
        place = int(parents[place])
    return chosen[::-1]


class _Relaxed:
    """The linear relaxation of groups: a share of each step to a heavier choice is allowed."""

    def __init__(self, groups: Sequence[Sequence[Choice]]) -> None:
        hulls = [_hull(choices) for choices in groups]
        # The lightest choice of each group, and the steps from it: weight, value, group.
        self._first = np.array([hull[0] for hull in hulls]).reshape(-1, 2)
        steps = [
            (after[0] - before[0], after[1] - before[1], i)
            for i, hull in enumerate(hulls)
            for before, after in itertools.pairwise(hull)
        ]
        # The steps of one group come in their order, for its hull is convex.
        steps.sort(key=lambda step: step[1] / step[0])
        self._steps = np.array(steps).reshape(-1, 3)
        self.least = math.fsum(self._first[:, 0])

    def behind(self, group: int, left: Array) -> tuple[Array, Array]:
        """Return the least value of the groups behind one with some weight left.

        The first is not above it, the second one that whole choices reach; both are infinite where
        not even the lightest choices fit.
        """
        weight, value = self._first[group + 1 :].sum(0)
        steps = self._steps[self._steps[:, 2] > group, :2]
        sums = np.concatenate([[[0.0, value]], steps]).cumsum(0)
        room = left - weight
        fits, room = room >= 0.0, np.maximum(room, 0.0)
        lowest = np.interp(room, sums[:, 0], sums[:, 1])
        reached = sums[np.searchsorted(sums[:, 0], room, side="right") - 1, 1]
        return np.where(fits, lowest, math.inf), np.where(fits, reached, math.inf)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices on the lower convex hull, from the lightest to the cheapest."""
    hull: list[Choice] = []
    for weight, value in sorted(choices):
        if hull and value >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (weight, value)):
            hull.pop()
        hull.append((weight, value))
    return hull


def _is_above(first: Choice, middle: Choice, last: Choice) -> bool:
    """Return whether the middle of three choices is not below the line through the others."""
    rise = (middle[1] - first[1]) * (last[0] - first[0])
    return rise >= (last[1] - first[1]) * (middle[0] - first[0])
