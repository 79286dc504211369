"""Checks of the tensors of a folder with packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.formats import get_format
from ..errors import CheckpointError
from ..linear import GLOBAL, SCALE
from .layouts import Shapes
from .manifest import fingerprint

if TYPE_CHECKING:
    from .reader import CheckpointReader


def check_shapes(reader: CheckpointReader, shapes: Shapes) -> None:
    """Raise CheckpointError if the tensors of a layer do not fit each other."""
    for layer, facts in reader.layers.items():
        expected, names = reader.layout.expected(facts), reader.names(layer)
        if GLOBAL in expected and GLOBAL not in names:
            missing = reader.layout.tensor_name(layer, GLOBAL)
            raise CheckpointError(f"{reader.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            (shape, dtype), (allowed, kind) = shapes[name], expected.get(part, ((), ""))
            if part in expected and (shape not in allowed or dtype != kind):
                raise CheckpointError(
                    f"{reader.files[name]}: {name}: expected {kind} {list(allowed[0])} for a "
                    f"weight {list(facts.shape)} in {facts.fmt.key}, got {dtype} {list(shape)}. "
                    "Copy the folder again."
                )


def check_sum(reader: CheckpointReader, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a tensor is not what was saved, as far as the folder says."""
    if reader.own is not None and fingerprint(tensor) != reader.own["tensors"][name]:
        raise CheckpointError(
            f"{reader.files[name]}: the tensor {name!r} is not what was saved (its checksum, shape "
            "or dtype differs). Copy the checkpoint again."
        )


def check_scales(layer: str, scale: Tensor, fmt_key: str) -> None:
    """Raise CheckpointError if a block scale of a packed layer is NaN or negative."""
    if (scale.view(torch.uint8) > get_format(fmt_key).scale.last).any():
        raise CheckpointError(
            f"{layer}.{SCALE} holds NaN or a negative scale. The checkpoint is damaged, or its "
            "weights were not finite when it was written; quantize the model again."
        )
