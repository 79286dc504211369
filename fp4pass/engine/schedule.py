"""List the work of a conversion, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import StateError, as_option
from ..nn.experts import add_stacks
from ..quantization.plan import LayerPlan, Plan
from ..quantization.scan import SkippedLayer, caller_of
from .layer_stack import Stack


@dataclass(frozen=True, eq=False)
class Work:
    """A layer of a stack, and the layers of the plan that are in it."""

    stack: Stack
    index: int
    own: list[LayerPlan]

    @property
    def layer(self) -> nn.Module:
        """The module."""
        return self.stack.layers[self.index]

    @property
    def name(self) -> str:
        """The name that it has in the model."""
        return self.stack.layer_name(self.index)


def outside(plan: Plan, stacks: Sequence[Stack]) -> Plan:
    """Return the plan of the layers that are in no stack, or are skipped."""
    inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
    return plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)


def schedule(plan: Plan, stacks: Sequence[Stack]) -> list[Work]:
    """Return the layers of stacks in their order, each with its part of the plan."""
    return [
        Work(stack, index, [each for each in plan.layers if each.module in modules])
        for stack in stacks
        for index, layer in enumerate(stack.layers)
        for modules in [set(layer.modules())]
    ]


def find_stacks(root: nn.Module, chosen: Sequence[LayerPlan]) -> list[Stack]:
    """Return the stacks of layers that linears to quantize are in. Raises StateError."""
    add_stacks(layer.module for layer in chosen)
    stacks = list(stacks_of(root, {layer.module for layer in chosen}))
    if not stacks:
        raise StateError(
            "One layer after the other: expected a list of at least two layers (nn.ModuleList) "
            f"with linear layers, got {type(root).__name__} without one. Leave out "
            f"{as_option('sequential', True)} or {as_option('stream')}."
        )
    owner = {m: layer for s in stacks for layer in s.layers for m in layer.modules()}
    first: dict[int, LayerPlan] = {}
    for layer in chosen:
        other = first.setdefault(layer.weight_key, layer)
        if owner.get(layer.module) is not owner.get(other.module):
            raise StateError(
                f"{other.name} and {layer.name} share one weight, but are in different layers, so "
                "they cannot be converted one after the other. Leave out "
                f"{as_option('sequential', True)} or {as_option('stream')}."
            )
    return stacks


def planned_stacks(root: nn.Module, plan: Plan) -> list[Stack]:
    """Return the stacks that the layers of a plan are in, in a model that is not prepared."""
    return list(stacks_of(root, {caller_of(layer.module) for layer in plan.layers}))


def stacks_of(root: nn.Module, holders: set[nn.Module]) -> Iterator[Stack]:
    """Yield the outermost lists of at least two layers with linears below them."""
    inside: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        layers = list(module)
        kinds = {type(layer) for layer in layers}
        if isinstance(module, nn.Sequential) and len(kinds) > 1:
            continue
        holding = [layer for layer in layers if not holders.isdisjoint(layer.modules())]
        if len(holding) < 2 or len(set(layers)) < len(layers) or not holders.isdisjoint(layers):
            continue
        inside.update(m for layer in layers for m in layer.modules())
        yield Stack(name or type(root).__name__, f"{name}.*" if name else "*", layers)
