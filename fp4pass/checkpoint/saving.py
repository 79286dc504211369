"""Checkpoints: a folder of safetensors and JSON that other libraries load, and back again.

The weights and `config.json` are what compressed-tensors, ModelOpt and serving engines read;
`fp4pass.json` holds what they have no place for: the recipe, the report, versions, and a checksum
of every tensor. Formats without a public layout use the same names under our own quant_method.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..errors import CheckpointError, OptionError, StateError
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, QuantizedLinear
from ..quantization.report import Report
from ..quantization.state import ModelState, get_state, unwrap
from .atomic import replacing
from .layouts import (
    COMPRESSED,
    MODELOPT,
    OWN,
    Layer,
    Layout,
    get_layout,
    hf_quant_config,
    is_public,
    quantization_config,
    require_public,
)
from .reader import (
    MODELOPT_FACTS,
    OWN_FACTS,
    OWN_WEIGHTS,
    VERSION,
    WEIGHTS,
    checksum_of,
    fingerprint,
)
from .safetensors_io import ShardWriter, bytes_of

STORED = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    layout: str = "compressed-tensors",
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write a converted model to a folder, whole or not at all.

    layout: "compressed-tensors" or "modelopt", which holds nvfp4. A transformers model is written
    with its config, for others to load; any other model as tensors for `load(dir, model=...)`.
    Formats that no public layout holds are written in one that only fp4pass reads.
    tokenizer: a tokenizer or processor to put beside, with its chat template. max_shard_size: of a
    file of weights, above which there are several and an index.
    The folder must not exist or be empty. With `overwrite` it may be one that `save` wrote: it is
    replaced whole, with everything that has been put beside (a tokenizer, notes).
    Raises StateError if the model is not converted, CheckpointError if the layout cannot hold it
    or the folder is in the way, OptionError for a layout or size that does not exist.
    """
    root = unwrap(model)
    record = get_state(root)
    if record is None or record.status != "converted":
        modules = root.named_modules()
        inside = next((name for name, each in modules if isinstance(each, QuantizedLinear)), None)
        if inside is not None:
            raise StateError(
                f"A part of the model is converted ({inside}), the model is not. Save that part, "
                "or convert the whole float model, with rules= for what to leave alone."
            )
        raise StateError("The model is not converted. Call fp4pass.convert(model) before save.")
    chosen, limit = get_layout(layout), bytes_of(max_shard_size)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(
            f"tokenizer is a {type(tokenizer).__name__}; a tokenizer or processor of transformers "
            "is wanted, which has save_pretrained."
        )
    layers = _describe_layers(root, record)
    _require_static_scales(root, layers)
    if chosen is COMPRESSED and not is_public(layers):
        chosen = OWN
    elif chosen is not COMPRESSED:
        require_public(layers, chosen)
    holders = {root.get_submodule(name) for name in layers}
    if _is_transformers(root):
        _require_no_others(root, holders)
    names = all_names(root, holders)
    packed = {
        join(name, part): (name, part, _multiplies(root.get_submodule(name)))
        for name in names
        for part in STORED
    }
    tensors, aliases = _state(root, packed)
    with replacing(Path(directory), overwrite, marks=(OWN_FACTS,)) as folder:
        if _is_transformers(root):
            _write_config(root, chosen, layers, record.report, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        writer = WeightsWriter(folder, chosen, limit)
        for name, tensor in tensors.items():
            if name in packed:
                writer.add_part(*packed[name], tensor)
            else:
                writer.add(name, tensor)
        facts = {
            "dtype": _dtype_name(getattr(root, "dtype", torch.float32)),
            "recipe": record.recipe,
            "report": record.report.to_dict(),
            "aliases": aliases,
        }
        writer.close(layers, facts)


class WeightsWriter:
    """Writes the tensors of a checkpoint in a layout, and fp4pass.json with their checksums."""

    def __init__(self, folder: Path, layout: Layout, limit: int) -> None:
        self.folder, self.layout = folder, layout
        self.weights = OWN_WEIGHTS if layout is OWN else WEIGHTS
        self.shards = ShardWriter(folder, self.weights, limit)
        self.sums: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor under its own name."""
        self.sums[name] = fingerprint(tensor)
        self.shards.add(name, tensor)

    def add_part(self, layer: str, part: str, multiplies: bool, tensor: Tensor) -> None:
        """A buffer of a QuantizedLinear, as the layout has it. multiplies: of its format."""
        name = join(layer, self.layout.parts[part])
        self.add(name, self.layout.encode(part, tensor, multiplies).contiguous())

    def close(self, layers: Mapping[str, Layer], facts: Mapping[str, Any] | None) -> None:
        """facts: the dtype, recipe, report and aliases; without them there is no fp4pass.json."""
        self.shards.close()
        if facts is None:
            return
        own = {
            "version": VERSION,
            "fp4pass": __version__,
            "layout": self.layout.name,
            "weights": self.weights,
            "torch": torch.__version__,
            **{key: facts[key] for key in ("dtype", "recipe", "report", "aliases")},
            "layers": {name: layer.to_dict() for name, layer in layers.items()},
            "tensors": dict(sorted(self.sums.items())),
        }
        write_json(self.folder / OWN_FACTS, own | {"sha256": checksum_of(own)})


@dataclass(frozen=True)
class StoredConfig:
    """The quantization_config that transformers writes when it saves a converted model itself."""

    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.data))


def enable_save_pretrained(root: nn.Module) -> None:
    """Have `save_pretrained` of a converted transformers model write what others can load.

    Where there is no public layout for the model it refuses, and names `save`.
    """
    record = get_state(root)
    if record is None or not _is_transformers(root) or not hasattr(root, "save_pretrained"):
        return
    layers = _describe_layers(root, record)
    try:
        _require_static_scales(root, layers)
    except CheckpointError as error:
        problem = str(error)
    else:
        problem = "" if is_public(layers) else "It has no layout that others know."
    if any(_multiplies(root.get_submodule(name)) for name in layers):
        problem = "It holds the global scales of another layout, to the bit."
    ignore = _ignored(root, record.report)
    if any(name.startswith("re:") for name in ignore):
        problem = "transformers would write its dense experts one by one, and not read them again."
    config: Any = root.config
    if problem:
        refuse = functools.partial(_refuse_save_pretrained, problem)
        root.__dict__["save_pretrained"] = refuse
    else:
        config.quantization_config = StoredConfig(quantization_config(COMPRESSED, layers, ignore))


def _multiplies(module: nn.Module) -> bool:
    """Whether the global scales of a layer are multipliers, without an exact reciprocal."""
    return isinstance(module, QuantizedLinear) and module.config.multiplies


def _refuse_save_pretrained(problem: str, *args: Any, **kwargs: Any) -> None:
    raise CheckpointError(f"{problem} Save the model with fp4pass.save(model, dir) instead.")


def _describe_layers(root: nn.Module, record: ModelState) -> dict[str, Layer]:
    """The stored form of every converted linear, by its name."""
    layers = {}
    for row in record.report.converted:
        try:
            module = root.get_submodule(row.name)
        except AttributeError:
            module = None
        if module is None or row.config is None or PACKED not in module._buffers:
            raise CheckpointError(
                f"{row.name}: the model has changed since it was converted; there is no packed "
                "weight under this name. Save it before wrapping or replacing its layers."
            )
        layers[row.name] = Layer(
            config=row.config,
            weight_dtype=_dtype_name(getattr(module, "weight_dtype", torch.float32)),
            transposed=bool(getattr(module, "transposed", False)),
            shape=(row.shape[0], row.shape[1]),
        )
    return layers


def all_names(root: nn.Module, modules: Container[nn.Module]) -> list[str]:
    """Every name of some modules; one may be listed under several."""
    return [n for n, m in root.named_modules(remove_duplicate=False) if m in modules]


def _require_no_others(root: nn.Module, holders: Container[nn.Module]) -> None:
    """Raise CheckpointError for packed layers that are not those that convert made: no config of
    transformers can say what they are."""
    for name, module in root.named_modules():
        if PACKED in module._buffers and module not in holders:
            raise CheckpointError(
                f"{name}: a {type(module).__name__}, which fp4pass.nn.swap made; a checkpoint of "
                "transformers holds what fp4pass.convert packed. Convert all of it, or keep "
                "state_dict with torch.save."
            )


def _require_static_scales(root: nn.Module, layers: Mapping[str, Layer]) -> None:
    for name, layer in layers.items():
        dynamic = root.get_submodule(name)._buffers.get(INPUT_GLOBAL) is None
        if layer.fmt.has_global_scale and not layer.config.weight_only and dynamic:
            raise CheckpointError(
                f"{name}: its activations are quantized with a global scale for each call, which "
                f"the {layer.fmt.key} layouts cannot say. Calibrate before convert (prepare, then "
                "run some batches), convert with weight_only=True, or choose fmt='mxfp4'."
            )


def _is_transformers(root: nn.Module) -> bool:
    return hasattr(root, "config") and hasattr(root.config, "save_pretrained")


def _state(root: nn.Module, packed: Container[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and the names that stand for the tensor of another name.

    Tied parameters are written once, as transformers does; packed weights that modules share are
    written under each name, for other loaders do not know that they are shared.
    """
    state: Mapping[str, Tensor] = root.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name}: safetensors holds tensors only, and this is a {type(value).__name__}. "
                "Save the model with torch.save, or have its get_extra_state return a tensor."
            )
    if any(tensor.is_meta for tensor in state.values()):
        from accelerate.utils import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(root)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        original = first.setdefault(key, name) if tensor.numel() else name
        if original != name:
            aliases[name] = original
            if name not in packed:
                continue
            tensor = tensor.clone()
        tensor = tensor.cpu().contiguous()
        # safetensors refuses views of one memory.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        tensors[name] = tensor.clone() if is_view else tensor
    return tensors, aliases


