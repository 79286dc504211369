"""Read the models of a report, layer by layer: the quantized one and the float one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..checkpoint.float_source import open_float_source
from ..checkpoint.layouts import WEIGHTS, PackedLayer, Piece, join
from ..checkpoint.model_layers import NamesOnDisk
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.reader import CheckpointReader, as_in_model
from ..checkpoint.source_files import find_shards, read_tensor, tensor_facts
from ..checkpoint.split_stacks import split_stacks
from ..checkpoint.unread import require_float
from ..core.files import path_of
from ..core.quant_state import QuantState
from ..errors import CheckpointError, StateError, expected
from ..nn.linear import GLOBAL, KINDS, PACKED, SCALE
from ..quantization.recipe import recorded
from ..record.rows import Report, Row
from ..record.state import get_state, unwrap
from .layers import Facts, layer_facts, packed_layers
from .text import tensor_bytes

Source = nn.Module | CheckpointReader | str | os.PathLike[str]

CODES, SKIPPED = KINDS[PACKED], "skipped linear layers"


@dataclass(frozen=True)
class Part:
    """The tensors of one kind."""

    kind: str
    bytes: int
    parameters: int  # how many they stand for


@dataclass(frozen=True)
class PackedModel:
    """A quantized model, in memory or in a folder."""

    name: str
    layout: str  # of its folder, "in memory" without one
    architecture: str | None  # the class of the model
    packed: Mapping[str, PackedLayer]
    facts: Mapping[str, Facts]  # of every layer that is known, in the order of the model
    # Reads the packed weight of a layer: one, or those of a stack with their places in it.
    states: Callable[[str], Iterator[tuple[QuantState, Piece | None]]]
    # Reads the bits of the block scales of a layer.
    scales: Callable[[str], Iterator[Tensor]]
    parts: tuple[Part, ...]  # the largest first
    recipe: Mapping[str, Any] | None  # as `quantize --rules` reads it; None if it is not known
    calibration: Mapping[str, Any] | None  # None if there was none, or it is not known
    versions: Mapping[str, str]  # of the libraries that made it
    # Names of weights and stacks in folders of the float model, where they differ.
    on_disk: Mapping[str, str]

    @property
    def dense_bytes(self) -> int:
        """Bytes of its tensors if the packed weights had the dtype of their layers."""
        packed = sum(part.bytes for part in self.parts if part.kind in KINDS.values())
        dense = sum(
            math.prod(layer.shape) * getattr(torch, layer.weight_dtype).itemsize
            for layer in self.packed.values()
        )
        return sum(part.bytes for part in self.parts) - packed + dense


def open_packed(source: Source, name: str = "") -> PackedModel:
    """Open a quantized model; `name` is by default its class or path. Raises Fp4PassError."""
    if isinstance(source, nn.Module):
        return _of_model(source, name or type(unwrap(source)).__name__)
    if not isinstance(source, CheckpointReader):
        source = open_checkpoint(path_of(source, "source", "a converted model or a path"))
    return _of_folder(as_in_model(source), name or str(source.folder))


def _of_folder(stored: CheckpointReader, name: str) -> PackedModel:
    report = Report.from_dict(stored.own["report"]) if stored.own else Report(())
    rows = {row.name: row for row in report.rows}
    stacks = {name: pieces for name, pieces in stored.stacks.items() if name in rows}
    pieces = {piece.name for each in stacks.values() for piece in each}
    layers = {name: layer for name, layer in stored.layers.items() if name not in pieces}
    for name, each in stacks.items():
        first = stored.layers[each[0].name]
        whole = dataclasses.replace(first, shape=rows[name].shape)
        layers[name] = stored.joined.get(name, whole)
    facts = _facts(report, layers)

    def states(name: str) -> Iterator[tuple[QuantState, Piece | None]]:
        if name not in stacks:
            yield from _states(name, stored.parts(name), layers[name])
        for piece in stacks.get(name, ()):
            for state, _ in _states(name, stored.parts(piece.name), stored.layers[piece.name]):
                yield state, piece

    def scales(name: str) -> Iterator[Tensor]:
        names = [piece.name for piece in stacks.get(name, ())] or [name]
        for _, tensor in stored.tensors(dict.fromkeys(stored.names(each)[SCALE] for each in names)):
            yield tensor

    kinds = {
        disk: KINDS[part] for layer in stored.layers for part, disk in stored.names(layer).items()
    }
    disk = {name: stored.on_disk.get(name, name) for name in stored.files}
    found = tensor_facts({disk[name]: path for name, path in stored.files.items()})
    tensors = (
        (name, kinds.get(name), found[disk[name]][0], tensor_bytes(*found[disk[name]]))
        for name in stored.files
    )
    return PackedModel(
        name=name,
        layout=stored.layout.name,
        architecture=next(iter(stored.config.get("architectures") or ()), None),
        packed=layers,
        facts=facts,
        states=states,
        scales=scales,
        parts=_parts(tensors, facts, layers),
        recipe=None if stored.recipe is None else recorded(stored.recipe),
        calibration=(stored.recipe or {}).get("calibration"),
        versions=stored.versions,
        on_disk=stored.renamed,
    )


def _of_model(model: nn.Module, name: str) -> PackedModel:
    root, state = unwrap(model), get_state(model)

    def states(name: str) -> Iterator[tuple[QuantState, Piece | None]]:
        layer, parts = layers[name], dict(root.get_submodule(name).named_buffers())
        pieces = stacks[name].pieces if name in stacks else []
        return _states(name, parts, layer, pieces)

    if state is None or state.status != "converted":
        raise StateError(
            "The model is not converted, so there is nothing to report. Call "
            "fp4pass.convert(model) first."
        )
    report = state.report
    layers = packed_layers(report, root)
    stacks = split_stacks(root, layers)
    recipe = None if "loaded" in state.recipe else state.recipe
    known = bool(recipe) or any(row.weight_error is not None for row in report.rows)
    facts = _facts(report if known else Report(()), layers)
    names = NamesOnDisk.of(root, (), {name: root.get_submodule(name) for name in layers}, {})
    return PackedModel(
        name=name,
        layout="in memory",
        architecture=type(root).__name__,
        packed=layers,
        facts=facts,
        states=states,
        scales=lambda name: iter([root.get_submodule(name).get_buffer(SCALE)]),
        parts=_parts(_model_tensors(root, layers), facts, layers),
        recipe=None if recipe is None else recorded(recipe),
        calibration=(recipe or {}).get("calibration"),
        versions={"fp4pass": __version__, "torch": torch.__version__} if known else {},
        on_disk={name: disk for disk, name in names.in_model.items()},
    )


def _facts(report: Report, layers: Mapping[str, PackedLayer]) -> dict[str, Facts]:
    """Return the facts of every row of the report, then of packed layers that it lacks."""
    rows = {row.name: row for row in report.rows}
    for name, layer in layers.items():
        rows.setdefault(
            name, Row(name, layer.shape, layer.config, bits=layer.fmt.bits_per_weight(layer.shape))
        )
    return {name: layer_facts(row) for name, row in rows.items()}


def _states(
    name: str,
    parts: Mapping[str, Tensor | None],
    layer: PackedLayer,
    pieces: Sequence[Piece] = (),
) -> Iterator[tuple[QuantState, Piece | None]]:
    """Yield the packed weight of a layer, or those of a stack: by its pieces, else by experts."""
    packed, scale, stored = parts[PACKED], parts[SCALE], parts.get(GLOBAL)
    assert packed is not None and scale is not None
    fmt = layer.config.format
    scale = scale.view(fmt.scale.dtype)
    numbers = [] if stored is None else stored.flatten().tolist()
    scales = list(map(fmt.global_scale_of, numbers)) or [1.0] * layer.shape[0]
    if not layer.is_stacked:
        yield QuantState(packed, scale, scales[0], layer.fmt, layer.shape), None
        return
    experts, rows, columns = layer.shape
    # Of the parts of an expert's rows that have one each.
    each = rows * experts // len(scales)
    whole = (Piece(name, e, i, i + each) for e in range(experts) for i in range(0, rows, each))
    for piece in pieces or whole:
        own = packed[piece.expert], scale[piece.expert]
        scale_of_it = scales[(piece.expert * rows + piece.start) // each]
        expert = QuantState(*own, scale_of_it, layer.fmt, (rows, columns))
        yield expert.rows(piece.start, piece.stop), piece


# Name, kind if it is packed, shape and bytes.
_Tensor = tuple[str, str | None, tuple[int, ...], int]


def _model_tensors(root: nn.Module, layers: Mapping[str, PackedLayer]) -> Iterator[_Tensor]:
    """Yield the tensors of a model, each once."""
    seen = set()
    for name, tensor in root.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        key = tensor.data_ptr() or id(tensor)
        if key not in seen:
            seen.add(key)
            path, _, last = name.rpartition(".")
            kind = KINDS.get(last) if path in layers else None
            yield name, kind, tuple(tensor.shape), tensor.nbytes


def _parts(
    tensors: Iterator[_Tensor], facts: Mapping[str, Facts], layers: Mapping[str, PackedLayer]
) -> tuple[Part, ...]:
    skipped = {name for name, each in facts.items() if each["skip_reason"]}
    found: dict[str, Part] = {}
    for name, kind, shape, size in tensors:
        count = 0
        if kind is None:
            kind, count = _dense_kind(name, len(shape), skipped), math.prod(shape)
        before = found.get(kind, Part(kind, 0, 0))
        found[kind] = Part(kind, before.bytes + size, before.parameters + count)
    if CODES in found:
        weights = sum(math.prod(layer.shape) for layer in layers.values())
        found[CODES] = dataclasses.replace(found[CODES], parameters=weights)
    return tuple(sorted(found.values(), key=lambda part: (-part.bytes, part.kind)))


def _dense_kind(name: str, dimensions: int, skipped: set[str]) -> str:
    path, _, last = name.rpartition(".")
    if path in skipped and last == "weight":
        return SKIPPED
    if dimensions < 2:
        return "biases, norms and other vectors"
    words = name.split(".")
    if any("embed" in word or word in ("wte", "wpe") for word in words):
        return "embeddings"
    return SKIPPED if "lm_head" in words else "other matrices"


@dataclass(frozen=True)
class FloatModel:
    """The float model that a quantized one was made of."""

    name: str
    bytes: int
    # [N, K] of a layer, or of a piece of one; None if it has no such layer.
    weight: Callable[[str, PackedLayer, Piece | None], Tensor | None]


def open_float(
    source: Source, name: str = "", on_disk: Mapping[str, str] = MappingProxyType({})
) -> FloatModel:
    """Open a float model; a folder is read tensor by tensor. Raises CheckpointError.

    on_disk: as `PackedModel` has it.
    """
    if isinstance(source, nn.Module):
        root = unwrap(source)
        weights = dict(root.named_parameters(remove_duplicate=False))
        size = sum(size for *_, size in _model_tensors(root, {}))

        def of_module(layer: str, packed: PackedLayer, piece: Piece | None) -> Tensor | None:
            names = (layer, join(layer, "weight"))
            found = next((weights[name] for name in names if name in weights), None)
            return None if found is None else _weight(found, packed, layer, piece)

        return FloatModel(name or type(root).__name__, size, of_module)
    folder = path_of(source, "reference", "a float model or a path")
    if not folder.is_dir():
        raise CheckpointError(expected("reference", "the folder of a float model", str(folder)))
    held = open_float_source(os.fspath(folder))
    if held is None:
        require_float(folder)
    made = {} if held is None else held.weights()
    files = find_shards(folder, WEIGHTS)

    def of_file(layer: str, packed: PackedLayer, piece: Piece | None) -> Tensor | None:
        own = "" if piece is None else join(piece.name, "weight")
        names = [layer, join(layer, "weight")]
        names += [on_disk[name] for name in names if name in on_disk]
        tensor = next((each for each in (own, *names) if each in files), None)
        if tensor is None:
            return None
        found = made[tensor][...] if tensor in made else read_tensor(files, tensor)
        # A piece needs no cut.
        return found if tensor == own else _weight(found, packed, layer, piece)

    size = sum(tensor_bytes(shape, dtype) for shape, dtype in tensor_facts(files).values())
    return FloatModel(name or str(source), size, of_file)


def _weight(weight: Tensor, layer: PackedLayer, name: str, piece: Piece | None) -> Tensor:
    if tuple(weight.shape) != layer.dense_shape:
        raise CheckpointError(
            expected(f"{name} of the reference", f"shape {layer.dense_shape}", tuple(weight.shape))
            + " Give the float model that the quantized one was made of."
        )
    weight = layer.matrices(weight.detach())
    if piece is not None:
        weight = weight[piece.expert, piece.start : piece.stop]
    return weight.contiguous()
