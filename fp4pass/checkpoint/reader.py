"""A checkpoint folder as it lies on disk: its layers by our names, whoever wrote it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._version import __version__
from ..core.formats import get_format
from ..errors import CheckpointError
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .atomic import interrupted
from .layouts import LAYOUTS, Layer, Layout, layout_of, read_layers
from .safetensors_io import find_shards, opened, read_tensors, tensor_facts

WEIGHTS, OWN_FACTS = "model.safetensors", "fp4pass.json"

# Of what fp4pass.json holds.
VERSION = 2

# The weights of a layout that others do not know: under the usual name transformers would load
# the folder with random weights and a warning, without it there is an error.
OWN_WEIGHTS = "fp4pass.safetensors"

# ModelOpt's config beside config.json.
MODELOPT_FACTS = "hf_quant_config.json"


@dataclass(frozen=True)
class Stored:
    """A folder with packed weights.

    config: config.json, {} without one; own: fp4pass.json, None if another library wrote the
    folder; layers: what is packed, by the names of the modules; files: the file of every tensor;
    on_disk: the name there of a tensor that is `renamed`.
    """

    folder: Path
    layout: Layout
    config: Mapping[str, Any]
    own: Mapping[str, Any] | None
    layers: Mapping[str, Layer]
    files: Mapping[str, Path]
    on_disk: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Mapping[str, Any] | None:
        """The options of `convert` that made it, None if another library quantized it."""
        recipe: Mapping[str, Any] = {"loaded": True} if self.own is None else self.own["recipe"]
        return None if "loaded" in recipe else recipe

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that wrote it, as far as the folder says."""
        own = self.own or {}
        found = {name: own[name] for name in ("fp4pass", "torch") if name in own}
        if "transformers_version" in self.config:
            found["transformers"] = self.config["transformers_version"]
        producer = self.config.get("quantization_config", {}).get("producer") or {}
        if self.own is None and "name" in producer:
            found[producer["name"]] = producer.get("version", "?")
        return found

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name."""
        with opened(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(self.on_disk.get(name, name))
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name, one after the other."""
        names = {disk: name for name, disk in self.on_disk.items()}
        files = {self.on_disk.get(name, name): path for name, path in self.files.items()}
        return ((names.get(name, name), tensor) for name, tensor in read_tensors(files))

    def names(self, layer: str) -> dict[str, str]:
        """The name on disk of each buffer that a packed layer has."""
        full = {part: _join(layer, name) for part, name in self.layout.parts.items()}
        return {part: name for part, name in full.items() if name in self.files}

    def twins(self) -> dict[str, str]:
        """The other names of packed layers that a model lists twice, whose tensors lie there under
        each name, and the layer that each is."""
        found: dict[str, str] = {}
        for alias, name in ({} if self.own is None else self.own["aliases"]).items():
            (twin, _, part), layer = alias.rpartition("."), name.rpartition(".")[0]
            if part == PACKED and (layer in self.layers) != (twin in self.layers):
                found |= {twin: layer} if layer in self.layers else {layer: twin}
        return found

    def parts(self, layer: str) -> dict[str, Tensor | None]:
        """The buffers of a packed layer, as a QuantizedLinear holds them."""
        found = {
            part: self.decoded(part, name, self.tensor(name), self.layers[layer].config.multiplies)
            for part, name in self.names(layer).items()
        }
        return {part: found.get(part) for part in self.layout.parts}

    def decoded(self, part: str, name: str, tensor: Tensor, multiplies: bool) -> Tensor:
        """A stored tensor as the buffer that a QuantizedLinear holds. multiplies: of its format.
        Raises CheckpointError if it is a global scale and not a positive finite number."""
        if part in (GLOBAL, INPUT_GLOBAL) and not (tensor.isfinite() & (tensor > 0)).all():
            raise CheckpointError(
                f"{name} is {tensor.tolist()}; a positive finite number is wanted. Quantize the "
                "model again; experts that calibration never reached look like this."
            )
        return self.layout.decode(part, tensor, multiplies)

    def dense(self, layer: str, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] of a packed layer, as the library that wrote it dequantizes it."""
        parts = self.parts(layer)
        packed, scale = parts[PACKED], parts[SCALE]
        assert packed is not None and scale is not None
        bits, facts = scale.view(torch.uint8), self.layers[layer]
        if not facts.config.is_rotated:
            return ops.dequantize(packed, bits, parts[GLOBAL], facts.config.format.key, dtype)
        rotated = ops.dequantize(
            packed, bits, parts[GLOBAL], facts.config.format.key, torch.float32
        )
        return facts.config.restored(rotated).to(dtype)

    def plain(self) -> list[str]:
        """The names on disk of all tensors that belong to no packed layer."""
        packed = {name for layer in self.layers for name in self.names(layer).values()}
        return [name for name in self.files if name not in packed]


def is_packed(directory: Path | str) -> bool:
    """Whether a folder says that its weights are quantized."""
    folder = Path(directory)
    if (folder / OWN_FACTS).is_file() or (folder / MODELOPT_FACTS).is_file():
        return True
    config = folder / "config.json"
    return config.is_file() and "quantization_config" in read_json(config)


def open_stored(directory: Path | str) -> Stored:
    """Open a checkpoint in the layout of fp4pass, compressed-tensors or ModelOpt.

    Names, shapes, dtypes and scales are checked, checksums are not (`check_sums`). Raises
    CheckpointError.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.{interrupted(folder, OWN_FACTS)}")
    own = _read_own(folder) if (folder / OWN_FACTS).is_file() else None
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if own is not None:
        if own["layout"] not in LAYOUTS:
            raise CheckpointError(
                f"{folder / OWN_FACTS} has layout {own['layout']!r}; this fp4pass ({__version__}) "
                f"knows {', '.join(LAYOUTS)}. Update fp4pass."
            )
        layout = LAYOUTS[own["layout"]]
        files = find_shards(folder, own["weights"])
        layers = {name: Layer.from_dict(layer) for name, layer in own["layers"].items()}
        if set(files) != set(own["tensors"]):
            missing = sorted(set(own["tensors"]) - set(files)) or "none"
            extra = sorted(set(files) - set(own["tensors"])) or "none"
            raise CheckpointError(
                f"{folder} does not hold the tensors of {OWN_FACTS}: missing {missing}, unknown "
                f"{extra}. The folder is a mixture or incomplete; copy it again."
            )
        return _with_directions(Stored(folder, layout, config, own, layers, files))
    declared = _declared(folder, config)
    layout = layout_of(declared)
    files = find_shards(folder, WEIGHTS)
    facts = tensor_facts(files)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    layers = read_layers(layout, declared, facts, dtype.removeprefix("torch."))
    if not layers:
        raise CheckpointError(f"{folder} holds no packed 4-bit weight. Load it with transformers.")
    stored = Stored(folder, layout, config, None, layers, files)
    _check_parts(stored, facts)
    return _with_directions(stored)


