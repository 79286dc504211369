"""Read the models of a report, layer by layer: the quantized one and the float one."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..checkpoint.float_models import open_float_source
from ..checkpoint.layouts import WEIGHTS, PackedLayer, Piece, join
from ..checkpoint.model_layers import NamesOnDisk, split_stacks, stored_shape
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..checkpoint.source_files import find_shards, read_tensor, require_float, tensor_facts
from ..core.quant_state import QuantState
from ..errors import CheckpointError, StateError, expected
from ..nn.experts import QUANTIZED
from ..nn.linear import GLOBAL, KINDS, PACKED, SCALE
from ..quantization.recipe import recorded
from ..record.rows import Report, Row
from ..record.state import get_state, unwrap

Source = nn.Module | CheckpointReader | str | os.PathLike[str]

CODES, SKIPPED = KINDS[PACKED], "skipped linear layers"

# Name, kind if it is packed, shape and bytes.
_Tensor = tuple[str, str | None, tuple[int, ...], int]


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
    rows: Sequence[Row]  # of every layer that is known, in the order of the model
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
        plain = sum(part.bytes for part in self.parts if part.kind not in KINDS.values())
        return plain + sum(
            math.prod(layer.shape) * getattr(torch, layer.weight_dtype).itemsize
            for layer in self.packed.values()
        )


def open_packed(source: Source, name: str = "") -> PackedModel:
    """Open a quantized model; `name` is by default its class or path. Raises Fp4PassError."""
    if isinstance(source, nn.Module):
        return _of_model(source, name or type(unwrap(source)).__name__)
    if not isinstance(source, CheckpointReader):
        source = open_checkpoint(Path(source))
    return _of_folder(source.as_in_model(), name or str(source.folder))


def _of_folder(stored: CheckpointReader, name: str) -> PackedModel:
    report = Report.from_dict(stored.own["report"]) if stored.own else Report(())
    shapes = {row.name: row.shape for row in report.rows}
    stacks = {name: pieces for name, pieces in stored.stacks.items() if name in shapes}
    pieces = {piece.name for each in stacks.values() for piece in each}
    layers = {name: layer for name, layer in stored.layers.items() if name not in pieces}
    for name_, each in stacks.items():
        whole = dataclasses.replace(stored.layers[each[0].name], shape=shapes[name_])
        layers[name_] = stored.joined.get(name_, whole)

    def states(name: str) -> Iterator[tuple[QuantState, Piece | None]]:
        if name not in stacks:
            yield from _states(name, stored.parts(name), layers[name])
        for piece in stacks.get(name, ()):
            for state, _ in _states(name, stored.parts(piece.name), stored.layers[piece.name]):
                yield state, piece

    def scales(name: str) -> Iterator[Tensor]:
        names = [piece.name for piece in stacks.get(name, ())] or [name]
        found = stored.tensors(dict.fromkeys(stored.names(each)[SCALE] for each in names))
        return (tensor for _, tensor in found)

    kinds = {
        disk: KINDS[part] for layer in stored.layers for part, disk in stored.names(layer).items()
    }
    disk = {name: stored.on_disk.get(name, name) for name in stored.files}
    facts = tensor_facts({disk[name]: path for name, path in stored.files.items()})
    rows = _rows(report, layers)
    tensors = [
        (name, kinds.get(name), facts[at][0], _tensor_bytes(*facts[at]))
        for name, at in disk.items()
    ]
    return PackedModel(
        name=name,
        layout=stored.layout.name,
        architecture=next(iter(stored.config.get("architectures") or ()), None),
        packed=layers,
        rows=rows,
        states=states,
        scales=scales,
        parts=_parts(tensors, rows, layers),
        recipe=None if stored.recipe is None else recorded(stored.recipe),
        calibration=(stored.recipe or {}).get("calibration"),
        versions=stored.versions,
        on_disk=stored.renamed,
    )


def _of_model(model: nn.Module, name: str) -> PackedModel:
    root, state = unwrap(model), get_state(model)
    if state is None or state.status != "converted":
        raise StateError(
            "The model is not converted, so there is nothing to report. Call "
            "fp4pass.convert(model) first."
        )
    layers = {}
    for row in state.report.converted:
        module = root.get_submodule(row.name)
        if isinstance(module, QUANTIZED):
            dtype = str(module.weight_dtype).removeprefix("torch.")
            shape = stored_shape(getattr(module, "view", None), row.shape)
            layers[row.name] = PackedLayer(
                module.config, dtype, module.transposed, row.shape, shape
            )
    stacks = split_stacks(root, layers)

    def states(name: str) -> Iterator[tuple[QuantState, Piece | None]]:
        parts = dict(root.get_submodule(name).named_buffers())
        pieces = stacks[name].pieces if name in stacks else []
        return _states(name, parts, layers[name], pieces)

    recipe = None if "loaded" in state.recipe else state.recipe
    known = bool(recipe) or any(row.weight_error is not None for row in state.report.rows)
    rows = _rows(state.report if known else Report(()), layers)
    names = NamesOnDisk.of(root, (), {name: root.get_submodule(name) for name in layers}, {})
    return PackedModel(
        name=name,
        layout="in memory",
        architecture=type(root).__name__,
        packed=layers,
        rows=rows,
        states=states,
        scales=lambda name: iter([root.get_submodule(name).get_buffer(SCALE)]),
        parts=_parts(_model_tensors(root, layers), rows, layers),
        recipe=None if recipe is None else recorded(recipe),
        calibration=(recipe or {}).get("calibration"),
        versions={"fp4pass": __version__, "torch": torch.__version__} if known else {},
        on_disk={name: disk for disk, name in names.in_model.items()},
    )


def _rows(report: Report, layers: Mapping[str, PackedLayer]) -> list[Row]:
    """Return the rows of a report, then one for each packed layer that it lacks."""
    known = {row.name for row in report.rows}
    return [
        *report.rows,
        *(
            Row(name, layer.shape, layer.config, bits=layer.fmt.bits_per_weight(layer.shape))
            for name, layer in layers.items()
            if name not in known
        ),
    ]


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


def _tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor of a safetensors dtype, such as BF16 or F8_E4M3."""
    width = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(width[0]) if width else 8) // 8


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
    tensors: Iterable[_Tensor], rows: Sequence[Row], layers: Mapping[str, PackedLayer]
) -> tuple[Part, ...]:
    skipped = {row.name for row in rows if row.skip_reason}
    sizes: dict[str, list[int]] = {}
    for name, kind, shape, size in tensors:
        count = 0 if kind else math.prod(shape)
        found = sizes.setdefault(kind or _dense_kind(name, len(shape), skipped), [0, 0])
        found[0], found[1] = found[0] + size, found[1] + count
    if CODES in sizes:
        sizes[CODES][1] = sum(math.prod(layer.shape) for layer in layers.values())
    parts = (Part(kind, *found) for kind, found in sizes.items())
    return tuple(sorted(parts, key=lambda part: (-part.bytes, part.kind)))


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
        known: Mapping[str, Any] = dict(root.named_parameters(remove_duplicate=False))
        size, read = sum(size for *_, size in _model_tensors(root, {})), known.__getitem__
        name = name or type(root).__name__
    else:
        folder = Path(str(source))
        if not folder.is_dir():
            wanted = "the folder of a float model"
            raise CheckpointError(expected("reference", wanted, str(folder)))
        held = open_float_source(str(folder))
        if held is None:
            require_float(folder)
        made = {} if held is None else held.weights()
        known = find_shards(folder, WEIGHTS)
        size = sum(_tensor_bytes(shape, dtype) for shape, dtype in tensor_facts(known).values())
        name = name or str(source)

        def read(tensor: str) -> Tensor:
            return made[tensor][...] if tensor in made else read_tensor(known, tensor)

    def weight(layer: str, packed: PackedLayer, piece: Piece | None) -> Tensor | None:
        own = "" if piece is None else join(piece.name, "weight")
        names = [layer, join(layer, "weight")]
        names += [on_disk[name] for name in names if name in on_disk]
        tensor = next((each for each in (own, *names) if each in known), None)
        if tensor is None or tensor == own:
            # A piece needs no cut.
            return None if tensor is None else read(tensor)
        found = read(tensor).detach()
        if tuple(found.shape) != packed.dense_shape:
            wanted = f"shape {packed.dense_shape}"
            raise CheckpointError(
                expected(f"{layer} of the reference", wanted, tuple(found.shape))
                + " Give the float model that the quantized one was made of."
            )
        found = packed.matrices(found)
        if piece is not None:
            found = found[piece.expert, piece.start : piece.stop]
        return found.contiguous()

    return FloatModel(name, size, weight)
