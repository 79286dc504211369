"""Checkpoints back into models: those that fp4pass wrote, and those of other libraries."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.transformers import own_config, untie
from ..config import LinearConfig
from ..errors import CheckpointError, OptionError
from ..linear import INPUT_GLOBAL, SCALE, QuantizedLinear
from ..quantization.batches import require_device
from ..quantization.replace import remove_observers, rewrite_graph, store_packed
from ..quantization.report import Report, Row
from ..quantization.state import forget_state, unwrap
from .finish import finish
from .layouts import Layer
from .reader import Stored, check_scales, check_sum, open_stored, renamed
from .saving import STORED, all_names, join

# Device maps that accelerate works out.
_BALANCED = ("auto", "balanced", "balanced_low_0", "sequential")

# Scales of a quantized key-value cache, as compressed-tensors and ModelOpt name them.
_CACHE_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device_map: Any = None,
) -> nn.Module:
    """Read a checkpoint with packed weights; the result is in eval mode, equal to the bit.

    The folder is one that `save` wrote, or one of another library in the compressed-tensors or
    ModelOpt layout. model: a float model of the same architecture to load into, in place. Without
    it, the model is built from the config of a transformers checkpoint. device_map: a device, or
    "auto" or a dict as accelerate has it; the CPU without. Every tensor is checked against the
    model, and its checksum if there is one, before the model is touched. Raises CheckpointError.
    """
    place = _one_device(device_map)
    stored = open_stored(Path(directory))
    skeleton = _build(stored) if model is None else unwrap(model)
    if stored.own is None:
        stored = renamed(stored, _names_in(skeleton, stored))
    with torch.inference_mode(False):
        tensors, aliases = _read(stored)
    if any(isinstance(module, QuantizedLinear) for module in skeleton.modules()):
        raise CheckpointError("The model to load into is converted already; give a float model.")
    if stored.own is None:
        _fit(skeleton, stored.layers, tensors, aliases)
    _check_skeleton(skeleton, stored.layers, tensors, aliases, stored.folder)
    forget_state(skeleton)
    remove_observers(skeleton)
    own_config(skeleton)
    _fill(skeleton, stored.layers, tensors, aliases)
    finish(skeleton, *_origin(stored, skeleton))
    if place is not None:
        skeleton.to(place)
    elif device_map is not None:
        _dispatch(skeleton, device_map)
    loaded = skeleton if model is None else model
    return loaded if isinstance(skeleton, fx.GraphModule) else loaded.eval()


def _read(stored: Stored) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by the names that they have in a model, checked, and the names for others."""
    aliases: dict[str, str] = {} if stored.own is None else stored.own["aliases"]
    names = {
        name: (join(layer, part), part, stored.layers[path].config.multiplies)
        for layer, path in ({layer: layer for layer in stored.layers} | stored.twins()).items()
        for part, name in stored.names(layer).items()
    }
    tensors = {}
    for name, tensor in stored.tensors():
        check_sum(stored, name, tensor)
        if name in names:
            own, part, multiplies = names[name]
            tensors[own] = stored.decoded(part, name, tensor, multiplies)
        else:
            tensors[name] = tensor
    for layer, facts in stored.layers.items():
        check_scales(layer, tensors[join(layer, SCALE)], facts.fmt.key)
    return tensors, aliases


def _origin(stored: Stored, model: nn.Module) -> tuple[Mapping[str, Any], Sequence[Row]]:
    """The recipe and the report of a checkpoint; of others' the configs and what is dense."""
    if stored.own is not None:
        return stored.own["recipe"], Report.from_dict(stored.own["report"]).rows
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            layer = stored.layers[name]
            rows.append(Row(name, layer.shape, layer.config, layer.fmt.bits_per_weight))
        elif isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            rows.append(Row(name, shape, skip_reason="dense in the checkpoint"))
    return {"loaded": stored.layout.name, "producer": _producer(stored)}, rows


def _producer(stored: Stored) -> Any:
    declared = stored.config.get("quantization_config", {})
    return declared.get("producer") or declared.get("version")


def _names_in(skeleton: Any, stored: Stored) -> dict[str, str]:
    """The names that transformers gives in a model to those of a checkpoint on disk."""
    known = set(skeleton.state_dict())
    layers = {join(layer, "weight"): layer for layer in stored.layers}
    names = [*layers, *stored.plain()]
    if known.issuperset(names) or not hasattr(skeleton, "base_model_prefix"):
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        each for each in get_model_conversion_mapping(skeleton) if isinstance(each, WeightRenaming)
    ]
    prefix: str = skeleton.base_model_prefix
    state = skeleton.state_dict()
    found = {name: rename_source_key(name, renamings, [], prefix, state)[0] for name in names}
    return {
        layers.get(name, name): new.removesuffix(".weight") if name in layers else new
        for name, new in found.items()
    }


