"""Find what a packed folder holds beyond its model."""

from __future__ import annotations

import dataclasses
import re

from torch import nn

from .._compat.torch import model_class
from .._compat.transformers import ignored_tensors
from ..record.rows import Row
from .beside import NOT_COPIED, is_left_over
from .layouts import join
from .reader import CheckpointReader


def carried_names(model: nn.Module, reader: CheckpointReader) -> dict[str, str]:
    """Return the tensors of a packed folder that go beyond a model, with their names on disk."""
    known = model.state_dict()
    if reader.own is not None:
        found = [name for name in reader.own.get("carried", ()) if name not in known]
    else:
        patterns = ignored_tensors(model)
        spare = (name for name in reader.plain() if name not in known)
        found = [
            name
            for name in spare
            if any(re.search(each, name) for each in patterns) and not is_left_over(model, name)
        ]
    return {name: reader.on_disk.get(name, name) for name in found}


def without_ignored(
    model: nn.Module, reader: CheckpointReader
) -> tuple[CheckpointReader, list[Row]]:
    """Return a folder without packed layers that a class ignores, and a row for each.

    Others that match the same pattern, as those of multi-token prediction, go with them.
    """
    patterns = ignored_tensors(model)
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    spare = [join(name, "weight") for name in reader.layers if name not in known]
    used = [each for each in patterns if any(re.search(each, name) for name in spare)]
    if not used:
        return reader, []

    def is_left(name: str) -> bool:
        return any(re.search(each, name) for each in used)

    why = f"{model_class(model).__name__} has no place for it{NOT_COPIED}"
    left = {n: each for n, each in reader.layers.items() if is_left(join(n, "weight"))}
    rows = [Row(name, each.shape, skip_reason=why) for name, each in left.items()]
    layers = {name: each for name, each in reader.layers.items() if name not in left}
    gone = {name for layer in left for name in reader.names(layer).values()}
    files = {n: f for n, f in reader.files.items() if n not in gone and not is_left(n)}
    return dataclasses.replace(reader, layers=layers, files=files), rows