def _with_directions(stored: Stored) -> Stored:
    """The folder, whose layers say whether their global scales stay multipliers in memory."""
    if not stored.layout.multiplies:
        return stored
    names = {layer: stored.names(layer) for layer in stored.layers}
    holders = {
        found[part]: layer
        for layer, found in names.items()
        for part in (GLOBAL, INPUT_GLOBAL)
        if part in found
    }
    scales: dict[str, list[Tensor]] = {layer: [] for layer in stored.layers}
    for name, tensor in read_tensors({name: stored.files[name] for name in holders}):
        scales[holders[name]].append(tensor)
    layers = {
        name: dataclasses.replace(layer, config=stored.layout.config_of(layer, scales[name]))
        for name, layer in stored.layers.items()
    }
    return dataclasses.replace(stored, layers=layers)


def renamed(stored: Stored, names: Mapping[str, str]) -> Stored:
    """A folder with layers and tensors under new names, those that the model has for them."""
    tensors = {name: names.get(name, name) for name in stored.plain()}
    for layer in stored.layers:
        for part in stored.names(layer).values():
            tensors[part] = names.get(layer, layer) + part.removeprefix(layer)
    return dataclasses.replace(
        stored,
        layers={names.get(name, name): layer for name, layer in stored.layers.items()},
        files={tensors[name]: path for name, path in stored.files.items()},
        on_disk={new: name for name, new in tensors.items()},
    )