def _fit(
    skeleton: nn.Module,
    layers: Mapping[str, Layer],
    tensors: dict[str, Tensor],
    aliases: dict[str, str],
) -> None:
    """Bring what another library wrote to the names and dtypes of the model: what it ties, what it
    ignores, and scales of a cache that are not ours to apply."""
    ties: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
    for target, source in ties.items():
        if target.removesuffix(".weight") in layers:
            # Tied in a float model, and packed in this one.
            continue
        if target not in tensors and source in tensors:
            aliases[target] = source
    patterns: Sequence[str] = getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = skeleton.state_dict()
    packed = {join(layer, part) for layer in layers for part in STORED}
    dropped = []
    for name in [name for name in tensors if name not in packed]:
        if name in known:
            # As from_pretrained does.
            tensors[name] = tensors[name].to(known[name].dtype)
            continue
        if any(re.search(pattern, name) for pattern in patterns):
            del tensors[name]
        elif name.endswith(_CACHE_SCALES):
            dropped.append(name)
            del tensors[name]
    if dropped:
        warnings.warn(
            f"{len(dropped)} scales of a quantized key-value cache ({dropped[0]}, ...) are not "
            "used: the cache stays in the dtype of the model.",
            stacklevel=3,
        )


def _one_device(device_map: Any) -> torch.device | None:
    """The device of a device map that names just one. Raises OptionError if it is not there."""
    several = isinstance(device_map, Mapping) or device_map in _BALANCED
    if device_map is None or several:
        return None
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device_map is {device_map!r}; a device such as 'cuda:0', one of "
            f"{', '.join(_BALANCED)}, or a dict from module names to devices is wanted."
        ) from error
    require_device(str(device), "device_map=")
    return device


def _dispatch(model: nn.Module, device_map: Any) -> None:
    """Put a model where a device map of several devices says."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map in _BALANCED:
        whole: Any = getattr(model, "_no_split_modules", None)
        options: dict[str, Any] = {"no_split_module_classes": sorted(whole or ())}
        memory = None
        if device_map != "sequential":
            memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **options)
        device_map = infer_auto_device_map(model, max_memory=memory, **options)
    devices = set(device_map.values())
    if len(devices) == 1:
        model.to(devices.pop())
    else:
        dispatch_model(model, device_map)


def _build(stored: Stored) -> nn.Module:
    """The float model of a checkpoint's config, its parameters on the meta device."""
    folder = stored.folder
    dtype = stored.own["dtype"] if stored.own else next(iter(stored.layers.values())).weight_dtype
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
        # ModelOpt may have left it to its own file.
        config.__dict__.pop("quantization_config", None)
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
    holders: set[nn.Module] = set()
    for name, layer in layers.items():
        try:
            module = skeleton.get_submodule(name)
        except AttributeError:
            module = None
        weight = None if module is None else module._parameters.get("weight")
        shape = tuple(reversed(layer.shape)) if layer.transposed else layer.shape
        if module is None or weight is None or tuple(weight.shape) != shape:
            found = "there is none" if weight is None else f"it is {tuple(weight.shape)}"
            raise CheckpointError(
                f"{name}: {folder} has a linear with a weight of {shape} here; in the model "
                f"{found}. Load into a model of the same architecture."
            )
        holders.add(module)
    names = all_names(skeleton, holders)
    packed = {join(name, part) for name in names for part in STORED}
    own = skeleton.state_dict()
    wanted = set(own) - {join(name, "weight") for name in names}
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
    configs: dict[nn.Module, LinearConfig] = {}
    inputs: dict[tuple[object, ...], Tensor] = {}
    devices = {name: tensor.device for name, tensor in skeleton.state_dict().items()}
    for name, layer in layers.items():
        module = skeleton.get_submodule(name)
        device = devices[join(name, "weight")]
        parts: dict[str, Tensor | None] = {}
        for part in STORED:
            full = join(name, part)
            tensor = tensors.get(aliases.get(full, full))
            if tensor is not None and device.type != "meta":
                tensor = tensor.to(device)
            parts[part] = tensor
        scale = parts[INPUT_GLOBAL]
        if scale is not None:
            # Shared as `convert` does; the value is still known without waiting for a device.
            stored = join(name, INPUT_GLOBAL)
            value = float(tensors[aliases.get(stored, stored)])
            shared = (name.rpartition(".")[0], layer.fmt.key, value, device)
            parts[INPUT_GLOBAL] = inputs.setdefault(shared, scale)
        store_packed(module, parts, layer.config, transposed=layer.transposed)
        if isinstance(module, QuantizedLinear):
            module.weight_dtype = getattr(torch, layer.weight_dtype)
        configs[module] = layer.config
    plain = {}
    holders = {skeleton.get_submodule(name) for name in layers}
    packed = {join(name, part) for name in all_names(skeleton, holders) for part in STORED}
    for name in (name for name in skeleton.state_dict() if name not in packed):
        tensor = tensors[aliases.get(name, name)]
        device = devices[name]
        plain[name] = tensor if device.type == "meta" else tensor.to(device)
    skeleton.load_state_dict(plain, strict=False, assign=True)
    # Before the weights that are left are tied.
    untie(skeleton)
    tie_weights: Any = getattr(skeleton, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    if isinstance(skeleton, fx.GraphModule):
        rewrite_graph(skeleton, configs)
