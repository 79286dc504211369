"""What the work of converting a model costs, in the kinds that its progress is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ..core.time_left import Kind
from ..distributed import ranks
from .layer_stack import Stack
from .plan import LayerPlan, Plan, search_seconds

# What is done with the batches in a layer that is calibrated by itself.
RUNS = ("pair", "observe", "advance")


def search_kind(layer: LayerPlan) -> Kind:
    """Return what makes the search of a weight as dear as another one."""
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
    """Return what the searches of a plan cost, by kind."""
    found: dict[Kind, float] = {}
    for members in plan.by_weight():
        kind = search_kind(members[0])
        found[kind] = found.get(kind, 0.0) + search_cost(members[0])
    return found


def later_costs(plan: Plan) -> dict[Kind, float]:
    """Return what `convert` has to do for a plan, for `Progress.foresee` of a call around it."""
    return {("convert", *kind): cost for kind, cost in search_costs(plan).items()}


def packed_size(model: nn.Module, plan: Plan) -> float:
    """Return the bytes of a model whose plan is carried out."""
    weights = [members[0] for members in plan.by_weight()]
    size = sum(parameter.nbytes for parameter in model.parameters())
    dense = sum(first.module.get_parameter("weight").nbytes for first in weights)
    bits = sum(math.prod(first.shape) * first.config.format.bits_per_weight for first in weights)
    return size - dense + bits / 8


def run_kinds(layer: nn.Module) -> tuple[dict[str, Kind], float]:
    """Return what makes each run of a float layer as dear as another one, and its cost."""
    size = sum(parameter.numel() for parameter in layer.parameters())
    return {run: ("run", run, f"{type(layer).__name__} {size}") for run in RUNS}, size


def run_costs(stacks: Sequence[Stack], paired: bool) -> Mapping[Kind, float]:
    """Return what it costs to calibrate the layers of stacks one after the other, by kind."""
    found: dict[Kind, float] = {}
    for stack in stacks:
        for layer in stack.layers:
            kinds, cost = run_kinds(layer)
            for run in RUNS[0 if paired else 1 :]:
                # Nothing comes behind the last one.
                if run != "advance" or layer is not stack.layers[-1]:
                    found[kinds[run]] = found.get(kinds[run], 0.0) + cost
    return found


def layer_places(names: Iterable[str]) -> dict[str, str]:
    """Return "layer i/n" for names of linears in numbered layers, none if there is one layer."""
    layers = {name: match[0] for name in names if (match := re.match(r"(.*?\.)??\d+(?=\.)", name))}
    order = {layer: i + 1 for i, layer in enumerate(dict.fromkeys(layers.values()))}
    if len(order) < 2:
        return {}
    return {name: f"layer {order[layer]}/{len(order)}" for name, layer in layers.items()}