def declared_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of a folder, in config.json or in ModelOpt's own file."""
    declared: Mapping[str, Any] | None = config.get("quantization_config")
    if declared is None and (folder / MODELOPT_FACTS).is_file():
        declared = read_json(folder / MODELOPT_FACTS)
    return declared


def _declared(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    declared = declared_config(folder, config)
    if declared is None:
        raise CheckpointError(
            f"{folder} is not quantized: it has neither {OWN_FACTS} nor a quantization_config in "
            f"config.json. Load it with transformers.{interrupted(folder, OWN_FACTS)}"
        )
    return declared


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object. Raises CheckpointError."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Copy it again.") from error
    return data


def _read_own(folder: Path) -> dict[str, Any]:
    """fp4pass.json, whole and of this version."""
    path = folder / OWN_FACTS
    own = read_json(path)
    checksum, version = own.pop("sha256", None), own.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version!r}; this fp4pass ({__version__}) reads version "
            f"{VERSION}. Update fp4pass, or write the checkpoint again."
        )
    if checksum != checksum_of(own):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of what it says. Copy the checkpoint "
            "again."
        )
    return own


def checksum_of(data: Mapping[str, Any]) -> str:
    """Of values, so that a file that was only formatted anew is still whole."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """What fp4pass.json says of a tensor."""
    digest = hashlib.sha256()
    if tensor.numel():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": digest.hexdigest(),
    }


def check_sum(stored: Stored, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a tensor is not what was saved, as far as the folder says."""
    if stored.own is not None and fingerprint(tensor) != stored.own["tensors"][name]:
        raise CheckpointError(
            f"{stored.files[name]}: the tensor {name!r} is not what was saved (its checksum, shape "
            "or dtype differs). Copy the checkpoint again."
        )


def _check_parts(stored: Stored, facts: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Of a folder without checksums: the parts of every layer fit each other."""
    for layer, facts_of in stored.layers.items():
        fmt, (rows, columns) = facts_of.fmt, facts_of.shape
        kind = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}[fmt.scale.storage]
        wanted: dict[str, tuple[set[tuple[int, ...]], str]] = {
            PACKED: ({(rows, fmt.packed_columns(columns))}, "U8"),
            SCALE: ({(rows, columns // fmt.block)}, kind),
        }
        if fmt.has_global_scale:
            wanted |= {part: ({(), (1,)}, "F32") for part in (GLOBAL, INPUT_GLOBAL)}
        names = stored.names(layer)
        if fmt.has_global_scale and GLOBAL not in names:
            missing = _join(layer, stored.layout.parts[GLOBAL])
            raise CheckpointError(f"{stored.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            shape, found = facts[name]
            if part in wanted and (shape not in wanted[part][0] or found != wanted[part][1]):
                raise CheckpointError(
                    f"{stored.files[name]}: {name} is {found} {list(shape)}; {wanted[part][1]} "
                    f"{list(next(iter(wanted[part][0])))} is wanted for a {rows} x {columns} "
                    f"weight in {fmt.key}."
                )


def check_scales(layer: str, scale: Tensor, fmt_key: str) -> None:
    """Raise CheckpointError if a block scale of a packed layer is NaN or negative."""
    if (scale.view(torch.uint8) > get_format(fmt_key).scale.last).any():
        raise CheckpointError(
            f"{layer}.{SCALE} holds NaN or a negative scale. The checkpoint is damaged, or its "
            "weights were not finite when it was written; quantize the model again."
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
