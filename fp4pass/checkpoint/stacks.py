"""Stacks of experts in a folder: a linear layer for each expert, as engines read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._compat.transformers_experts import StackView, adapter_of, parts_of
from .._compat.transformers_names import tensors_on_disk
from ..errors import CheckpointError
from ..experts import QuantizedExperts, add_stack, packed_stacks, stacks_of
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .layouts import BUFFERS, PackedLayer, Piece, join
from .model_layers import is_transformers, stored_shape
from .reader import CheckpointReader

# What the name of a weight of a layer ends with.
_ENDS = ".weight"


@dataclass(frozen=True)
class SplitStack:
    """A stack [E, N, K] that lies in a folder in layers.

    Attributes:
        pieces: the layers.
        whole: the name of the stack in folders of the float model that have it in one tensor, "" if
            they have these layers, too.
    """

    pieces: list[Piece]
    whole: str = ""


def split_stacks(model: nn.Module) -> dict[str, SplitStack]:
    """Return the stacks of a model, packed or not, that lie in a folder in layers."""
    stacks = dict(_all_stacks(model)) if is_transformers(model) else {}
    # What the halves of each expert are called: gate and up are apart. All at once, for some lie
    # among the experts of another stack.
    halves, owners = {}, list[tuple[str, int]]()
    for name, (experts, _) in stacks.items():
        first = len(owners)
        owners += [(name, half) for half in range(2 * experts)]
        halves[name] = torch.arange(first, len(owners)).view(experts, 2, 1)
    found: dict[str, SplitStack] = {}
    kept = set()
    for disk, numbers in (tensors_on_disk(model, halves) if halves else {}).items():
        name, first = owners[numbers.flatten()[0]]
        experts, rows = stacks[name]
        held = [owners[number] for number in numbers.flatten().tolist()]
        if held == [(name, half) for half in range(2 * experts)]:
            if pieces := _conventional(model, name, disk, experts, rows):
                found[name] = SplitStack(pieces, disk)
        elif held in ([(name, first)], [(name, first), (name, first + 1)]) and disk.endswith(_ENDS):
            start = first % 2 * (rows // 2)
            stop = start + (rows if len(held) == 2 else rows // 2)
            piece = Piece(disk.removesuffix(_ENDS), first // 2, start, stop)
            found.setdefault(name, SplitStack([])).pieces.append(piece)
        else:
            kept |= {owner for owner, _ in held}
    return {name: found[name] for name in stacks if name in found and name not in kept}


def _all_stacks(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of every stack of a model, and how many experts and rows it has."""
    for path, owner in model.named_modules():
        for key, stack in stacks_of(owner).items():
            experts, rows, _ = stack.dense.shape
            yield join(path, key), (experts, rows)
        for key, packed in (
            packed_stacks(owner).items() if isinstance(owner, QuantizedExperts) else ()
        ):
            experts, rows, _ = packed.weight_packed.shape
            yield join(path, key), (experts, rows)


def _conventional(model: nn.Module, stack: str, disk: str, experts: int, rows: int) -> list[Piece]:
    """Return the layers that others read though folders of the float model have a stack."""
    path, _, last = stack.rpartition(".")
    place, _, last_on_disk = disk.rpartition(".")
    # Under another name engines look for the stack alone.
    parts = parts_of(model.get_submodule(path), last) if last == last_on_disk else ()
    each = rows // max(len(parts), 1)
    return [
        Piece(join(f"{place}.{expert}", part), expert, i * each, (i + 1) * each)
        for expert in range(experts)
        for i, part in enumerate(parts)
    ]


def split_layers(
    model: nn.Module, layers: Mapping[str, PackedLayer]
) -> tuple[dict[str, PackedLayer], dict[str, SplitStack]]:
    """Return the layers as they are on disk, and the stacks that are taken apart.

    A stack whose owner has another one that is dense or quantized otherwise stays in one piece:
    engines want one scheme for all products of an expert.
    """
    written: dict[str, PackedLayer] = {}
    split: dict[str, SplitStack] = {}
    known = split_stacks(model)
    for name, layer in layers.items():
        if name not in known or not _is_uniform(name, layers, model):
            written[name] = layer
            continue
        split[name] = known[name]
        for piece in known[name].pieces:
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
    return {
        name: stack.pieces
        for name, stack in split_stacks(model).items()
        if name not in layers and all(piece.name in layers for piece in stack.pieces)
    }


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
