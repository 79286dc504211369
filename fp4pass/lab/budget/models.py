"""Convert copies of a float model, and find the packed modules in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...api import convert
from ...engine.one_call import OneCall
from ...nn.linear import PACKED, SCALE
from ...quantization.recipe import Recipe
from ...record.config import LinearConfig, Rule
from ...record.quality import get_quality
from .groups import Group


@dataclass(frozen=True)
class Converter:
    """Converts a model by one method, whose finished searches it keeps.

    Attributes:
        root: in floating point; smoothed where the quality does that.
        options: fields of `LinearConfig` beside the scheme, those of a quality left out.
        quality: as `convert` takes it.
        data: batches to calibrate on.
        searches: a folder for finished searches.
    """

    root: nn.Module
    options: Mapping[str, Any]
    quality: str | None
    data: Sequence[Any]
    searches: str

    @staticmethod
    def of(
        root: nn.Module,
        options: Mapping[str, Any],
        quality: str | None,
        data: Sequence[Any],
        searches: str,
        schemes: Sequence[str],
    ) -> Converter:
        """Smooth a copy of a model first, if its quality does that for one of the schemes."""
        inputs = [each for each in schemes if not LinearConfig(each, **options).weight_only]
        if inputs and quality is not None and get_quality(quality).smoothing:
            root = copy.deepcopy(root)
            call = OneCall.of(root, quality, {"fmt": inputs[0], **options})
            with torch.inference_mode(False), call.smoothed(data):
                pass
        return Converter(root, options, quality, data, searches)

    def recipe(self, scheme: str, rules: Sequence[Rule]) -> Recipe:
        """Return the recipe of a model; rules for the other kind of inputs get their own method."""
        config = LinearConfig(scheme, **self.options)
        rules = tuple(self._completed(rule, config) for rule in rules)
        return Recipe(config, rules, quality=self.quality)

    def convert(self, recipe: Recipe) -> nn.Module:
        """Return a converted copy of the model."""
        # Inference tensors could not be written to.
        with torch.inference_mode(False):
            model = copy.deepcopy(self.root)
        needs = any(
            each.needs or (not each.weight_only and each.format.has_global_scale)
            for each in recipe.configs()
        )
        data = list(self.data) if needs else None
        return convert(model, **recipe.arguments(), data=data, resume=self.searches)

    def _completed(self, rule: Rule, config: LinearConfig) -> Rule:
        pattern, options = rule
        if self.quality is None or options is None:
            return rule
        weight_only = options.get("weight_only")
        if weight_only is None or weight_only == config.weight_only:
            return rule
        return pattern, {**get_quality(self.quality).options_for(weight_only), **options}


def packed_bytes(model: nn.Module, group: Group) -> int:
    """Return the bytes of codes and block scales of a group in a converted model."""
    modules = [model.get_submodule(layer.name) for layer in group.each_weight()]
    tensors = [module.get_buffer(name) for module in modules for name in (PACKED, SCALE)]
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def swapped(root: nn.Module, group: Group, converted: nn.Module) -> Iterator[None]:
    """Have a float model call the modules of a group in a model converted from it."""
    callers = set(group.callers)
    found = list(root.named_modules(remove_duplicate=False))
    paths = [path for path, module in found if module in callers and path]
    with ExitStack() as stack:
        for path in paths:
            parent, _, last = path.rpartition(".")
            holder = root.get_submodule(parent)
            stack.callback(holder._modules.__setitem__, last, holder._modules[last])
            holder._modules[last] = converted.get_submodule(path)
        yield
