"""The costs of the work of a conversion, in the kinds that its progress is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from ..core.time_left import Kind
from ..quantization.plan import Plan
from ..quantization.searches import search_costs
from .layer_stack import Stack

# What is done with the batches in a layer that is calibrated by itself.
RUNS = ("pair", "observe", "advance")


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
