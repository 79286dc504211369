"""Stacks of experts in a folder: a linear layer for each expert, as engines read them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._compat.transformers_experts import StackView, adapter_of, parts_of
from .._compat.transformers_names import tensors_on_disk
from ..errors import CheckpointError, UnreadError, expected, some
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


def split_stacks(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, SplitStack]:
    """Return the stacks of a model, packed or not, that lie in a folder in layers.

    layers: what is packed in the model, whole: a process may hold a part of it.
    """
    stacks = dict(_all_stacks(model, layers)) if is_transformers(model) else {}
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
) -> tuple[dict[str, PackedLayer], dict[str, SplitStack]]:
    """Return the layers as they are on disk, and the stacks that are taken apart.

    A stack whose owner has another one that is dense or quantized otherwise stays in one piece:
    engines want one scheme for all products of an expert.
    """
    written: dict[str, PackedLayer] = {}
    split: dict[str, SplitStack] = {}
    known = split_stacks(model, layers)
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
    rows = max(piece.stop for piece in pieces)
    for piece in pieces:
        if part in (GLOBAL, INPUT_GLOBAL):
            # Of all experts, of each, or of each part of its rows.
            own = tensor if len(tensor) == 1 else tensor[piece.expert : piece.expert + 1]
            if own.ndim == 2:
                own = own[0].split(1)[piece.start * own.shape[1] // rows]
            yield piece.name, own.clone()
        else:
            yield piece.name, tensor[piece.expert, piece.start : piece.stop].clone()


def stacks_in(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, list[Piece]]:
    """Return the stacks of a model that packed layers are the pieces of, by their names on disk."""
    return {
        name: stack.pieces
        for name, stack in split_stacks(model, {}).items()
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
    filled, dynamic = list[str](), list[str]()
    for path, owner in list(model.named_modules()):
        for key, stack in stacks_of(owner).items():
            name = join(path, key)
            if name in stacks:
                shape, pieces = tuple(stack.dense.shape), stacks[name]
                records = [layers.pop(piece.name) for piece in pieces]
                _require_shapes(reader, pieces, records, shape[2])
                layers[name] = whole = _joined_record(name, records, shape, stack.view)
                if whole.config.multiplies:
                    _as_multipliers(pieces, records, tensors)
                if without := _join_tensors(name, pieces, whole, tensors):
                    if join(name, INPUT_GLOBAL) in tensors:
                        filled += without
                    else:
                        dynamic.append(name)
            if name in layers:
                add_stack(stack)
    _warn_of_missing(filled, dynamic)
    return dataclasses.replace(reader, layers=layers)


def _warn_of_missing(filled: Collection[str], dynamic: Collection[str]) -> None:
    """Warn of experts that no calibration of another library reached."""
    if filled:
        warnings.warn(
            f"{len(filled)} linear layers of experts have no usable scale of their inputs "
            f"({some(sorted(filled))}): calibration never reached them. They get the largest of "
            "the other experts of their layer.",
            stacklevel=4,
        )
    if dynamic:
        warnings.warn(
            f"{len(dynamic)} stacks of experts have no scale of their inputs "
            f"({some(sorted(dynamic))}): each input gets one by its own largest magnitude.",
            stacklevel=4,
        )


def _require_shapes(
    reader: CheckpointReader, pieces: Sequence[Piece], records: Sequence[PackedLayer], columns: int
) -> None:
    """Raise CheckpointError for layers of experts that are not those of the model's config."""
    for piece, record in zip(pieces, records, strict=True):
        if record.shape != (wanted := (piece.stop - piece.start, columns)):
            what = expected(piece.name, f"a weight of {wanted}, as the model has", record.shape)
            raise CheckpointError(
                f"{reader.folder}: {what} The sizes in config.json are not those of these weights."
            )


