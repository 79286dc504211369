"""A folder under the names that a model has for its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .reader import CheckpointReader


def with_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Return names of tensors, and those of the layers whose weights are among them."""
    weights = {disk: name for disk, name in names.items() if disk.endswith(".weight")}
    layers = {k.removesuffix(".weight"): v.removesuffix(".weight") for k, v in weights.items()}
    return {**names, **layers}


def as_in_model(reader: CheckpointReader) -> CheckpointReader:
    """Return a folder with the names in a model, as far as the folder says."""
    return renamed(reader, with_layers({disk: name for name, disk in reader.renamed.items()}))


def renamed(reader: CheckpointReader, names: Mapping[str, str]) -> CheckpointReader:
    """Return a folder with layers and tensors under the names that a model has for them."""
    tensors = {name: names.get(name, name) for name in reader.plain()}
    for layer in reader.layers:
        for part in reader.names(layer).values():
            tensors[part] = names.get(layer, layer) + part.removeprefix(layer)
    return dataclasses.replace(
        reader,
        layers={names.get(name, name): layer for name, layer in reader.layers.items()},
        files={tensors[name]: path for name, path in reader.files.items()},
        on_disk={new: reader.on_disk.get(name, name) for name, new in tensors.items()},
    )
