"""Count the costs of searches, which progress is made of, and name a store of finished ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..core.time_left import Kind
from ..distributed import ranks
from ..methods import MethodResult
from .plan import LayerPlan, Plan, search_seconds


class SearchStore(Protocol):
    """Searches that need not be done again."""

    found: int  # how many were not

    def get_or_search(
        self, name: str, decides: Sequence[Any], search: Callable[[], MethodResult]
    ) -> MethodResult:
        """Return the search that is finished for what decides it, or search and keep that."""


def search_kind(layer: LayerPlan) -> Kind:
    """Return the kind of the search of a weight; those of one kind cost the same for each unit."""
    if ranks().size > 1:
        # Each has weights of its own, and one of them speaks for all.
        return ("search", "shared")
    config = layer.config
    shape = "x".join(map(str, layer.shape))
    return ("search", config.method_name, f"{config.fmt}/{config.block}", shape)


def search_cost(layer: LayerPlan) -> float:
    """Return the cost of the search of a weight, by its elements and its method."""
    first, parts = search_seconds(layer)
    # Else it is that of launches, which counts on a GPU alone, and for all weights alike.
    return sum(parts) + (first if "hessian" in layer.config.needs else 0.0)


def search_costs(plan: Plan) -> dict[Kind, float]:
    """Return the costs of the searches of a plan, by kind."""
    found: dict[Kind, float] = {}
    for members in plan.by_weight():
        kind = search_kind(members[0])
        found[kind] = found.get(kind, 0.0) + search_cost(members[0])
    return found


def layer_places(names: Iterable[str]) -> dict[str, str]:
    """Return "layer i/n" for names of linears in numbered layers, none if there is one layer."""
    layers = {name: match[0] for name in names if (match := re.match(r"(.*?\.)??\d+(?=\.)", name))}
    order = {layer: i + 1 for i, layer in enumerate(dict.fromkeys(layers.values()))}
    if len(order) < 2:
        return {}
    return {name: f"layer {order[layer]}/{len(order)}" for name, layer in layers.items()}
