"""Load a checkpoint into a model: one that fp4pass wrote, or one of another library."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.transformers import whole_modules
from ..config import LinearConfig, Rule
from ..core.devices import require_device
from ..core.paths import path_of
from ..core.progress import current, shown
from ..core.source_files import tensor_shapes
from ..errors import CheckpointError, OptionError, expected, nearest, require_flags
from ..experts import QUANTIZED, weight_name
from ..kv_cache import KV_CACHE
from ..linear import INPUT_GLOBAL
from ..quantization.attention import calling_projections
from ..quantization.kv_cache import hold_scales, unobserve_cache
from ..quantization.replace import remove_observers, rewrite_graph, store_packed
from ..quantization.report import Report, Row
from ..quantization.state import forget_state, unwrap
from .beside import carried_names, copied_rows
from .checks import cache_format_in, packed_problem, require_input_scales
from .files import find_shards
from .finish import finish
from .layouts import BUFFERS, PackedLayer, join
from .model_layers import all_names
from .reader import CheckpointReader, open_checkpoint, renamed
from .skeleton import build_skeleton, check_skeleton, fit_tensors, model_names
from .stacks import join_stacks, stacks_in
from .writer import ShardWriter, bytes_of


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device_map: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Read a checkpoint with packed weights; the model that is returned is in eval mode.

    Every tensor is checked against the model, and its checksum if there is one, before the model
    is touched. What is loaded equals what was saved, to the bit.

    Args:
        directory: a folder that `save` wrote, or one of another library in the compressed-tensors
            or ModelOpt layout.
        model: a float model of the same architecture to load into, in place; by default it is
            built from the config of a transformers checkpoint.
        device_map: a device, or "auto" or a dict as for accelerate, where "disk" is a place too; by
            default the CPU.
        offload_folder: for what is on the disk; by default one that goes with the model.
        progress: as for `convert`.

    Raises:
        CheckpointError: the folder is damaged or of an unknown layout, or does not fit the model.
        OptionError: the device does not exist.

    Example:
        >>> packed = fp4pass.convert(copy.deepcopy(model), "nvfp4a16", "sse")
        >>> fp4pass.save(packed, "out")
        >>> loaded = fp4pass.load("out", model=model)
        >>> torch.equal(loaded(batches[0]), packed(batches[0]))
        True
    """
    require_flags(progress=progress)
    if isinstance(directory, nn.Module):
        wanted = "a path, as a string or a pathlib.Path"
        raise OptionError(
            f"{expected('directory', wanted, type(directory).__name__)} To load a folder into a "
            "model, call fp4pass.load(directory, model=model)."
        )
    place = single_device(device_map)
    reader = open_checkpoint(directory)
    skeleton = build_skeleton(reader) if model is None else unwrap(model)
    stacks = stacks_in(skeleton, reader.layers)
    pieces = {piece.name for each in stacks.values() for piece in each}
    require_input_scales(reader, besides=pieces)
    others = model_names(skeleton, reader)
    reader = renamed(reader, {disk: others[disk] for disk in others.keys() - pieces})
    carried = carried_names(skeleton, reader)
    with torch.inference_mode(False), shown("load", progress):
        tensors, aliases = _read(reader, pieces, carried)
    if any(isinstance(module, QUANTIZED) for module in skeleton.modules()):
        raise CheckpointError("The model to load into is converted already; give a float model.")
    reader = join_stacks(skeleton, reader, tensors, stacks)
    tensors |= reader.cache_scales
    cache = _hold_cache(skeleton, reader, tensors)
    if reader.own is None:
        fit_tensors(skeleton, reader, tensors, aliases)
    names = {name.removesuffix(".weight") for name in (*reader.layers, *tensors)}
    called: list[Rule] = [(name, {}) for name in names if name.rpartition(".")[2] == "q_proj"]
    with calling_projections(skeleton, called):
        check_skeleton(skeleton, reader, tensors, aliases)
        if isinstance(device_map, Mapping):
            require_map(skeleton, device_map)
    forget_state(skeleton)
    remove_observers(skeleton)
    unobserve_cache(skeleton)
    _fill(skeleton, reader.layers, tensors, aliases)
    files = {disk: reader.files[name] for name, disk in carried.items()}
    recipe, rows = _origin(reader, skeleton, cache)
    if reader.own is None:
        rows = [*rows, *copied_rows(skeleton, tensor_shapes(files))]
    finish(skeleton, recipe, rows, carried=files)
    # Those that `finish` left tied.
    tie_weights: Any = getattr(skeleton, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    if place is not None:
        skeleton.to(place)
    elif device_map is not None:
        dispatch(skeleton, device_map, offload_folder)
    loaded = skeleton if model is None else model
    return loaded if isinstance(skeleton, fx.GraphModule) else loaded.eval()


def _read(
    reader: CheckpointReader, pieces: Container[str], left: Container[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the checked tensors by their names in a model, and the aliases for others.

    Args:
        reader: of the folder.
        pieces: linear layers of experts; those that calibration never reached have no scale of
            inputs, or one that is no number, which is left out.
        left: tensors that are not read.
    """
    aliases: dict[str, str] = {} if reader.own is None else dict(reader.own["aliases"])
    packed = reader.packed_names()
    tensors = {}
    size, bar = sum(path.stat().st_size for path in {*reader.files.values()}), current()
    bar.expect({("read",): size}, {"bytes": size})
    for name, tensor in reader.checked([name for name in reader.files if name not in left]):
        bar.step(("read",), tensor.nbytes, {"bytes": tensor.nbytes})
        if name in packed:
            path, part, layer = packed[name]
            is_unreached = reader.own is None and part == INPUT_GLOBAL and path in pieces
            if is_unreached and packed_problem(part, tensor, layer):
                continue
            tensors[join(path, part)] = reader.decoded(part, name, tensor, layer)
        else:
            tensors[name] = tensor
    return tensors, aliases


def _hold_cache(
    skeleton: nn.Module, reader: CheckpointReader, tensors: dict[str, Tensor]
) -> str | None:
    """Give a model room for the scales of its key-value cache; return the format of these."""
    name = cache_format_in(reader)
    if name is None:
        return None
    for key in [key for key in tensors if key.endswith(reader.layout.cache_scales)]:
        # Some layouts have numbers.
        tensors[key] = torch.atleast_1d(tensors[key])
    try:
        hold_scales(skeleton, name, tensors)
    except OptionError as error:
        if reader.own is None:
            return None
        raise CheckpointError(f"{reader.folder}: {error}") from error
    return name


def _origin(
    reader: CheckpointReader, model: nn.Module, cache: str | None
) -> tuple[Mapping[str, Any], Sequence[Row]]:
    """Return the recipe and the rows of a checkpoint; of another library what its configs say."""
    if reader.own is not None:
        return reader.own["recipe"], Report.from_dict(reader.own["report"]).rows
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, QUANTIZED):
            layer = reader.layers[name]
            rows.append(Row(name, layer.shape, layer.config, layer.fmt.bits_per_weight))
        elif isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            rows.append(Row(name, shape, skip_reason="dense in the checkpoint"))
    declared = reader.config.get("quantization_config") or {}
    producer = declared.get("producer") or declared.get("version")
    held = {} if cache is None else {KV_CACHE: cache}
    return {"loaded": reader.layout.name, "producer": producer, **held}, rows


def _fill(
    skeleton: nn.Module,
    layers: Mapping[str, PackedLayer],
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Put checked tensors into a checked model."""
    devices = {name: tensor.device for name, tensor in skeleton.state_dict().items()}
    modules = dict(skeleton.named_modules(remove_duplicate=False))

    def stored(name: str, device: torch.device) -> Tensor | None:
        tensor = tensors.get(aliases.get(name, name))
        return tensor if tensor is None or device.type == "meta" else tensor.to(device)

    configs: dict[nn.Module, LinearConfig] = {}
    inputs: dict[tuple[object, ...], Tensor] = {}
    for name, layer in layers.items():
        module = modules[name]
        device = devices[weight_name(name, module)]
        parts = {part: stored(join(name, part), device) for part in BUFFERS}
        scale = parts[INPUT_GLOBAL]
        if scale is not None and scale.numel() == 1:
            # Shared as `convert` does; the value on the CPU is known without waiting for a device.
            full = join(name, INPUT_GLOBAL)
            value = float(tensors[aliases.get(full, full)])
            shared = (name.rpartition(".")[0], layer.fmt.key, value, device)
            parts[INPUT_GLOBAL] = inputs.setdefault(shared, scale)
        store_packed(module, parts, layer.config, transposed=layer.transposed)
        if isinstance(module, QUANTIZED):
            module.weight_dtype = getattr(torch, layer.weight_dtype)
        configs[module] = layer.config
    packed = {join(name, part) for name in all_names(skeleton, configs) for part in BUFFERS}
    names = [name for name in skeleton.state_dict() if name not in packed]
    plain = {name: stored(name, devices[name]) for name in names}
    try:
        skeleton.load_state_dict(plain, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"The model cannot hold what the folder has: {error}") from error
    if isinstance(skeleton, fx.GraphModule):
        rewrite_graph(skeleton, configs)


# Device maps that accelerate works out.
_BALANCED = ("auto", "balanced", "balanced_low_0", "sequential")


def single_device(device_map: Any) -> torch.device | None:
    """Return the device that a device map names, None for several. Raises OptionError."""
    several = isinstance(device_map, Mapping) or device_map in _BALANCED
    if device_map is None or several:
        return None
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        maps = f"{', '.join(_BALANCED)}, or a dict from names of modules to devices"
        what = f"a device such as 'cuda:0', one of {maps}"
        raise OptionError(expected("device_map", what, device_map)) from error
    require_device(str(device), "device_map=")
    return device


def require_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise OptionError unless a map gives every module a place, and has no other names."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= set(model.state_dict())
    split = any(str(name).rpartition(".")[2] in BUFFERS for name in device_map)
    for name in device_map:
        if name not in known and not split:
            wanted = f"names of modules{nearest(name, known)}"
            raise OptionError(expected("device_map", wanted, repr(name)))
    for name in model.state_dict():
        above = ("", *itertools.accumulate(name.split("."), "{}.{}".format))
        if not split and not any(each in device_map for each in above):
            raise OptionError(expected("device_map", f"a place for {name}", repr(dict(device_map))))
    for name, place in device_map.items():
        if place != "disk" and single_device(place) is None:
            raise OptionError(expected("device_map", f"a device for {name!r}", repr(place)))


def dispatch(
    model: nn.Module, device_map: Any, offload_folder: str | os.PathLike[str] | None
) -> None:
    """Put a model where a device map of several devices says, in place."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map in _BALANCED:
        options: dict[str, Any] = {
            "no_split_module_classes": whole_modules(model),
            "offload_buffers": True,
        }
        memory = None
        if device_map != "sequential":
            balanced = {"no_split_module_classes": options["no_split_module_classes"]}
            memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **balanced)
        device_map = infer_auto_device_map(model, max_memory=memory, **options)
    devices = set(device_map.values())
    if len(devices) == 1 and "disk" not in devices:
        model.to(devices.pop())
        return
    index = _on_disk(model, device_map, offload_folder) if "disk" in devices else None
    # Packed weights are buffers.
    dispatch_model(model, device_map, offload_index=index, offload_buffers=True)


def _on_disk(
    model: nn.Module, device_map: Mapping[str, Any], folder: str | os.PathLike[str] | None
) -> dict[str, dict[str, str]]:
    """Write what a device map has on the disk, and return accelerate's index of it."""
    if folder is None:
        target = Path(tempfile.mkdtemp(prefix="fp4pass-"))
        weakref.finalize(model, shutil.rmtree, target, ignore_errors=True)
    else:
        target = path_of(folder, "offload_folder")
        target.mkdir(parents=True, exist_ok=True)
    writer, names = ShardWriter(target, "offloaded.safetensors", bytes_of("1GB")), []
    for name, tensor in model.state_dict().items():
        above = ("", *itertools.accumulate(name.split("."), "{}.{}".format))
        nearest_place = next(device_map[each] for each in reversed(above) if each in device_map)
        if nearest_place == "disk":
            # Tied tensors are written for each name.
            writer.add(name, tensor.detach().cpu().contiguous().clone())
            names.append(name)
    writer.close()
    files = find_shards(target, "offloaded.safetensors")
    return {name: {"safetensors_file": str(files[name]), "weight_name": name} for name in names}
