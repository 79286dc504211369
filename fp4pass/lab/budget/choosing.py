"""Choose the schemes of all groups under a budget, and uniform models to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from .groups import FLOAT
from .knapsack import cheapest
from .sensitivity import Cost, Costs, total

# The scheme of each group, in order.
Schemes = tuple[str, ...]

# Budgets of the curve.
_POINTS = 24


def best_within(costs: Sequence[Costs], limit: float) -> Schemes | None:
    """Return the schemes of least total KL within a number of bytes, or None if all are larger."""
    return _solved(costs, limit, by_bytes=True)


def smallest_within(costs: Sequence[Costs], kl: float) -> Schemes | None:
    """Return the schemes of fewest bytes within a total KL, or None if there are none."""
    return _solved(costs, kl, by_bytes=False)


def extremes(costs: Sequence[Costs]) -> tuple[Schemes, Schemes]:
    """Return the smallest choice of all, and the largest."""
    ends = (min, max)
    found = [tuple(end(each, key=lambda s: each[s].bytes) for each in costs) for end in ends]
    return found[0], found[1]


def curve(costs: Sequence[Costs]) -> list[Cost]:
    """Return bytes and predicted KL of the best choices, from the smallest to the largest."""
    low, high = (total(costs, each).bytes for each in extremes(costs))
    budgets = [low + (high - low) * i / _POINTS for i in range(_POINTS + 1)]
    chosen = [best_within(costs, budget) for budget in budgets]
    found = {total(costs, each).bytes: total(costs, each) for each in chosen if each is not None}
    return [found[size] for size in sorted(found)]


def uniform(costs: Sequence[Costs], schemes: Sequence[str], limit: float) -> dict[str, Schemes]:
    """Return uniform choices within a number of bytes, by name.

    They have one scheme; or the largest that fits, and the next larger one for the first groups,
    as many as fit. A group that cannot have the scheme has the smallest that it can.
    """
    sized = sorted(schemes, key=lambda each: total(costs, _all(costs, each)).bytes)
    fitting = [s for s in sized if total(costs, _all(costs, s)).bytes <= limit]
    found = {f"uniform {scheme}": _all(costs, scheme) for scheme in fitting if scheme != FLOAT}
    if fitting and len(fitting) < len(sized):
        low, high = fitting[-1], sized[len(fitting)]
        mixed = _first(costs, low, high, limit)
        if mixed != _all(costs, low):
            found[f"{high} first, then {low}"] = mixed
    return found


def _all(costs: Sequence[Costs], scheme: str) -> Schemes:
    return tuple(
        scheme if scheme in each else min(each, key=lambda s: each[s].bytes) for each in costs
    )


def _first(costs: Sequence[Costs], low: str, high: str, limit: float) -> Schemes:
    """Return a choice with a larger scheme for each group, in order, with which it still fits."""
    chosen = list(_all(costs, low))
    size = total(costs, chosen).bytes
    for i, scheme in enumerate(_all(costs, high)):
        more = costs[i][scheme].bytes - costs[i][chosen[i]].bytes
        if size + more <= limit:
            chosen[i], size = scheme, size + more
    return tuple(chosen)


def _solved(costs: Sequence[Costs], limit: float, *, by_bytes: bool) -> Schemes | None:
    names = [list(each) for each in costs]
    pairs = [[(float(each[s].bytes), each[s].kl) for s in each] for each in costs]
    if not by_bytes:
        pairs = [[(kl, size) for size, kl in each] for each in pairs]
    places = cheapest(pairs, limit)
    if places is None:
        return None
    return tuple(each[place] for each, place in zip(names, places, strict=True))
