"""Stacks of experts in a folder: a linear layer for each expert, as engines read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .._compat.transformers_experts import StackView, adapter_of, parts_of
from .._compat.transformers_names import tensors_on_disk
from ..errors import CheckpointError
from ..experts import add_stack, stacks_of
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .layouts import BUFFERS, PackedLayer, Piece, join
from .model_layers import is_transformers, stored_shape
from .reader import CheckpointReader


def pieces_of(model: nn.Module, stack: str, shape: tuple[int, ...]) -> list[Piece]:
    """Return the layers on disk of a stack [E, N, K], none if files keep it as one tensor."""
    if not is_transformers(model):
        return []
    experts, rows, _ = shape
    disk = _halves_on_disk(model, stack, experts)
    if parts := _parts_of(model, stack, disk):
        each, path = rows // len(parts), next(iter(disk)).rpartition(".")[0]
        return [
            Piece(join(f"{path}.{expert}", part), expert, i * each, (i + 1) * each)
            for expert in range(experts)
            for i, part in enumerate(parts)
        ]
    found = []
    for name, numbers in disk.items():
        first, *rest = numbers.flatten().tolist()
        if rest not in ([], [first + 1]) or not name.endswith(".weight"):
            return []
        start = first % 2 * (rows // 2)
        stop = start + (rows if rest else rows // 2)
        found.append(Piece(name.removesuffix(".weight"), first // 2, start, stop))
    return found


def _halves_on_disk(model: nn.Module, stack: str, experts: int) -> Mapping[str, Tensor]:
    """Return where folders of a float model have the halves of each expert: gate and up."""
    return tensors_on_disk(model, {stack: torch.arange(2 * experts).view(experts, 2, 1)})


def _parts_of(model: nn.Module, stack: str, disk: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the linear layers of an expert that others read though a model's folder has stacks."""
    path, _, last = stack.rpartition(".")
    # Under another name engines look for the stack alone.
    is_whole = len(disk) == 1 and next(iter(disk)).rpartition(".")[2] == last
    return parts_of(model.get_submodule(path), last) if is_whole else ()


def whole_stacks(model: nn.Module, stacks: Mapping[str, Sequence[Piece]]) -> dict[str, str]:
    """Return those stacks that folders of the float model have in one tensor, and its name."""
    found = {}
    for name, pieces in stacks.items():
        disk = _halves_on_disk(model, name, 1 + max(piece.expert for piece in pieces))
        if _parts_of(model, name, disk):
            (found[name],) = disk
    return found


def split_layers(
    model: nn.Module, layers: Mapping[str, PackedLayer]
) -> tuple[dict[str, PackedLayer], dict[str, list[Piece]]]:
    """Return the layers as they are on disk, and the pieces of each stack that is taken apart.

    A stack whose owner has another one that is dense or quantized otherwise stays in one piece:
    engines want one scheme for all products of an expert.
    """
    written: dict[str, PackedLayer] = {}
    split: dict[str, list[Piece]] = {}
    for name, layer in layers.items():
        pieces = pieces_of(model, name, layer.shape) if _is_uniform(name, layers, model) else []
        if not pieces:
            written[name] = layer
            continue
        split[name] = pieces
        for piece in pieces:
            shape = (piece.stop - piece.start, layer.shape[2])
            written[piece.name] = dataclasses.replace(
                layer, shape=shape, transposed=False, stored_shape=()
            )
    return written, split


def _is_uniform(name: str, layers: Mapping[str, PackedLayer], model: nn.Module) -> bool:
    """Return whether a layer is a stack, packed as the other stack of its owner."""
    if not layers[name].is_stacked:
        return False
    path = name.rpartition(".")[0]
    adapter = adapter_of(model.get_submodule(path))
    others = [layers.get(join(path, each)) for each in (adapter.names if adapter else ())]
    return len({each and (each.fmt, each.config.weight_only) for each in others}) == 1


