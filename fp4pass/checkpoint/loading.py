"""Load a checkpoint into a model: one that fp4pass wrote, or one of another library."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.progress import current, shown
from ..errors import CheckpointError, OptionError, expected, some
from ..nn.experts import QUANTIZED, add_stack, stacks_of, weight_name
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import INPUT_GLOBAL
from ..quantization.observers.attention import calling_projections
from ..quantization.observers.kv_cache import hold_scales, unobserve_cache
from ..quantization.replace import remove_observers, rewrite_graph, store_packed
from ..record.config import LinearConfig, Rule
from ..record.rows import Report, Row
from ..record.source_folder import tensor_shapes
from ..record.state import forget_state, unwrap
from .beside import COPIED, NOT_COPIED, copied_rows
from .beyond import carried_names, without_ignored
from .checks import cache_format_in, require_input_scales
from .device_map import dispatch, require_map, single_device
from .finish import finish
from .layouts import BUFFERS, CACHE_SCALES, PackedLayer, Piece, join, join_layers
from .model_layers import all_names, stored_shape
from .opening import open_checkpoint
from .reader import CheckpointReader, packed_problem, renamed
from .skeleton import build_skeleton, check_skeleton, dense_here, fit_tensors, model_names
from .split_stacks import stacks_in


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
    is touched. The loaded model equals the saved one, to the bit.

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
    reader, ignored = without_ignored(skeleton, reader)
    reader, loose = dense_here(skeleton, reader, others)
    carried = carried_names(skeleton, reader)
    with torch.inference_mode(False), shown("load", progress):
        tensors, aliases = _read(reader, pieces, carried)
        tensors |= {each.parameter: each.weight() for each in loose}
    if any(isinstance(module, QUANTIZED) for module in skeleton.modules()):
        raise CheckpointError("The model to load into is converted already; give a float model.")
    reader = join_stacks(skeleton, reader, tensors, stacks)
    tensors |= reader.cache_scales
    cache = hold_cache(skeleton, reader, tensors)
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
    finish_loaded(skeleton, reader, cache, [each.row for each in loose], carried, ignored)
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
    bar.expect(size, "bytes")
    for name, tensor in reader.checked([name for name in reader.files if name not in left]):
        bar.step(tensor.nbytes)
        if name in packed:
            path, part, layer = packed[name]
            is_unreached = reader.own is None and part == INPUT_GLOBAL and path in pieces
            if is_unreached and packed_problem(part, tensor, layer):
                continue
            tensors[join(path, part)] = reader.decoded(name, tensor, packed[name])
        else:
            tensors[name] = tensor
    return tensors, aliases


def hold_cache(
    skeleton: nn.Module, reader: CheckpointReader, tensors: dict[str, Tensor]
) -> str | None:
    """Give a model room for the scales of its key-value cache; return the format of these."""
    name = cache_format_in(reader)
    if name is None:
        return None
    for key in [key for key in tensors if key.endswith(CACHE_SCALES)]:
        # Some layouts have numbers.
        tensors[key] = torch.atleast_1d(tensors[key])
    try:
        hold_scales(skeleton, name, tensors)
    except OptionError as error:
        if reader.own is None:
            return None
        raise CheckpointError(f"{reader.folder}: {error}") from error
    return name


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
            if pieces := stacks.get(name):
                records = {piece.name: layers.pop(piece.name) for piece in pieces}
                shape, view = tuple(stack.dense.shape), stack.view
                for piece, record in zip(pieces, records.values(), strict=True):
                    if record.shape != (wanted := (piece.stop - piece.start, shape[2])):
                        what = f"a weight of {wanted}, as the model has"
                        raise CheckpointError(
                            f"{reader.folder}: {expected(piece.name, what, record.shape)} The "
                            "sizes in config.json are not those of these weights."
                        )
                whole = dataclasses.replace(
                    records[pieces[0].name],
                    shape=shape,
                    transposed=view.transposed,
                    stored_shape=stored_shape(view, shape),
                )
                names = [join(piece.name, part) for piece in pieces for part in BUFFERS]
                state = {each: tensors.pop(each) for each in names if each in tensors}
                layers[name], joined = join_layers(name, pieces, records, whole, state)
                tensors |= joined
                without = [n for n in records if join(n, INPUT_GLOBAL) not in state]
                if whole.fmt.has_global_scale and join(name, INPUT_GLOBAL) in joined:
                    filled += without
                elif whole.fmt.has_global_scale and not whole.config.weight_only:
                    dynamic.append(name)
            if name in layers:
                add_stack(stack)
    if filled:
        warnings.warn(
            f"{len(filled)} linear layers of experts have no usable scale of their inputs "
            f"({some(sorted(filled))}): calibration never reached them. They get the largest of "
            "the other experts of their layer.",
            stacklevel=3,
        )
    if dynamic:
        warnings.warn(
            f"{len(dynamic)} stacks of experts have no scale of their inputs "
            f"({some(sorted(dynamic))}): each input gets one by its own largest magnitude.",
            stacklevel=3,
        )
    return dataclasses.replace(reader, layers=layers)


def finish_loaded(
    model: nn.Module,
    reader: CheckpointReader,
    cache: str | None,
    loose: Sequence[Row],
    carried: Mapping[str, str],
    ignored: Sequence[Row],
) -> None:
    """Complete a loaded model in place, with what the folder says of it.

    Args:
        model: with all its tensors.
        reader: of the folder, with the layers that the model has.
        cache: the format of its key-value cache.
        loose: the rows of packed layers that are dense in the model.
        carried: the tensors beyond the model, with their names on disk.
        ignored: the rows of packed layers that its class ignores.
    """
    files = {disk: reader.files[name] for name, disk in carried.items()}
    names = {row.name for row in loose}
    if reader.own is not None:
        own = Report.from_dict(reader.own["report"])
        # A class of another head has other layers.
        known = {*model.state_dict(), *(name for name, _ in model.named_modules())}
        rows = [
            row
            for row in own.rows
            if row.name not in names
            and (row.name in known or row.skip_reason.endswith((COPIED, NOT_COPIED)))
        ]
        finish(model, reader.own["recipe"], [*loose, *rows], carried=files)
        return
    rows = list(loose)
    for name, module in model.named_modules():
        if isinstance(module, QUANTIZED):
            layer = reader.layers[name]
            bits = layer.fmt.bits_per_weight(layer.shape)
            rows.append(Row(name, layer.shape, layer.config, bits))
        elif isinstance(module, nn.Linear) and name not in names:
            shape = tuple(module.weight.shape)
            rows.append(Row(name, shape, skip_reason="dense in the checkpoint"))
    rows += [*copied_rows(model, tensor_shapes(files)), *ignored]
    declared = reader.config.get("quantization_config") or {}
    producer = declared.get("producer") or declared.get("version")
    held = {} if cache is None else {KV_CACHE: cache}
    recipe = {"loaded": reader.layout.name, "producer": producer, **held}
    finish(model, recipe, rows, carried=files)


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