def _write_config(
    root: nn.Module, layout: Layout, layers: Mapping[str, Layer], rows: Report, folder: Path
) -> None:
    """config.json with the quantization_config, generation_config.json, and ModelOpt's own."""
    config: Any = root.config
    config.save_pretrained(folder)
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["architectures"] = [type(root).__name__]
    if layout is not OWN:
        # What other libraries make of the weights, whatever dtype the rest has.
        data["dtype"] = "bfloat16"
    ignore = _ignored(root, rows)
    data["quantization_config"] = quantization_config(layout, layers, ignore)
    write_json(path, data)
    if layout is MODELOPT:
        write_json(folder / MODELOPT_FACTS, hf_quant_config(layers, ignore))
    generation: Any = getattr(root, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _ignored(root: nn.Module, rows: Report) -> list[str]:
    """What is left alone, by the names and patterns that other libraries match with modules.

    A stacked parameter of experts is a pattern, for checkpoints have a linear for each expert.
    """
    found: dict[str, None] = {}
    modules = dict(root.named_modules(remove_duplicate=False))
    for row in rows.skipped:
        path, _, last = row.name.rpartition(".")
        if row.name in modules:
            found[row.name] = None
        elif last == "weight":
            found[path] = None
        else:
            found[f"re:{re.escape(path)}.*"] = None
    return list(found)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file as people read it."""
    path.write_text(json.dumps(data, indent=2) + "\n")


def join(path: str, name: str) -> str:
    """The name of a tensor of the module at a path."""
    return f"{path}.{name}" if path else name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