def split_tensor(pieces: list[Piece], part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the layer and a copy of its share of a stack's buffer, for each piece."""
    for piece in pieces:
        if part == INPUT_GLOBAL:
            yield piece.name, tensor.clone()
        elif part == GLOBAL:
            yield piece.name, tensor[piece.expert : piece.expert + 1].clone()
        else:
            yield piece.name, tensor[piece.expert, piece.start : piece.stop].clone()


def stacks_in(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, list[Piece]]:
    """Return the stacks of a model that packed layers are the pieces of, by their names on disk."""
    found = {}
    for path, owner in model.named_modules():
        for key, stack in stacks_of(owner).items():
            name = join(path, key)
            shape = tuple(stack.dense.shape)
            pieces = [] if name in layers else pieces_of(model, name, shape)
            if pieces and all(piece.name in layers for piece in pieces):
                found[name] = pieces
    return found


def join_stacks(
    model: nn.Module,
    reader: CheckpointReader,
    tensors: dict[str, Tensor],
    stacks: Mapping[str, list[Piece]],
) -> CheckpointReader:
    """Return a folder with stacks in place of their pieces; in `tensors` in place.

    Every stack that is packed becomes a module of the model. Raises CheckpointError for experts
    that a stack cannot hold.
    """
    layers = dict(reader.layers)
    for path, owner in list(model.named_modules()):
        for key, stack in stacks_of(owner).items():
            name = join(path, key)
            if name in stacks:
                shape, pieces = tuple(stack.dense.shape), stacks[name]
                records = [layers.pop(piece.name) for piece in pieces]
                layers[name] = _joined_record(name, records, shape, stack.view)
                _join_tensors(name, pieces, shape, tensors)
            if name in layers:
                add_stack(stack)
    return dataclasses.replace(reader, layers=layers)


def _joined_record(
    name: str, records: list[PackedLayer], shape: tuple[int, ...], view: StackView
) -> PackedLayer:
    configs = {each.config for each in records}
    if len(configs) > 1:
        raise CheckpointError(
            f"{name}: expected experts that are quantized alike, got {len(configs)} schemes. Load "
            "the folder with the library that wrote it."
        )
    stored = stored_shape(view, shape)
    return dataclasses.replace(
        records[0], shape=shape, transposed=view.transposed, stored_shape=stored
    )


def _join_tensors(
    name: str, pieces: list[Piece], shape: tuple[int, ...], tensors: dict[str, Tensor]
) -> None:
    """Replace the buffers of the layers of experts by those of their stack."""
    found: dict[str, list[Tensor]] = {}
    for part in BUFFERS:
        own = [
            tensors.pop(join(piece.name, part))
            for piece in pieces
            if join(piece.name, part) in tensors
        ]
        if own:
            found[part] = own
    for part in (PACKED, SCALE):
        first = found[part][0]
        whole = first.new_empty((*shape[:2], first.shape[1]))
        for piece, tensor in zip(pieces, found[part], strict=True):
            whole[piece.expert, piece.start : piece.stop] = tensor
        tensors[join(name, part)] = whole
    if GLOBAL in found:
        scales: dict[int, set[float]] = {}
        for piece, tensor in zip(pieces, found[GLOBAL], strict=True):
            scales.setdefault(piece.expert, set()).add(float(tensor))
        if differ := [expert for expert, each in scales.items() if len(each) > 1]:
            raise CheckpointError(
                f"{name}: expected one global scale for gate and up of an expert, got two for "
                f"expert {differ[0]}. Engines would take one of them; quantize the model again."
            )
        ordered = [scales[expert].pop() for expert in range(shape[0])]
        tensors[join(name, GLOBAL)] = torch.tensor(ordered, dtype=torch.float32)
    if INPUT_GLOBAL in found:
        numbers = {float(each) for each in found[INPUT_GLOBAL]}
        if len(numbers) > 1:
            raise CheckpointError(
                f"{name}: expected one global scale of the input for all experts, got "
                f"{len(numbers)}. Load the folder with the library that wrote it."
            )
        tensors[join(name, INPUT_GLOBAL)] = found[INPUT_GLOBAL][0]
