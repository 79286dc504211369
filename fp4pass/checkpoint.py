"""Checkpoints: a folder of safetensors and JSON that other libraries load, and back again.

`model.safetensors` and `config.json` are what compressed-tensors and serving engines read;
`fp4pass.json` holds what they have no place for: the recipe, the report, versions, and a checksum
of every tensor. Formats without a public layout use the same names under our own quant_method.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from ._version import __version__
from .errors import CheckpointError, StateError
from .folders import interrupted, replacing
from .formats import get_format
from .graph.install import (
    adapt_inductor,
    own_config,
    remove_observers,
    rewrite_graph,
    store_packed,
    untie,
    use_slow_paths,
)
from .graph.regions import install_regions
from .graph.rewrite import Packed
from .layouts import Layer, is_public, quantization_config
from .modules import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, QuantizedLinear
from .report import Record, Report, forget_record, get_record, set_record, unwrap

WEIGHTS, OWN = "model.safetensors", "fp4pass.json"

# The weights of a layout that others do not know: under the usual name transformers would load
# the folder with random weights and a warning, without it there is an error.
OWN_WEIGHTS = "fp4pass.safetensors"

_STORED = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)


def save(model: nn.Module, directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a converted model to a folder, whole or not at all.

    A transformers model is written in the compressed-tensors layout with its config, for others
    to load; any other model as tensors for `load(dir, model=...)`.
    The folder must not exist or be empty. With `overwrite` it may be one that `save` wrote: it is
    replaced whole, with everything that has been put beside (a tokenizer, notes).
    Raises StateError if the model is not converted, CheckpointError if the layout cannot hold it
    or the folder is in the way.
    """
    root = unwrap(model)
    record = get_record(root)
    if record is None or record.status != "converted":
        raise StateError("The model is not converted. Call fp4pass.convert(model) before save.")
    layers = _describe_layers(root, record)
    _require_static_scales(root, layers)
    with replacing(Path(directory), overwrite, marks=(OWN,)) as folder:
        tensors, aliases = _state(root)
        weights = WEIGHTS if is_public(layers) else OWN_WEIGHTS
        save_file(tensors, folder / weights, metadata={"format": "pt"})
        if _is_transformers(root):
            _write_config(root, layers, record.report, folder)
        own = {
            "version": 1,
            "fp4pass": __version__,
            "weights": weights,
            "torch": torch.__version__,
            "dtype": _dtype_name(getattr(root, "dtype", torch.float32)),
            "recipe": record.recipe,
            "report": record.report.to_dict(),
            "layers": {name: vars(layer) for name, layer in layers.items()},
            "aliases": aliases,
            "tensors": {name: _fingerprint(tensor) for name, tensor in tensors.items()},
        }
        _write_json(folder / OWN, own | {"sha256": _checksum(own)})


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
    record = get_record(root)
    if record is None or not _is_transformers(root) or not hasattr(root, "save_pretrained"):
        return
    layers = _describe_layers(root, record)
    try:
        _require_static_scales(root, layers)
    except CheckpointError as error:
        problem = str(error)
    else:
        problem = "" if is_public(layers) else "Its format has no layout that others know."
    config: Any = root.config
    if problem:
        refuse = functools.partial(_refuse_save_pretrained, problem)
        root.__dict__["save_pretrained"] = refuse
    else:
        config.quantization_config = StoredConfig(quantization_config(layers, record.report))


def _refuse_save_pretrained(problem: str, *args: Any, **kwargs: Any) -> None:
    raise CheckpointError(f"{problem} Save the model with fp4pass.save(model, dir) instead.")


def load(directory: str | os.PathLike[str], *, model: nn.Module | None = None) -> nn.Module:
    """Read a checkpoint that `save` wrote; the result is in eval mode, equal to the bit.

    model: a float model of the same architecture to load into, in place. Without it, the model is
    built from the config of a transformers checkpoint. Every tensor is checked against its
    checksum, and against the model, before the model is touched. Raises CheckpointError.
    """
    folder = Path(directory)
    own = _read_own(folder)
    with torch.inference_mode(False):
        tensors = _read_tensors(folder / own["weights"], own["tensors"])
    layers = {
        name: Layer(**{**layer, "shape": tuple(layer["shape"])})
        for name, layer in own["layers"].items()
    }
    recipe, rows = own["recipe"], Report.from_dict(own["report"])
    skeleton = _build(folder, own["dtype"]) if model is None else unwrap(model)
    if any(isinstance(module, QuantizedLinear) for module in skeleton.modules()):
        raise CheckpointError("The model to load into is converted already; give a float model.")
    _check_skeleton(skeleton, layers, tensors, own["aliases"], folder)
    forget_record(skeleton)
    remove_observers(skeleton)
    own_config(skeleton)
    _fill(skeleton, layers, tensors, own["aliases"])
    set_record(skeleton, Record("converted", recipe, rows))
    enable_save_pretrained(skeleton)
    adapt_inductor(not all(layer.weight_only for layer in layers.values()))
    loaded = skeleton if model is None else model
    return loaded if isinstance(skeleton, fx.GraphModule) else loaded.eval()


