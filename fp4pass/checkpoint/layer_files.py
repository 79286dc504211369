"""Files of packed layers that a checkpoint takes as they are, and not tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from ..quantization.state import LayerFile, ModelState
from .layouts import Layout


def files_to_take(
    modules: Mapping[str, nn.Module],
    state: ModelState,
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
        holds = file.holds({name: tensor for name, (_, tensor) in tensors.items()})
        # A layer that is skipped whole has a file without tensors.
        if layers and is_as_stored and holds and file.path.stat().st_size <= limit:
            found.append(file)
    # In the order of the model, whichever were finished first.
    place = {name: i for i, name in enumerate(packed)}
    return sorted(found, key=lambda file: min(place[name] for name in file.tensors))