def _joined_record(
    name: str, records: list[PackedLayer], shape: tuple[int, ...], view: StackView
) -> PackedLayer:
    # Which way a number goes may differ by expert, as some are powers of two by chance.
    multiplies = any(each.config.multiplies for each in records)
    configs = {dataclasses.replace(each.config, multiplies=multiplies) for each in records}
    if len(configs) > 1:
        raise UnreadError(
            f"{name}: expected experts that are quantized alike, got {len(configs)} schemes. Load "
            "the folder with the library that wrote it, or make it dense by fp4pass convert --to "
            "bf16."
        )
    stored = stored_shape(view, shape)
    return dataclasses.replace(
        records[0],
        config=configs.pop(),
        shape=shape,
        transposed=view.transposed,
        stored_shape=stored,
    )


def _as_multipliers(
    pieces: Sequence[Piece], records: Sequence[PackedLayer], tensors: dict[str, Tensor]
) -> None:
    """Turn the global scales that are divisors, which are powers of two, back; in place."""
    for piece, record in zip(pieces, records, strict=True):
        for name in (join(piece.name, part) for part in (GLOBAL, INPUT_GLOBAL)):
            if name in tensors and not record.config.multiplies:
                tensors[name] = 1 / tensors[name]


def _join_tensors(
    name: str, pieces: list[Piece], whole: PackedLayer, tensors: dict[str, Tensor]
) -> list[str]:
    """Replace the buffers of the layers of experts by those of their stack.

    Return the layers that have no scale of their inputs.
    """
    found = {
        part: [tensors.pop(join(piece.name, part), None) for piece in pieces] for part in BUFFERS
    }
    for part in (PACKED, SCALE):
        first = found[part][0]
        assert first is not None, "open_checkpoint requires both"
        stack = first.new_empty((*whole.shape[:2], first.shape[1]))
        for piece, own in zip(pieces, found[part], strict=True):
            stack[piece.expert, piece.start : piece.stop] = own  # type: ignore[assignment]
        tensors[join(name, part)] = stack
    experts, rows = whole.shape[:2]
    parts = len(pieces) // experts
    numbers = {part: torch.full((experts, parts), math.nan) for part in (GLOBAL, INPUT_GLOBAL)}
    for part, table in numbers.items():
        for piece, tensor in zip(pieces, found[part], strict=True):
            if tensor is not None:
                table[piece.expert, piece.start * parts // rows] = tensor.item()
    if whole.fmt.has_global_scale:
        table = numbers[GLOBAL]
        is_one = bool((table == table[:, :1]).all())
        tensors[join(name, GLOBAL)] = table[:, 0].clone() if is_one else table
    inputs = _input_scales(name, numbers[INPUT_GLOBAL], whole.config.multiplies)
    if inputs is not None:
        tensors[join(name, INPUT_GLOBAL)] = inputs
    if not whole.fmt.has_global_scale or (inputs is None and whole.config.weight_only):
        return []
    scales = zip(pieces, found[INPUT_GLOBAL], strict=True)
    return [piece.name for piece, tensor in scales if tensor is None]


def _input_scales(name: str, table: Tensor, multiplies: bool) -> Tensor | None:
    """Return the scales of inputs, [1] for all experts or [E], for those of parts [E, R].

    NaN stands for none. Raises CheckpointError for parts of an expert that differ.
    """
    missing = table.isnan()
    if missing.all():
        return None
    least, most = table.nan_to_num(math.inf).amin(1), table.nan_to_num(-math.inf).amax(1)
    if differ := ((least < most) & ~missing.all(1)).nonzero().flatten().tolist():
        raise CheckpointError(
            f"{name}: expected one global scale of the input for gate and up, which read the same, "
            f"got two for expert {differ[0]}. fp4pass convert --to bf16 makes dense weights of the "
            "folder, which need none."
        )
    # What multiplies most, or is divided by least, holds the largest inputs.
    known = table[~missing]
    largest = known.amax() if multiplies else known.amin()
    scales = torch.where(missing.all(1), largest, least)
    return scales[:1].clone() if bool((scales == scales[0]).all()) else scales