def _describe_layers(root: nn.Module, record: Record) -> dict[str, Layer]:
    """The stored form of every converted linear, by its name."""
    layers = {}
    for row in record.report.converted:
        try:
            module = root.get_submodule(row.name)
        except AttributeError:
            module = None
        if module is None or PACKED not in module._buffers:
            raise CheckpointError(
                f"{row.name}: the model has changed since it was converted; there is no packed "
                "weight under this name. Save it before wrapping or replacing its layers."
            )
        layers[row.name] = Layer(
            format=get_format(row.format, row.block).key,
            weight_only=row.weight_only,
            weight_dtype=_dtype_name(getattr(module, "weight_dtype", torch.float32)),
            transposed=bool(getattr(module, "transposed", False)),
            shape=(row.shape[0], row.shape[1]),
        )
    return layers


def _require_static_scales(root: nn.Module, layers: Mapping[str, Layer]) -> None:
    for name, layer in layers.items():
        dynamic = root.get_submodule(name)._buffers.get(INPUT_GLOBAL) is None
        if layer.fmt.has_global_scale and not layer.weight_only and dynamic:
            raise CheckpointError(
                f"{name}: its activations are quantized with a global scale for each call, which "
                f"the {layer.format} layouts cannot say. Calibrate before convert (prepare, then "
                "run some batches), convert with weight_only=True, or choose fmt='mxfp4'."
            )


def _is_transformers(root: nn.Module) -> bool:
    return hasattr(root, "config") and hasattr(root.config, "save_pretrained")


def _state(root: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
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
            if name.rpartition(".")[2] not in _STORED:
                continue
            tensor = tensor.clone()
        tensor = tensor.cpu().contiguous()
        # safetensors refuses views of one memory.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        tensors[name] = tensor.clone() if is_view else tensor
    return tensors, aliases


def _write_config(root: nn.Module, layers: Mapping[str, Layer], rows: Report, folder: Path) -> None:
    """config.json with the quantization_config, and generation_config.json."""
    config: Any = root.config
    config.save_pretrained(folder)
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["architectures"] = [type(root).__name__]
    if is_public(layers):
        # What compressed-tensors makes of the weights, whatever dtype the rest has.
        data["dtype"] = "bfloat16"
    data["quantization_config"] = quantization_config(layers, rows)
    _write_json(path, data)
    generation: Any = getattr(root, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _fingerprint(tensor: Tensor) -> dict[str, Any]:
    digest = hashlib.sha256()
    if tensor.numel():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {
        "dtype": _dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "sha256": digest.hexdigest(),
    }


def _checksum(data: Mapping[str, Any]) -> str:
    """Of values, so that a file that was only formatted anew is still whole."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_own(folder: Path) -> dict[str, Any]:
    """fp4pass.json, checked for its parts."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.{interrupted(folder, OWN)}")
    path = folder / OWN
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {OWN}: fp4pass did not write it. Load it with from_pretrained of "
            f"transformers.{interrupted(folder, OWN)}"
        )
    try:
        own: dict[str, Any] = json.loads(path.read_text())
        version, checksum = own["version"], own.pop("sha256", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error!r}. Copy the checkpoint again."
        ) from error
    if version != 1:
        raise CheckpointError(
            f"{path} has version {version!r} of the layout; this fp4pass ({__version__}) reads "
            "version 1. Update fp4pass."
        )
    if checksum != _checksum(own):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of what it says. Copy the checkpoint "
            "again."
        )
    return own


