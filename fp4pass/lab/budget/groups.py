"""Group the layers that serving engines fuse: each group gets one scheme."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...core.names import covering_globs, without_numbers
from ...engine.layer_stack import Stack
from ...quantization.plan import LayerPlan, Plan, joined
from ...quantization.rules import matching_rule
from ...quantization.stacks import caller_of
from ...record.config import Rule
from ...record.schemes import scheme_fields

# The scheme of layers that stay as they are, in a report.
FLOAT = "float"


@dataclass(frozen=True, eq=False)
class Group:
    """Layers that get one scheme: they read one input, share a weight, or are all experts.

    Attributes:
        layers: as they are planned in one of the schemes.
        schemes: those that all of them can have; one for a group whose scheme a rule decides.
        is_fixed: whether a rule decides.
    """

    layers: tuple[LayerPlan, ...]
    schemes: tuple[str, ...]
    is_fixed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def weights(self) -> int:
        """The number of weights, each shared one once."""
        return sum(math.prod(layer.shape) for layer in self.each_weight())

    @property
    def dense_bytes(self) -> int:
        """The bytes of the weights as they are."""
        each = (layer.module.get_parameter("weight") for layer in self.each_weight())
        return sum(weight.nbytes for weight in each)

    @property
    def callers(self) -> list[nn.Module]:
        """The modules that read the weights when they are called."""
        return list(dict.fromkeys(caller_of(layer.module) for layer in self.layers))

    def each_weight(self) -> list[LayerPlan]:
        """Return one layer for each weight."""
        return list({layer.weight_key: layer for layer in reversed(self.layers)}.values())


@dataclass(frozen=True)
class Layers:
    """The plan of a model in each scheme, and the rules of its user.

    Attributes:
        plans: by the name of the scheme.
        rules: of the user.
        places: the layer of a stack that each module is in, and the name of that layer.
    """

    plans: Mapping[str, Plan]
    rules: tuple[Rule, ...]
    places: Mapping[nn.Module, str] = field(repr=False)

    @staticmethod
    def of(plans: Mapping[str, Plan], rules: tuple[Rule, ...], stacks: Sequence[Stack]) -> Layers:
        """Note the layers that modules are in."""
        places = {
            module: stack.layer_name(i)
            for stack in stacks
            for i, layer in enumerate(stack.layers)
            for module in layer.modules()
        }
        return Layers(plans, rules, places)

    @property
    def planned(self) -> list[LayerPlan]:
        """The layers that some scheme takes."""
        found = {each.name: each for plan in self.plans.values() for each in plan.layers}
        names = next(iter(self.plans.values())).entries
        return [found[each.name] for each in names if each.name in found]

    def groups(self, inputs: Mapping[nn.Module, Collection[object]]) -> list[Group]:
        """Return the groups of the layers that were reached.

        inputs: the identities of the tensors that modules were called with.
        """

        def keys(layer: LayerPlan) -> set[object]:
            found: set[object] = {("weight", layer.weight_key)}
            # One input of two schemes by rule is no reason to join them.
            own = (self._decided(layer.name), self._below(layer.name, layer.module))
            parent, _, _ = own[1].rpartition(".")
            if layer.stage:
                return found | {("stage", own[0], parent, layer.stage)}
            if "*" in own[1]:
                found.add(("experts", *own))
            found |= {(own[0], parent, each) for each in inputs.get(layer.module, ())}
            return found

        found = joined(self.planned, keys)
        seen = [each for each in found if any(caller_of(x.module) in inputs for x in each)]
        return [self._group(members) for members in seen]

    def unreached(self, groups: Sequence[Group]) -> list[str]:
        """Return the layers that are in no group."""
        inside = {name for group in groups for name in group.names}
        return [layer.name for layer in self.planned if layer.name not in inside]

    def rules_for(self, chosen: Mapping[str, str]) -> list[Rule]:
        """Return rules that give layers a scheme, or leave them as they are, and all other rules.

        Args:
            chosen: the scheme of layers by name, FLOAT for none; layers of one weight alike.
        """
        left: dict[str, tuple[int | None, str]] = {}
        for name, scheme in chosen.items():
            fixed = self._decided(name)
            if fixed and scheme != FLOAT:
                continue
            rule = matching_rule(name, self.rules)
            left[name] = (None if rule is None else list(self.rules).index(rule), scheme)
        short = self._shortened(left)
        every = {short.get(name, name) for name in self._entries}
        names: dict[tuple[int | None, str], list[str]] = {}
        for name, key in left.items():
            names.setdefault(key, []).append(short[name])
        found: list[Rule] = []
        # The first match wins, so that patterns of the most common scheme, the last, may be wide.
        for key in sorted(names, key=lambda key: len(names[key])):
            index, scheme = key
            own = {} if index is None else dict(self.rules[index][1] or {})
            options = None if scheme == FLOAT else {**own, **scheme_fields(scheme)}
            every -= set(names[key])
            globs = covering_globs(list(dict.fromkeys(names[key])), every)
            found += [(glob, options) for glob in globs]
        return [*found, *self.rules]

    @property
    def _entries(self) -> list[str]:
        return [each.name for each in next(iter(self.plans.values())).entries]

    def _shortened(self, keys: Mapping[str, Any]) -> dict[str, str]:
        """Return a pattern for each name: of experts one for all, if they have one key."""
        of_pattern: dict[str, set[Any]] = {}
        for layer in self.planned:
            pattern = self._below(layer.name, layer.module)
            of_pattern.setdefault(pattern, set()).add(keys.get(layer.name))
        others = set(self._entries) - {layer.name for layer in self.planned}
        modules = {layer.name: layer.module for layer in self.planned}
        found = {}
        for name in keys:
            pattern = self._below(name, modules[name])
            alone = len(of_pattern[pattern]) > 1 or pattern in map(without_numbers, others)
            found[name] = name if alone else pattern
        return found

    def _group(self, members: Sequence[LayerPlan]) -> Group:
        decided = self._decided(members[0].name)
        if decided:
            return Group(tuple(members), (decided,), is_fixed=True)
        names = {layer.name for layer in members}
        fitting = [
            scheme
            for scheme, plan in self.plans.items()
            if names <= {layer.name for layer in plan.layers}
        ]
        return Group(tuple(members), tuple(fitting))

    def _decided(self, name: str) -> str:
        """Return the scheme that a rule of the user gives a layer, "" for none."""
        rule = matching_rule(name, self.rules)
        if rule is None or rule[1] is None or "fmt" not in rule[1]:
            return ""
        plan = next(iter(self.plans.values()))
        config = next((each.config for each in plan.layers if each.name == name), None)
        return "" if config is None else config.scheme

    def _below(self, name: str, module: nn.Module) -> str:
        """Return a name with a * for each number below the layer of a stack, as of experts."""
        place = self.places.get(module) or self.places.get(caller_of(module))
        if place is None or not name.startswith(f"{place}."):
            return name
        parent, dot, last = name.removeprefix(f"{place}.").rpartition(".")
        return f"{place}.{without_numbers(parent)}{dot}{last}"


def rounds(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups so that no two of a list have weights in one module of experts."""
    left = list(groups)
    while left:
        taken: set[nn.Module] = set()
        now = []
        for group in left:
            if taken.isdisjoint(group.callers):
                taken.update(group.callers)
                now.append(group)
        yield now
        left = [group for group in left if group not in now]
