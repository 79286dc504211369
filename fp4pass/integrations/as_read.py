"""Pack the weights of a model while another library reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers_loading import mark_initialized
from ..checkpoint.beside import beyond_model
from ..checkpoint.model_layers import finish
from ..errors import NonFiniteError
from ..nn.experts import current_weight, set_weight, weight_name
from ..quantization import plan as planning
from ..quantization.quantize import quantize_weight, with_shared_scales
from ..quantization.recipe import Recipe
from ..record.config import plain
from ..record.rows import Row


@dataclass
class _Group:
    """Layers that share a global scale, which is known once all of their weights are loaded."""

    layers: dict[str, planning.LayerPlan]
    awaited: set[str]


class PackedAsRead:
    """Packs weights as they are read, so that only layers that share a scale are ever dense."""

    # Weights that are tied, shared or not in the checkpoint are packed by `complete`, so that the
    # result is always that of `convert`. `is_final` says whether the weight of a layer is read in
    # its final dtype; `bytes` are those of an element of each weight once it is packed.

    def __init__(
        self, model: nn.Module, recipe: Recipe, is_final: Callable[[planning.LayerPlan], bool]
    ) -> None:
        self.plan = planning.plan_layers(model, recipe.config, recipe.rules)
        planning.require_layers(self.plan)
        self.rows: dict[str, Row] = {}
        self._recipe = recipe
        self._groups: dict[str, _Group] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for layers in planning.scale_groups(self.plan.layers):
            by_name = {weight_name(layer.name, layer.module): layer for layer in layers}
            if all(len(names[each.weight_key]) == 1 and is_final(each) for each in layers):
                self._groups.update(dict.fromkeys(by_name, _Group(by_name, set(by_name))))
        self.bytes = {
            weight_name(layer.name, layer.module): (
                layer.config.format.bits_per_weight(layer.shape) / 8
            )
            for layer in self.plan.layers
        }

    def takes(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is passed to `take`."""
        return name in self._groups

    def take(self, name: str, tensor: Tensor) -> bool:
        """Put a weight into the model, if it fits there, and pack its group with the last."""
        group = self._groups.get(name)
        if group is None:
            return False
        module = group.layers[name].module
        if tensor.shape != module.get_parameter("weight").shape:
            self._postpone(group)
            return False
        weight = nn.Parameter(tensor)
        mark_initialized(weight)
        set_weight(module, weight)
        group.awaited.discard(name)
        if not group.awaited:
            try:
                self._convert(list(group.layers.values()))
            except NonFiniteError:
                # The library would raise an error of its own; it is raised again at the end.
                self._postpone(group)
        return True

    def _postpone(self, group: _Group) -> None:
        """Pack a group when all is loaded."""
        for name in group.layers:
            self._groups.pop(name, None)

    def _convert(self, layers: Sequence[planning.LayerPlan]) -> None:
        """Pack weights that are in the model: whole groups."""

        def arrived(layer: planning.LayerPlan) -> planning.LayerPlan:
            # The plan has the weight of the skeleton.
            return dataclasses.replace(layer, weight_key=id(current_weight(layer.module)))

        with torch.inference_mode(False), torch.no_grad():
            plan = with_shared_scales(planning.Plan(tuple(map(arrived, layers))))
            for members in plan.by_weight():
                self.rows.update({row.name: row for row in quantize_weight(members)})

    def remaining(self) -> list[planning.LayerPlan]:
        """Return the layers that are not packed yet."""
        return [layer for layer in self.plan.layers if layer.name not in self.rows]

    def complete(self, model: Any) -> None:
        """Pack the remaining weights, and finish the model as `convert` does."""
        self._convert(self.remaining())
        rows = [
            self.rows.get(entry.name) or planning.planned_row(entry) for entry in self.plan.entries
        ]
        options = plain(self._recipe.config.options())
        carried, beyond = beyond_model(model)
        finish(model, {**options, "rules": plain(self._recipe.rules)}, [*rows, *beyond], carried)
