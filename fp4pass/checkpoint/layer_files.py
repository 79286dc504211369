"""Files of packed layers that a checkpoint takes as they are, and not tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..state import ModelState
from .layouts import Layout


@dataclass(frozen=True)
class LayerFile:
    """A file of packed tensors from which a model maps them.

    Attributes:
        path: of the file, which has each tensor under its name in the state dict.
        tensors: by their names, as they were mapped.
        versions: of these, which tell whether they were written to since.
        sums: their fingerprints.
        stamp: what tells whether the file is still the same.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    versions: Mapping[str, int]
    sums: Mapping[str, Any]
    stamp: tuple[int, ...]

    @staticmethod
    def of(path: Path, tensors: Mapping[str, Tensor], sums: Mapping[str, Any]) -> LayerFile:
        """Return the record of a file that was just mapped."""
        versions = {name: tensor._version for name, tensor in tensors.items()}
        return LayerFile(path, tensors, versions, sums, _stamp(path))

    def is_unchanged(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Return whether the file has just these tensors, and they are what was mapped."""
        return (
            tensors.keys() == self.tensors.keys()
            and all(tensors[name] is tensor for name, tensor in self.tensors.items())
            and all(each._version == self.versions[name] for name, each in self.tensors.items())
            and self.path.is_file()
            and _stamp(self.path) == self.stamp
        )


def _stamp(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class ConvertedState(ModelState):
    """What was done to a model, and where what it holds lies on the disk.

    Attributes:
        files: those that packed layers are mapped from.
        carried: the file of each tensor that a checkpoint has beyond the model.
    """

    files: tuple[LayerFile, ...] = ()
    carried: Mapping[str, Path] = field(default_factory=dict)


def files_to_take(
    modules: Mapping[str, nn.Module],
    state: ConvertedState,
    layout: Layout,
    packed: Mapping[str, tuple[str, str, bool]],
    renamed: Collection[str],
    limit: int,
) -> list[LayerFile]:
    """Return the files that a model maps which are files of a checkpoint as they are.

    Args:
        modules: of the model, by their names.
        state: of the model.
        layout: of the checkpoint.
        packed: the layer and the buffer of each packed tensor of the state dict, and whether its
            global scales multiply.
        renamed: the layers that have other names in the checkpoint, or are taken apart there.
        limit: the bytes of a file.
    """
    found = []
    for file in state.files:
        if not file.tensors:
            # Of a layer in which every linear is skipped.
            continue
        layers = {packed[name][0] for name in file.tensors if name in packed}
        tensors = {
            name: (each, tensor)
            for name, each in packed.items()
            if each[0] in layers and (tensor := modules[each[0]]._buffers.get(each[1])) is not None
        }
        is_as_stored = layers.isdisjoint(renamed) and all(
            layout.tensor_name(layer, part) == name
            and layout.encode(part, tensor, multiplied) is tensor
            for name, ((layer, part, multiplied), tensor) in tensors.items()
        )
        holds = file.is_unchanged({name: tensor for name, (_, tensor) in tensors.items()})
        # A layer that is skipped whole has a file without tensors.
        if layers and is_as_stored and holds and file.path.stat().st_size <= limit:
            found.append(file)
    # In the order of the model, whichever were finished first.
    place = {name: i for i, name in enumerate(packed)}
    return sorted(found, key=lambda file: min(place[name] for name in file.tensors))
