"""Find stacks of experts whose layers lie on disk one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .._compat.torch import model_class
from .._compat.transformers_experts import adapter_of, parts_of
from .._compat.transformers_loading import tensors_on_disk
from ..nn.experts import QuantizedExperts, packed_stacks, stacks_of
from .layouts import PackedLayer, Piece, has_whole_tiles, join
from .model_layers import is_transformers

# The end of the name of a layer's weight.
_WEIGHT = ".weight"


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


def split_stacks(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, SplitStack]:
    """Return the stacks of a model, packed or not, that lie in a folder in layers.

    layers: what is packed in the model, whole: a process may hold a part of it.
    """
    stacks = dict(_all_stacks(model, layers)) if is_transformers(model) else {}
    # The names of the halves of each expert: gate and up are apart. All at once, for some lie
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
        elif held in ([(name, first)], [(name, first), (name, first + 1)]) and disk.endswith(
            _WEIGHT
        ):
            start = first % 2 * (rows // 2)
            stop = start + (rows if len(held) == 2 else rows // 2)
            piece = Piece(disk.removesuffix(_WEIGHT), first // 2, start, stop)
            found.setdefault(name, SplitStack([])).pieces.append(piece)
        else:
            kept |= {owner for owner, _ in held}
    return {name: found[name] for name in stacks if name in found and name not in kept}


def _all_stacks(
    model: nn.Module, layers: Mapping[str, PackedLayer]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of every stack of a model, and how many experts and rows it has."""
    for path, owner in model.named_modules():
        packed = packed_stacks(owner) if isinstance(owner, QuantizedExperts) else {}
        for key in packed:
            experts, rows, _ = layers[join(path, key)].shape
            yield join(path, key), (experts, rows)
        for key, stack in stacks_of(owner).items():
            experts, rows, _ = stack.dense.shape
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
) -> tuple[dict[str, PackedLayer], dict[str, SplitStack], dict[str, str]]:
    """Return the layers as they are on disk, the stacks that are taken apart, and why others not.

    A stack whose owner has another one that is dense or quantized otherwise stays in one piece:
    engines want one scheme for all products of an expert.
    """
    written: dict[str, PackedLayer] = {}
    split: dict[str, SplitStack] = {}
    whole: dict[str, str] = {}
    known = split_stacks(model, layers)
    for name, layer in layers.items():
        if not layer.is_stacked:
            written[name] = layer
            continue
        if name not in known:
            whole[name] = f"folders of {model_class(model).__name__} have them under other names"
        elif not has_whole_tiles(known[name].pieces, layer.fmt):
            size = known[name].pieces[0].stop - known[name].pieces[0].start
            whole[name] = f"gate and up of {size} rows share blocks of {layer.fmt.rows} rows"
        elif not _is_uniform(name, layers, model):
            whole[name] = "another stack of their layer is not packed alike"
        if name in whole:
            written[name] = layer
            continue
        split[name] = known[name]
        for piece in known[name].pieces:
            shape = (piece.stop - piece.start, layer.shape[2])
            written[piece.name] = dataclasses.replace(
                layer, shape=shape, transposed=False, stored_shape=()
            )
    return written, split, whole


def stacks_in(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, list[Piece]]:
    """Return the stacks of a model that packed layers are the pieces of, by their names on disk.

    Folders may lack the name of the base model before all others, or have it beyond the model's.
    """
    prefix: str = getattr(model, "base_model_prefix", "")
    found: dict[str, list[Piece]] = {}
    for name, stack in split_stacks(model, {}).items():
        for named in (str, lambda n: n.removeprefix(f"{prefix}."), lambda n: join(prefix, n)):
            pieces = [piece._replace(name=named(piece.name)) for piece in stack.pieces]
            if name not in layers and all(piece.name in layers for piece in pieces):
                found.setdefault(name, pieces)
    return found


def _is_uniform(name: str, layers: Mapping[str, PackedLayer], model: nn.Module) -> bool:
    """Return whether a stack is packed as the other stack of its owner."""
    path = name.rpartition(".")[0]
    adapter = adapter_of(model.get_submodule(path))
    others = [layers.get(join(path, each)) for each in (adapter.names if adapter else ())]
    return len({each and each.scheme for each in others}) == 1
