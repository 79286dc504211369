"""The names that a folder has for the tensors of a model: those of the float model's own folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from .._compat.transformers_names import names_on_disk
from ..experts import QuantizedExpertStack, weight_name
from .model_layers import is_transformers

_WEIGHT = ".weight"


@dataclass(frozen=True)
class NamesOnDisk:
    """Names on disk by those in a model, of what has another one there.

    Attributes:
        tensors: of dense tensors.
        layers: of layers, packed and dense.
        stacks: of stacks, as a folder of the float model has them.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        root: nn.Module,
        dense: Iterable[str],
        packed: Mapping[str, nn.Module],
        whole: Mapping[str, str],
    ) -> NamesOnDisk:
        """Return the names on disk of what `save_pretrained` of a float model would rename.

        Args:
            root: the converted model; one that is not of transformers has one name for each.
            dense: the names of its dense tensors.
            packed: its packed layers that lie in a folder in one piece, by all their names.
            whole: names on disk of the stacks that lie there in pieces, and in one in a folder of
                the float model.
        """
        if not is_transformers(root):
            return cls()
        weights = {weight_name(name, module): module for name, module in packed.items()}
        # Each once, in the order of the model.
        names = names_on_disk(root, dict.fromkeys([*dense, *weights]))
        found = {name: disk for name, disk in names.items() if disk != name}
        stacks = {
            name: disk
            for name, disk in found.items()
            if isinstance(weights.get(name), QuantizedExpertStack)
        }
        layers = {
            name.removesuffix(_WEIGHT): disk.removesuffix(_WEIGHT)
            for name, disk in found.items()
            if name not in stacks and name.endswith(_WEIGHT) and disk.endswith(_WEIGHT)
        }
        tensors = {name: disk for name, disk in found.items() if name not in weights}
        return cls(tensors, layers, {**stacks, **whole})

    @property
    def in_model(self) -> dict[str, str]:
        """The names in the model of tensors and of the weights of layers, by those on disk."""
        weights = {name + _WEIGHT: disk + _WEIGHT for name, disk in self.layers.items()}
        found = {**weights, **self.tensors, **self.stacks}
        return {disk: name for name, disk in found.items() if disk != name}
