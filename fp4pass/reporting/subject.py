"""What a page is about: a folder with packed weights or a converted model, read layer by layer."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..checkpoint.layouts import WEIGHTS, PackedLayer
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..checkpoint.safetensors_io import find_shards, opened, tensor_facts
from ..core.quant_state import QuantState
from ..errors import CheckpointError, StateError
from ..linear import GLOBAL, KINDS, PACKED, SCALE
from ..quantization.recipe import Recipe
from ..quantization.report import Report, Row
from ..quantization.state import get_state, unwrap

CODES, LEFT_ALONE = KINDS[PACKED], "linears left alone"


@dataclass(frozen=True)
class Part:
    """Tensors of one kind: how many bytes they have, and how many parameters they stand for."""

    kind: str
    bytes: int
    parameters: int


@dataclass(frozen=True)
class Subject:
    """A quantized model, wherever it is.

    layout: of its folder, "in memory" without one; layers: what is packed; rows: the report, as
    far as it is known; state: reads a packed weight, one at a time; parts: its tensors.
    """

    name: str
    layout: str
    architecture: str | None
    layers: Mapping[str, PackedLayer]
    rows: Mapping[str, Row]
    state: Callable[[str], QuantState]
    parts: tuple[Part, ...]
    recipe: Mapping[str, Any] | None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def calibration(self) -> Mapping[str, Any] | None:
        """What was seen of the calibration, None without one."""
        return (self.recipe or {}).get("calibration")

    @property
    def dense_bytes(self) -> int:
        """Of its tensors, were the packed weights in the dtype that the layers had."""
        packed = sum(part.bytes for part in self.parts if part.kind in KINDS.values())
        dense = sum(
            math.prod(layer.shape) * getattr(torch, layer.weight_dtype).itemsize
            for layer in self.layers.values()
        )
        return sum(part.bytes for part in self.parts) - packed + dense


def open_subject(source: nn.Module | str | os.PathLike[str], name: str = "") -> Subject:
    """A folder that fp4pass or another library wrote, or a converted model; name: what to call it.

    Raises CheckpointError for a folder without packed weights, StateError for a float model.
    """
    if isinstance(source, nn.Module):
        return _of_model(source, name or type(unwrap(source)).__name__)
    stored = open_checkpoint(Path(source))
    return _of_folder(stored, name or str(source))


def _of_folder(stored: CheckpointReader, name: str) -> Subject:
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    kinds = {
        disk: KINDS[part] for layer in stored.layers for part, disk in stored.names(layer).items()
    }
    facts = tensor_facts(stored.files)
    left_alone = {row.name for row in rows if row.skip_reason}
    tensors = (
        (tensor, kinds.get(tensor), shape, math.prod(shape) * _bits(dtype) // 8)
        for tensor, (shape, dtype) in facts.items()
    )
    return Subject(
        name=name,
        layout=stored.layout.name,
        architecture=next(iter(stored.config.get("architectures") or ()), None),
        layers=stored.layers,
        rows={row.name: row for row in rows},
        state=lambda layer: _state(stored.parts(layer), stored.layers[layer]),
        parts=_parts(tensors, left_alone, stored.layers),
        recipe=_recipe(stored.recipe),
        versions=stored.versions,
    )


def _of_model(model: nn.Module, name: str) -> Subject:
    root, record = unwrap(model), get_state(model)
    if record is None or record.status != "converted":
        raise StateError(
            "The model is not converted, so there is nothing to report. Call "
            "fp4pass.convert(model) first."
        )
    layers = {}
    for row in record.report.converted:
        if row.config is None:
            continue
        module: Any = root.get_submodule(row.name)
        dtype = str(getattr(module, "weight_dtype", torch.float32)).removeprefix("torch.")
        layers[row.name] = PackedLayer(
            config=row.config,
            weight_dtype=dtype,
            transposed=bool(getattr(module, "transposed", False)),
            shape=(row.shape[0], row.shape[1]),
        )
    recipe = None if "loaded" in record.recipe else record.recipe
    known = bool(recipe) or any(row.weight_error is not None for row in record.report.rows)
    versions = {"fp4pass": __version__, "torch": torch.__version__} if known else {}
    left_alone = {row.name for row in record.report.skipped}
    return Subject(
        name=name,
        layout="in memory",
        architecture=type(root).__name__,
        layers=layers,
        rows={row.name: row for row in record.report.rows} if known else {},
        state=lambda layer: _state(root.get_submodule(layer)._buffers, layers[layer]),
        parts=_parts(_model_tensors(root, layers), left_alone, layers),
        recipe=_recipe(recipe),
        versions=versions,
    )


def _recipe(recipe: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """As a file of `quantize --rules` has it, and what is known of the calibration beside."""
    if recipe is None:
        return None
    return {**Recipe.from_dict(recipe).to_dict(), "calibration": recipe.get("calibration")}


def _state(parts: Mapping[str, Tensor | None], layer: PackedLayer) -> QuantState:
    packed, scale, stored = parts[PACKED], parts[SCALE], parts[GLOBAL]
    assert packed is not None and scale is not None
    global_scale = 1.0 if stored is None else layer.config.format.global_scale_of(float(stored))
    fmt = layer.fmt.with_multiplier(False)
    return QuantState(packed, scale.view(torch.uint8), global_scale, fmt, layer.shape)


_Tensor = tuple[str, str | None, tuple[int, ...], int]


def _model_tensors(root: nn.Module, layers: Mapping[str, PackedLayer]) -> Iterator[_Tensor]:
    """Name, kind if it is packed, shape and bytes; those that are shared once."""
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
    tensors: Iterator[_Tensor], left_alone: set[str], layers: Mapping[str, PackedLayer]
) -> tuple[Part, ...]:
    found: dict[str, Part] = {}
    for name, kind, shape, size in tensors:
        count = 0
        if kind is None:
            kind, count = _dense_kind(name, len(shape), left_alone), math.prod(shape)
        before = found.get(kind, Part(kind, 0, 0))
        found[kind] = dataclasses.replace(
            before, bytes=before.bytes + size, parameters=before.parameters + count
        )
    if CODES in found:
        weights = sum(math.prod(layer.shape) for layer in layers.values())
        found[CODES] = dataclasses.replace(found[CODES], parameters=weights)
    return tuple(sorted(found.values(), key=lambda part: (-part.bytes, part.kind)))


def _dense_kind(name: str, dimensions: int, left_alone: set[str]) -> str:
    path, _, last = name.rpartition(".")
    if path in left_alone and last == "weight":
        return LEFT_ALONE
    if dimensions < 2:
        return "biases, norms and other vectors"
    words = name.split(".")
    if any("embed" in word or word in ("wte", "wpe") for word in words):
        return "embeddings"
    return LEFT_ALONE if "lm_head" in words else "other matrices"


def _bits(dtype: str) -> int:
    """Of one number of a safetensors dtype, such as BF16 or F8_E4M3."""
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8


@dataclass(frozen=True)
class Original:
    """The float model that a subject was made of. weight: [N, K] of a layer, None if not found."""

    name: str
    bytes: int
    weight: Callable[[str, PackedLayer], Tensor | None]


def open_original(source: nn.Module | str | os.PathLike[str], name: str = "") -> Original:
    """A float model, or its folder, which is read tensor by tensor. Raises CheckpointError."""
    if isinstance(source, nn.Module):
        root = unwrap(source)
        modules = dict(root.named_modules(remove_duplicate=False))
        size = sum(size for *_, size in _model_tensors(root, {}))

        def of_module(layer: str, facts: PackedLayer) -> Tensor | None:
            found = getattr(modules.get(layer), "weight", None)
            return _weight(found, facts, layer) if isinstance(found, Tensor) else None

        return Original(name or type(root).__name__, size, of_module)
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. The float model is wanted.")
    files = find_shards(folder, WEIGHTS)

    def of_file(layer: str, facts: PackedLayer) -> Tensor | None:
        tensor = f"{layer}.weight"
        if tensor not in files:
            return None
        with opened(files[tensor]) as file:
            return _weight(file.get_tensor(tensor), facts, layer)

    facts = tensor_facts(files)
    size = sum(math.prod(shape) * _bits(dtype) // 8 for shape, dtype in facts.values())
    return Original(name or str(source), size, of_file)


def _weight(weight: Tensor, layer: PackedLayer, name: str) -> Tensor:
    weight = weight.detach().t() if layer.transposed else weight.detach()
    if tuple(weight.shape) != layer.shape:
        raise CheckpointError(
            f"{name} is {tuple(weight.shape)} in the reference and {layer.shape} in the report's "
            "model. Give the float model that it was made of."
        )
    return weight.contiguous()
