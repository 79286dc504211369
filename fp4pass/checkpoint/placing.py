"""Put packed layers into a skeleton whose other tensors transformers loads.

The layers take their place without memory, so that device maps see their sizes, and are filled
once the skeleton is on its devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import model_class
from .._compat.transformers import untie
from .._compat.transformers_loading import mark_initialized, names_in_model
from ..errors import CheckpointError, some
from ..nn.experts import QuantizedExperts, weight_name
from ..nn.linear import GLOBAL, INPUT_GLOBAL
from ..quantization.replace import store_packed
from .beyond import carried_names, without_ignored
from .checks import cache_format_in, require_input_scales
from .layouts import BUFFERS, CACHE_SCALES, PackedLayer, Piece, join, join_layers
from .loading import finish_loaded, hold_cache, join_stacks
from .opening import open_checkpoint
from .reader import CheckpointReader, packed_problem, renamed
from .skeleton import dense_here, model_names, module_for
from .split_stacks import stacks_in

_SMALL = (GLOBAL, INPUT_GLOBAL)


class PlacedLayers:
    """The packed layers of a folder in the skeleton of a model, in place.

    Args:
        model: of transformers, its parameters on meta.
        directory: the folder.

    Raises:
        CheckpointError: the folder is damaged, or has packed layers that the model has no place
            for.
    """

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self._model = model
        reader = open_checkpoint(directory)
        self._on_disk = [*reader.packed_names()]
        self._stacks: Mapping[str, list[Piece]] = stacks_in(model, reader.layers)
        pieces = {piece.name for each in self._stacks.values() for piece in each}
        require_input_scales(reader, besides=pieces)
        others = model_names(model, reader)
        reader = renamed(reader, {disk: others[disk] for disk in others.keys() - pieces})
        reader, self._ignored = without_ignored(model, reader)
        reader = _in_model(model, reader, pieces)
        reader, self._loose = dense_here(model, reader, others)
        self._pieces, self._unreached = reader, set[str]()
        self._carried = carried_names(model, reader)
        tensors = self._without_memory(pieces)
        cached = self._cache_names()
        self._on_disk += [reader.on_disk.get(name, name) for name in cached]
        cache = dict(reader.tensors(cached)) | reader.cache_scales
        self._reader = join_stacks(model, reader, tensors, self._stacks)
        self._cache = hold_cache(model, reader, cache)
        self._cache_scales = cache if self._cache is not None else {}
        self._place(tensors)

    def _cache_names(self) -> list[str]:
        if cache_format_in(self._pieces) is None:
            return []
        return [name for name in self._pieces.plain() if name.endswith(CACHE_SCALES)]

    def _without_memory(self, pieces: set[str]) -> dict[str, Tensor]:
        """Return the buffers of all layers: global scales as they are, others on meta."""
        reader, found = self._pieces, dict[str, Tensor]()
        names = reader.packed_names()
        small = [name for name, (_, part, _) in names.items() if part in _SMALL]
        for name, tensor in reader.checked(small):
            path, part, layer = names[name]
            is_piece = reader.own is None and part == INPUT_GLOBAL and path in pieces
            if is_piece and packed_problem(part, tensor, layer):
                # Calibration never reached it.
                self._unreached.add(path)
                continue
            found[join(path, part)] = reader.decoded(name, tensor, names[name])
        for path, part, layer in names.values():
            if part not in _SMALL:
                fmt, (*rows, columns) = layer.fmt, layer.shape
                codes = (*rows, fmt.packed_columns(columns))
                shape = codes if part == BUFFERS[0] else layer.scale_shape
                dtype = torch.uint8 if part == BUFFERS[0] else fmt.scale.storage
                found[join(path, part)] = torch.empty(shape, dtype=dtype, device="meta")
        return found

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        """Give layers their buffers on meta, which transformers moves and does not look for."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for name, layer in self._reader.layers.items():
            advice = "Load it with the class that config.json names."
            module = module_for(modules, self._reader, name, advice)
            parts = {part: tensors.get(join(name, part)) for part in BUFFERS}
            meta = {part: None if t is None else t.to("meta") for part, t in parts.items()}
            store_packed(module, meta, layer.config, transposed=layer.transposed)
            module._non_persistent_buffers_set.update(p for p, t in meta.items() if t is not None)
            mark_initialized(module)
        for owner in self._model.modules():
            if isinstance(owner, QuantizedExperts):
                mark_initialized(owner)
        for name in self._cache_scales:
            path, _, key = name.rpartition(".")
            self._model.get_submodule(path)._non_persistent_buffers_set.add(key)
        untie(self._model)

    @property
    def dense(self) -> set[str]:
        """The parameters that are packed in the folder, and filled with the layers."""
        return {each.parameter for each in self._loose}

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor that transformers found no place for is one of these layers."""
        return name in self._expected

    @cached_property
    def _expected(self) -> set[str]:
        """The names that transformers gives to the packed tensors, and to what it makes of them."""
        known = self._reader.packed_names()
        named = names_in_model(self._model, self._on_disk, merged=True).values()
        weights = {weight_name(n, self._model.get_submodule(n)) for n in self._reader.layers}
        return {*known, *named, *self._on_disk, *weights, *self._cache_scales, *self._carried}

    def fill(self) -> None:
        """Read the packed layers, one by one, to the devices where transformers put them."""
        shared: dict[tuple[object, ...], Tensor] = {}
        for name, layer in self._reader.layers.items():
            module: Any = self._model.get_submodule(name)
            device = module._buffers[BUFFERS[0]].device
            for part, tensor in self._buffers(name, layer).items():
                moved = tensor.to(device)
                if part == INPUT_GLOBAL and tensor.numel() == 1:
                    key = (name.rpartition(".")[0], layer.fmt.key, float(tensor), device)
                    moved = shared.setdefault(key, moved)
                module._buffers[part] = moved
                module._non_persistent_buffers_set.discard(part)
        for name, scale in self._cache_scales.items():
            path, _, last = name.rpartition(".")
            module = self._model.get_submodule(path)
            module._buffers[last] = scale.float().to(module._buffers[last].device)
            module._non_persistent_buffers_set.discard(last)
        for loose in self._loose:
            # In place of what transformers took for it; ties to it stay.
            weight = self._model.get_parameter(loose.parameter)
            if weight.is_meta:
                raise CheckpointError(
                    f"{loose.parameter}: the folder has it packed, and the model dense, which the "
                    'disk cannot hold. Give it another place than "disk" in device_map.'
                )
            weight.data = loose.weight().to(weight.device)

    def _buffers(self, name: str, layer: PackedLayer) -> dict[str, Tensor]:
        pieces = self._stacks.get(name)
        if not pieces:
            return {p: t for p, t in self._pieces.parts(name).items() if t is not None}
        state: dict[str, Tensor] = {}
        for piece in pieces:
            for part, tensor in self._piece(piece.name):
                state[join(piece.name, part)] = tensor
        _, joined = join_layers(name, pieces, self._pieces.layers, layer, state)
        return {each.rpartition(".")[2]: tensor for each, tensor in joined.items()}

    def _piece(self, name: str) -> Iterator[tuple[str, Tensor]]:
        chosen = BUFFERS[:3] if name in self._unreached else BUFFERS
        for part, tensor in self._pieces.parts(name, chosen).items():
            if tensor is not None:
                yield part, tensor

    def finish(self) -> None:
        """Complete the model as `load` does."""
        reader, model = self._reader, self._model
        rows = [each.row for each in self._loose]
        finish_loaded(model, reader, self._cache, rows, self._carried, self._ignored)


def _in_model(model: nn.Module, reader: CheckpointReader, pieces: set[str]) -> CheckpointReader:
    """Return a folder without the packed layers of another part than the model's.

    A base model leaves out the head. Raises CheckpointError for a layer of the body that the model
    has no place for.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    out = [name for name in reader.layers if name not in known and name not in pieces]
    lost = [name for name in out if any(map(str.isdigit, name.split(".")))]
    if lost or len(out) == len(reader.layers):
        raise CheckpointError(
            f"{reader.folder}: {model_class(model).__name__} has no place for {len(lost or out)} "
            f"packed layers ({some(lost or out)}). Load it with the class that config.json names."
        )
    kept = {name: layer for name, layer in reader.layers.items() if name not in set(out)}
    gone = {name for layer in out for name in reader.names(layer).values()}
    files = {name: path for name, path in reader.files.items() if name not in gone}
    return dataclasses.replace(reader, layers=kept, files=files)