def _read_tensors(path: Path, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a file, checked against its fingerprint."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(wanted):
                missing = sorted(set(wanted) - names) or "none"
                extra = sorted(names - set(wanted)) or "none"
                raise CheckpointError(
                    f"{path} does not hold the tensors of {OWN}: missing {missing}, unknown "
                    f"{extra}. The folder is a mixture or incomplete; copy it again."
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read, it is missing or cut off: {error}. Copy it again."
        ) from error
    for name, tensor in tensors.items():
        if _fingerprint(tensor) != wanted[name]:
            raise CheckpointError(
                f"{path}: the tensor {name!r} is not what was saved (its checksum, shape or dtype "
                "differs). Copy the checkpoint again."
            )
    return tensors


def _build(folder: Path, dtype: str) -> nn.Module:
    """The float model of a checkpoint's config, its parameters on the meta device."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a transformers model. Pass the float model "
            "to load into: fp4pass.load(dir, model=model)."
        )
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        raise CheckpointError(
            "Building a transformers model needs transformers and accelerate: pip install "
            "'fp4pass[hf]'. Or pass the float model: fp4pass.load(dir, model=model)."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        config.dtype = getattr(torch, dtype)
        (architecture,) = config.architectures
        cls = getattr(transformers, architecture)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} does not name a model of transformers "
            f"{transformers.__version__}: {error}. Pass the float model instead: "
            "fp4pass.load(dir, model=model)."
        ) from error
    with init_empty_weights(include_buffers=False):
        model: Any = cls._from_config(config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    built: nn.Module = model
    return built


def _check_skeleton(
    skeleton: nn.Module,
    layers: Mapping[str, Layer],
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    folder: Path,
) -> None:
    """The model to load into must have the layers and tensors of the checkpoint, and no others."""
    holders = set()
    for name, layer in layers.items():
        try:
            module = skeleton.get_submodule(name)
        except AttributeError:
            module = None
        weight = None if module is None else module._parameters.get("weight")
        shape = tuple(reversed(layer.shape)) if layer.transposed else layer.shape
        if weight is None or tuple(weight.shape) != shape:
            found = "there is none" if weight is None else f"it is {tuple(weight.shape)}"
            raise CheckpointError(
                f"{name}: {folder} has a linear with a weight of {shape} here; in the model "
                f"{found}. Load into a model of the same architecture."
            )
        holders.add(module)
    # A module may be listed under several names.
    names = [n for n, m in skeleton.named_modules(remove_duplicate=False) if m in holders]
    packed = {_join(name, part) for name in names for part in _STORED}
    own = skeleton.state_dict()
    wanted = set(own) - {_join(name, "weight") for name in names}
    plain = {name for name in (*tensors, *aliases) if name not in packed}
    if plain != wanted:
        missing = sorted(wanted - plain) or "nothing"
        extra = sorted(plain - wanted) or "nothing"
        raise CheckpointError(
            f"{folder} is of another architecture than the model: it lacks {missing} and has "
            f"{extra} beyond it."
        )
    for name in plain:
        saved = tensors[aliases.get(name, name)]
        if saved.shape != own[name].shape:
            raise CheckpointError(
                f"{name}: {folder} has {tuple(saved.shape)}, the model {tuple(own[name].shape)}."
            )


def _fill(
    skeleton: nn.Module,
    layers: Mapping[str, Layer],
    tensors: dict[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Put checked tensors into a checked model."""
    use_slow_paths(skeleton)
    packed: dict[nn.Module, Packed] = {}
    inputs: dict[tuple[object, ...], Tensor] = {}
    devices = {name: tensor.device for name, tensor in skeleton.state_dict().items()}
    for name, layer in layers.items():
        module = skeleton.get_submodule(name)
        device = devices[_join(name, "weight")]
        parts: dict[str, Tensor | None] = {}
        for part in _STORED:
            full = _join(name, part)
            tensor = tensors.get(aliases.get(full, full))
            if tensor is not None and device.type != "meta":
                tensor = tensor.to(device)
            parts[part] = tensor
        scale = parts[INPUT_GLOBAL]
        if scale is not None:
            # Shared as `convert` does; the value is still known without waiting for a device.
            stored = _join(name, INPUT_GLOBAL)
            value = float(tensors[aliases.get(stored, stored)])
            shared = (name.rpartition(".")[0], layer.format, value, device)
            parts[INPUT_GLOBAL] = inputs.setdefault(shared, scale)
        store_packed(
            module,
            parts,
            layer.fmt,
            weight_only=layer.weight_only,
            transposed=layer.transposed,
        )
        if isinstance(module, QuantizedLinear):
            module.weight_dtype = getattr(torch, layer.weight_dtype)
        packed[module] = Packed(layer.format, layer.weight_only)
    plain = {}
    for name in skeleton.state_dict():
        if name.rpartition(".")[2] in _STORED:
            continue
        tensor = tensors[aliases.get(name, name)]
        device = devices[name]
        plain[name] = tensor if device.type == "meta" else tensor.to(device)
    skeleton.load_state_dict(plain, strict=False, assign=True)
    untie(skeleton)
    tie_weights: Any = getattr(skeleton, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    if isinstance(skeleton, fx.GraphModule):
        rewrite_graph(skeleton, packed)
    else:
        install_regions(skeleton)
