"""Measure what each group of layers costs in each scheme: bytes, and KL with that group alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...core.progress import current
from .forwards import Forwards, finely, mean_kl
from .groups import FLOAT, Group, Layers, rounds
from .models import Converter, packed_bytes, swapped


@dataclass(frozen=True)
class Cost:
    """The cost of a group in a scheme.

    Attributes:
        bytes: of codes and block scales; of the weights as they are, for a group that stays so.
        kl: KL(original || model with this group alone in the scheme), nats per token.

    Example:
        >>> fp4pass.lab.budget.Cost(bytes=576, kl=0.01).bytes
        576
    """

    bytes: int
    kl: float


# By the name of the scheme.
Costs = dict[str, Cost]


def measure(
    converter: Converter,
    layers: Layers,
    groups: Sequence[Group],
    forwards: Forwards,
    schemes: Sequence[str],
) -> list[Costs]:
    """Return the costs of each group in its schemes; FLOAT costs only bytes.

    A scheme whose KL is not finite is left out.
    """
    found: list[Costs] = [{} for _ in groups]
    decided = [group.schemes[0] for group in groups if group.is_fixed]
    works = [
        (scheme, part)
        for scheme in dict.fromkeys([*schemes, *decided])
        for part in rounds([group for group in groups if scheme in group.schemes])
    ]
    current().expect(sum(len(part) for _, part in works), "groups")
    places = {group: i for i, group in enumerate(groups)}
    for scheme, part in works:
        chosen = {name: FLOAT for group in groups for name in group.names}
        chosen |= {name: scheme for group in part for name in group.names}
        base = scheme if scheme in layers.plans else schemes[0]
        converted = converter.convert(converter.recipe(base, layers.rules_for(chosen)))
        with finely(converter.root, converted):
            for group in part:
                kl = _alone(converter.root, group, converted, forwards)
                if math.isfinite(kl):
                    found[places[group]][scheme] = Cost(packed_bytes(converted, group), kl)
                current().step()
    return found


def _alone(root: nn.Module, group: Group, converted: nn.Module, forwards: Forwards) -> float:
    """Return the KL of the model with one group of a converted one."""
    with swapped(root, group, converted):
        return mean_kl(forwards.compare(root, group.callers))


def add_float(costs: Sequence[Costs], groups: Sequence[Group], allowed: bool) -> None:
    """Add the costs of staying as they are, where that is allowed or nothing else is left."""
    for each, group in zip(costs, groups, strict=True):
        if (allowed and not group.is_fixed) or not each:
            each[FLOAT] = Cost(group.dense_bytes, 0.0)


def total(costs: Sequence[Mapping[str, Cost]], chosen: Sequence[str]) -> Cost:
    """Return the sums over groups of their costs in the chosen schemes."""
    each = [cost[scheme] for cost, scheme in zip(costs, chosen, strict=True)]
    return Cost(sum(one.bytes for one in each), math.fsum(one.kl for one in each))
