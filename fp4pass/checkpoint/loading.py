"""Fill a float model with the packed weights of a folder, of fp4pass or of another library.

`load` fills the layers of a model; `from_pretrained` of transformers and diffusers first gives them
empty buffers, so that device maps see their sizes, and fills these.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat import transformers as compat
from .._compat.torch import model_class
from .._compat.transformers_loading import mark_initialized, names_in_model
from ..core.machine import require_device
from ..core.progress import current, shown
from ..errors import CheckpointError, OptionError, expected, some
from ..graph.rewrite import is_linear
from ..nn.experts import QUANTIZED, QuantizedExperts, add_stacks, stacks_of, weight_name
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..quantization.observers.kv_cache import hold_scales, unobserve_cache
from ..quantization.replace import remove_observers, rewrite_graph, store_packed
from ..record.rows import Report, Row
from ..record.state import forget_state, unwrap
from . import reader as reading
from .layouts import BUFFERS, CACHE_SCALES, PackedLayer, join, join_layers
from .model_layers import (
    COPIED,
    NOT_COPIED,
    all_names,
    finish,
    is_left_over,
    stacks_in,
    whole_record,
)
from .source_files import require_config, tensor_facts


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device_map: Any = None,
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
        device_map: a device, or "auto" or a dict as for accelerate, without a disk; by default the
            CPU.
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
    is_map = device_map in (None, "auto") or isinstance(device_map, Mapping)
    place = None if is_map else _device(device_map)
    reader = reading.open_checkpoint(directory)
    given = None if model is None else unwrap(model)
    skeleton = build_skeleton(reader) if given is None else given
    if any(isinstance(module, QUANTIZED) for module in skeleton.modules()):
        raise CheckpointError("The model to load into is converted already; give a float model.")
    folder = PackedFolder(skeleton, reader)
    with torch.inference_mode(False), shown("load", progress):
        current().expect(len(reader.files), "tensors")
        tensors = folder.read(name for name in folder.disk.files if name not in folder.carried)
        tensors |= {name: folder.dense_weight(name) for name in folder.dense}
    folder.join_stacks(tensors)
    tensors |= reader.cache_scales
    folder.hold_cache(tensors)
    aliases = dict(folder.disk.said("aliases"))
    if reader.own is None:
        fit_tensors(skeleton, folder.reader, tensors, aliases)
    check_skeleton(skeleton, folder.reader, tensors, aliases)
    if isinstance(device_map, Mapping):
        _require_map(skeleton, device_map)
    if given is not None:
        # It may be prepared.
        forget_state(given)
        remove_observers(given)
        unobserve_cache(given)

    def stored(name: str) -> Tensor | None:
        return tensors.get(aliases.get(name, name))

    devices = {name: tensor.device for name, tensor in skeleton.state_dict().items()}
    fill_layers(skeleton, folder.layers, lambda n: {p: stored(join(n, p)) for p in BUFFERS})
    configs = {skeleton.get_submodule(n): layer.config for n, layer in folder.layers.items()}
    packed = {join(name, part) for name in all_names(skeleton, configs) for part in BUFFERS}
    plain = [name for name in skeleton.state_dict() if name not in packed]
    try:
        found = {name: _moved(stored(name), devices[name]) for name in plain}
        skeleton.load_state_dict(found, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"The model cannot hold what the folder has: {error}") from error
    if isinstance(given, fx.GraphModule):
        rewrite_graph(given, configs)
    folder.finish()
    # Those that `finish` left tied.
    tie_weights: Any = getattr(skeleton, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    if place is not None:
        skeleton.to(place)
    elif device_map is not None:
        _dispatch(skeleton, device_map)
    loaded = skeleton if model is None else model
    return loaded if isinstance(skeleton, fx.GraphModule) else loaded.eval()


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a tensor on the device of its place, which may have none yet."""
    return tensor if tensor is None or device.type == "meta" else tensor.to(device)


def fill_layers(
    model: nn.Module,
    layers: Mapping[str, PackedLayer],
    buffers: Callable[[str], Mapping[str, Tensor | None]],
) -> None:
    """Put packed weights into layers one by one; `buffers` returns those of a name."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for name, layer in layers.items():
        module = modules[name]
        is_empty = PACKED in module._buffers
        place = module._buffers[PACKED] if is_empty else module._parameters["weight"]
        parts = {part: _moved(tensor, place.device) for part, tensor in buffers(name).items()}
        if is_empty:
            module._buffers.update(parts)
            module._non_persistent_buffers_set.difference_update(parts)
        else:
            store_packed(module, parts, layer.config, transposed=layer.transposed)
            if isinstance(module, QUANTIZED):
                module.weight_dtype = getattr(torch, layer.weight_dtype)
    share_input_scales(modules, layers)


def share_input_scales(modules: Mapping[str, Any], layers: Mapping[str, PackedLayer]) -> None:
    """Have layers of one module share equal scales of inputs, as after `convert`."""
    shared: dict[tuple[object, ...], Tensor] = {}
    for name, layer in layers.items():
        buffers = modules[name]._buffers
        scale = buffers.get(INPUT_GLOBAL)
        if scale is not None and scale.numel() == 1 and not scale.is_meta:
            key = (name.rpartition(".")[0], layer.fmt.key, float(scale), scale.device)
            buffers[INPUT_GLOBAL] = shared.setdefault(key, scale)


def empty_buffers(layer: PackedLayer, parts: Container[str]) -> dict[str, Tensor | None]:
    """Return the buffers of a layer on the meta device, None for those that it lacks."""
    fmt, (*rows, columns) = layer.fmt, layer.shape
    shapes = {
        PACKED: ((*rows, fmt.packed_columns(columns)), torch.uint8),
        SCALE: (layer.scale_shape, fmt.scale.storage),
        GLOBAL: ((1,), torch.float32),
        INPUT_GLOBAL: ((1,), torch.float32),
    }
    return {
        part: torch.empty(shape, dtype=dtype, device="meta") if part in parts else None
        for part, (shape, dtype) in shapes.items()
    }


class PackedFolder:
    """A packed folder, for the float model that it fills; is_part: which may lack heads."""

    disk: reading.CheckpointReader  # with the names of the model, where experts lie one by one
    layers: dict[str, PackedLayer]  # of the model, with whole stacks once they are joined
    # By parameters of no linear layer that others pack, as those of routers and embeddings: the
    # layer in the folder, the dtype, and the row of the report.
    dense: dict[str, tuple[str, torch.dtype, Row]]
    carried: dict[str, str]  # names on disk of tensors beyond the model

    def __init__(
        self, model: nn.Module, reader: reading.CheckpointReader, is_part: bool = False
    ) -> None:
        self.model = model
        self._on_disk = [*reader.packed_names()]
        self._stacks = stacks_in(model, reader.layers)
        self._pieces = {piece.name for pieces in self._stacks.values() for piece in pieces}
        reading.require_input_scales(reader, besides=self._pieces)
        names = model_names(model, reader)
        own = {disk: name for disk, name in names.items() if disk not in self._pieces}
        self.disk = self._named = reader.with_names(own)
        self.dense = {}
        self._ignored: list[Row] = []
        self._sort_layers(names, is_part)
        self.layers = dict(self.disk.layers)
        self.carried = self._carried()
        self._packed = self.disk.packed_names()
        self._cache: str | None = None
        self._cache_scales: dict[str, Tensor] = {}

    @property
    def reader(self) -> reading.CheckpointReader:
        """The folder with the layers of the model."""
        return dataclasses.replace(self.disk, layers=self.layers)

    def _sort_layers(self, names: Mapping[str, str], is_part: bool) -> None:
        """Leave out layers that the class ignores or lacks, and those that are dense in it."""
        model, disk = self.model, self.disk
        modules = dict(model.named_modules(remove_duplicate=False))
        known = {*modules, *(n for n, _ in model.named_parameters(remove_duplicate=False))}
        spare = [join(name, "weight") for name in disk.layers if name not in modules]
        # Others that match the same pattern, as those of multi-token prediction, go with them.
        used = [
            each
            for each in compat.ignored_tensors(model)
            if any(re.search(each, name) for name in spare)
        ]

        def is_ignored(name: str) -> bool:
            return any(re.search(each, name) for each in used)

        gone, keeps = set[str](), compat.stays_float32(model)
        for name, layer in disk.layers.items():
            parameter = names.get(join(name, "weight"), join(name, "weight"))
            path, _, key = parameter.rpartition(".")
            module = modules.get(path)
            weight = None if module is None else module._parameters.get(key)
            if is_ignored(join(name, "weight")):
                why = f"{model_class(model).__name__} has no place for it{NOT_COPIED}"
                self._ignored.append(Row(name, layer.shape, skip_reason=why))
                gone.add(name)
            elif is_part and name not in known | self._pieces:
                # A head that a base model lacks; layers of its body stay.
                if not any(map(str.isdigit, name.split("."))):
                    gone.add(name)
            elif (
                module is not None
                and weight is not None
                and tuple(weight.shape) == layer.dense_shape
                and not (key == "weight" and is_linear(module))
                # The parameters of a graph are in modules that nobody calls.
                and not isinstance(model, fx.GraphModule)
            ):
                why = f"stored in {layer.scheme}; {type(module).__name__} is no linear layer"
                row = Row(name, layer.shape, skip_reason=f"{why}, so its weight is dense here")
                dtype = torch.float32 if keeps(parameter) else weight.dtype
                self.dense[parameter] = name, dtype, row
                gone.add(name)
        disk = disk.without(gone)
        files = {name: path for name, path in disk.files.items() if not is_ignored(name)}
        self.disk = dataclasses.replace(disk, files=files)

    def _carried(self) -> dict[str, str]:
        """Return the tensors that go beyond the model, with their names on disk."""
        known, patterns = self.model.state_dict(), compat.ignored_tensors(self.model)
        found: Iterable[str] = self.disk.said("carried")
        if self.disk.own is None:
            found = [
                name
                for name in self.disk.plain()
                if any(re.search(each, name) for each in patterns)
                and not is_left_over(self.model, name)
            ]
        return {n: self.disk.on_disk.get(n, n) for n in found if n not in known}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return checked tensors by their names in a state dict, without unusable input scales."""
        found = dict[str, Tensor]()
        for name, tensor in self.disk.checked(names):
            if name not in self._packed:
                found[name] = tensor
                continue
            path, part, layer = self._packed[name]
            is_piece = self.disk.own is None and path in self._pieces
            if is_piece and part == INPUT_GLOBAL and reading.packed_problem(part, tensor, layer):
                continue
            found[join(path, part)] = self.disk.decoded(name, tensor, self._packed[name])
        return found

    def dense_weight(self, parameter: str) -> Tensor:
        """Return the numbers that are stored for a parameter, rounded once."""
        layer, dtype, _ = self.dense[parameter]
        return self._named.layers[layer].dense(self._named.dense(layer, dtype))

    def join_stacks(self, tensors: dict[str, Tensor]) -> None:
        """Put stacks, which become modules, in place of their pieces, in `tensors` too."""
        missing = list[str]()
        owners = [(path, stacks_of(owner)) for path, owner in self.model.named_modules()]
        stacks = {join(path, key): stack for path, own in owners for key, stack in own.items()}
        for name, stack in stacks.items():
            if pieces := self._stacks.get(name):
                records = {piece.name: self.layers.pop(piece.name) for piece in pieces}
                for piece in pieces:
                    wanted = (piece.stop - piece.start, stack.dense.shape[2])
                    if (got := records[piece.name].shape) != wanted:
                        what = f"a weight of {wanted}, as the model has"
                        raise CheckpointError(
                            f"{self.disk.folder}: {expected(piece.name, what, got)} The sizes "
                            "in config.json are not those of these weights."
                        )
                places = [join(piece.name, part) for piece in pieces for part in BUFFERS]
                state = {each: tensors.pop(each) for each in places if each in tensors}
                whole = whole_record(records[pieces[0].name], stack)
                whole, joined = join_layers(name, pieces, records, whole, state)
                self.layers[name] = whole
                tensors |= joined
                if whole.has_input_scale and not whole.static_inputs:
                    missing += [n for n in records if join(n, INPUT_GLOBAL) not in state]
            if name in self.layers:
                add_stacks([stack])
        if missing:
            warnings.warn(
                f"{len(missing)} linear layers of experts have no usable scale of their inputs "
                f"({some(sorted(missing))}): calibration never reached them. They get the largest "
                "of the other experts of their layer, or where none has one, one at each call.",
                stacklevel=3,
            )

    def hold_cache(self, tensors: dict[str, Tensor]) -> None:
        """Give the model room for the scales of its key-value cache, if the folder has some."""
        if (name := reading.cache_format_in(self.disk)) is None:
            return
        for key in [key for key in tensors if key.endswith(CACHE_SCALES)]:
            # Some layouts have numbers.
            tensors[key] = torch.atleast_1d(tensors[key])
        try:
            hold_scales(self.model, name, tensors)
        except OptionError as error:
            if self.disk.own is not None:
                raise CheckpointError(f"{self.disk.folder}: {error}") from error
        else:
            self._cache = name

    def place(self) -> None:
        """Give layers empty buffers, which transformers moves and does not look for."""
        small = [n for n, (_, part, _) in self._packed.items() if part in (GLOBAL, INPUT_GLOBAL)]
        tensors = self.read(small)
        for path, part, layer in self._packed.values():
            if (empty := empty_buffers(layer, (PACKED, SCALE))[part]) is not None:
                tensors[join(path, part)] = empty
        self.join_stacks(tensors)
        is_cached = reading.cache_format_in(self.disk) is not None
        cached = [n for n in self.disk.plain() if is_cached and n.endswith(CACHE_SCALES)]
        self._on_disk += [self.disk.on_disk.get(name, name) for name in cached]
        scales = dict(self.disk.tensors(cached)) | self.disk.cache_scales
        self.hold_cache(scales)
        self._cache_scales = {} if self._cache is None else scales
        modules: dict[str, Any] = dict(self.model.named_modules(remove_duplicate=False))
        for name, layer in self.layers.items():
            advice = "Load it with the class that config.json names."
            module: Any = module_for(modules, self.reader, name, advice)
            parts = {part: tensors.get(join(name, part)) for part in BUFFERS}
            meta = {part: None if t is None else t.to("meta") for part, t in parts.items()}
            store_packed(module, meta, layer.config, transposed=layer.transposed)
            module._non_persistent_buffers_set.update(p for p, t in meta.items() if t is not None)
            mark_initialized(module)
        for owner in self.model.modules():
            if isinstance(owner, QuantizedExperts):
                mark_initialized(owner)
        for name in self._cache_scales:
            path, _, key = name.rpartition(".")
            self.model.get_submodule(path)._non_persistent_buffers_set.add(key)
        compat.untie(self.model)

    @cached_property
    def expected(self) -> set[str]:
        """The names that transformers gives to the packed tensors, and to what it makes of them."""
        named = names_in_model(self.model, self._on_disk, merged=True).values()
        weights = {weight_name(n, self.model.get_submodule(n)) for n in self.layers}
        known = self.reader.packed_names()
        return {*known, *named, *self._on_disk, *weights, *self._cache_scales, *self.carried}

    def fill(self) -> None:
        """Read the packed layers, one by one, to the devices where transformers put them."""
        fill_layers(self.model, self.layers, self._buffers)
        for name, scale in self._cache_scales.items():
            path, _, last = name.rpartition(".")
            module = self.model.get_submodule(path)
            module._buffers[last] = scale.float().to(module.get_buffer(last).device)
            module._non_persistent_buffers_set.discard(last)
        for name in self.dense:
            # In place of what transformers took for it; ties to it stay.
            weight = self.model.get_parameter(name)
            if weight.is_meta:
                raise CheckpointError(
                    f"{name}: the folder has it packed, and the model dense, which the disk cannot "
                    'hold. Give it another place than "disk" in device_map.'
                )
            weight.data = self.dense_weight(name).to(weight.device)

    def _buffers(self, name: str) -> dict[str, Tensor | None]:
        pieces = self._stacks.get(name, [])
        layers = [piece.name for piece in pieces] or [name]
        tensors = self.read(each for layer in layers for each in self.disk.names(layer).values())
        if pieces:
            _, tensors = join_layers(name, pieces, self.disk.layers, self.layers[name], tensors)
        return {part: tensors.get(join(name, part)) for part in BUFFERS}

    def finish(self) -> None:
        """Complete the filled model, with what the folder says of it."""
        files = {disk: self.disk.files[name] for name, disk in self.carried.items()}
        rows = [row for _, _, row in self.dense.values()]
        names, own = {row.name for row in rows}, self.disk.own
        if own is not None:
            # A class of another head has other layers.
            known = {*self.model.state_dict(), *(name for name, _ in self.model.named_modules())}
            rows += [
                row
                for row in Report.from_dict(own["report"]).rows
                if row.name not in names
                and (row.name in known or row.skip_reason.endswith((COPIED, NOT_COPIED)))
            ]
            finish(self.model, own["recipe"], rows, carried=files)
            return
        for name, module in self.model.named_modules():
            if isinstance(module, QUANTIZED):
                layer = self.layers[name]
                bits = layer.fmt.bits_per_weight(layer.shape)
                rows.append(Row(name, layer.shape, layer.config, bits))
            elif isinstance(module, nn.Linear) and name not in names:
                shape = tuple(module.weight.shape)
                rows.append(Row(name, shape, skip_reason="dense in the checkpoint"))
        why = f"{model_class(self.model).__name__} has no place for it{COPIED}"
        rows += [Row(n, shape, skip_reason=why) for n, (shape, _) in tensor_facts(files).items()]
        declared = self.disk.config.get("quantization_config") or {}
        producer = declared.get("producer") or declared.get("version")
        held = {} if self._cache is None else {KV_CACHE: self._cache}
        recipe = {"loaded": self.disk.layout.name, "producer": producer, **held}
        finish(self.model, recipe, [*rows, *self._ignored], carried=files)


def _device(name: Any) -> torch.device:
    """Return a device of this machine. Raises OptionError for anything else."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        what = "a device such as 'cuda:0', 'auto', or a dict from names of modules to devices"
        raise OptionError(expected("device_map", what, name)) from error
    require_device(str(device), "device_map=")
    return device


def _require_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    from accelerate.utils import check_device_map

    for place in device_map.values():
        _device(place)
    if unknown := set(device_map) - {name for name, _ in model.named_modules()}:
        raise OptionError(expected("device_map", "names of modules", some(sorted(unknown))))
    try:
        check_device_map(model, dict(device_map))
    except ValueError as error:
        raise OptionError(f"device_map: {error}") from error


def _dispatch(model: nn.Module, device_map: Any) -> None:
    """Put a model where a device map of several devices says, in place."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map == "auto":
        whole: dict[str, Any] = {"no_split_module_classes": compat.whole_modules(model)}
        memory = get_balanced_memory(model, **whole)
        # Packed weights are buffers.
        device_map = infer_auto_device_map(model, max_memory=memory, offload_buffers=True, **whole)
    devices = set(device_map.values())
    if "disk" in devices:
        raise OptionError("device_map: the devices and the CPU have no room for the whole model.")
    if len(devices) == 1:
        model.to(devices.pop())
    else:
        dispatch_model(model, device_map, offload_buffers=True)


def build_skeleton(reader: reading.CheckpointReader) -> nn.Module:
    """Return the float model of a config, its parameters on meta. Raises CheckpointError."""
    folder, path = reader.folder, reader.folder / "config.json"
    advice = "Pass the float model to load into: fp4pass.load(dir, model=model)."
    if not reader.config:
        raise CheckpointError(f"{folder} has no config.json. {advice}")
    require_config(folder, reader.config, reader.own)
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        needs = "Building a model needs transformers and accelerate: pip install 'fp4pass[hf]'"
        raise CheckpointError(f"{needs}. {advice}") from error
    with _made_of(path, advice):
        # Without it transformers asks on the terminal whether it may run the files of a folder.
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # ModelOpt may have left it to its own file.
        config.__dict__.pop("quantization_config", None)
        config.dtype = getattr(torch, reader.dtype)
        (architecture,) = config.architectures
        cls = getattr(transformers, architecture)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            raise TypeError(f"{architecture} is not a class of models")
        with init_empty_weights(include_buffers=False):
            model: Any = compat.model_from_config(cls, config)
    path = folder / "generation_config.json"
    if path.is_file():
        with _made_of(path, "Copy it again, or delete it."):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    built: nn.Module = model
    return built


@contextmanager
def _made_of(path: Path, advice: str) -> Iterator[None]:
    """Make what transformers raises for a config a CheckpointError that names the file."""
    import transformers

    try:
        yield
    except compat.config_faults() as error:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot make anything of it: "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error


def model_names(skeleton: nn.Module, reader: reading.CheckpointReader) -> dict[str, str]:
    """Return the names that transformers gives to what has another name on disk."""
    if reader.own is not None:
        return reading.with_layers(reader.said("renamed"))
    names = [*(join(layer, "weight") for layer in reader.layers), *reader.plain()]
    if not hasattr(skeleton, "base_model_prefix") or set(skeleton.state_dict()).issuperset(names):
        return {}
    return reading.with_layers(names_in_model(skeleton, names))


def fit_tensors(
    skeleton: nn.Module,
    reader: reading.CheckpointReader,
    tensors: dict[str, Tensor],
    aliases: dict[str, str],
) -> None:
    """Bring the tensors of another library to those of the model, in place, or raise."""
    # Ties become aliases; what the model ignores goes, and scales of a cache that it has not.
    for target, source in compat.tied_weights(skeleton).items():
        # A weight may be tied in a float model, and packed in this one.
        packed = target.removesuffix(".weight") in reader.layers
        if not packed and target not in tensors and source in tensors:
            aliases[target] = source
        elif source not in tensors and target in tensors:
            # The name that a model lists first is the written one.
            aliases.setdefault(source, target)
    patterns, known = compat.ignored_tensors(skeleton), skeleton.state_dict()
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    is_kept = compat.stays_float32(skeleton)
    buffers = {join(layer, part) for layer in reader.layers for part in BUFFERS}
    rounded = []
    for name in [name for name in tensors if name not in buffers]:
        if name in known:
            # As from_pretrained does.
            dtype = torch.float32 if is_kept(name) else known[name].dtype
            before, tensors[name] = tensors[name], tensors[name].to(dtype)
            if before.dtype != dtype and not torch.equal(before, tensors[name].to(before.dtype)):
                rounded.append(name)
        elif name.endswith(CACHE_SCALES) or any(re.search(each, name) for each in patterns):
            del tensors[name]
            continue
        if problem := reading.dense_problem(tensors[name], is_buffer=name not in parameters):
            raise CheckpointError(f"{reader.folder}: {name}: {problem}")
    if rounded:
        warnings.warn(
            f"{len(rounded)} dense tensors are rounded to the dtype that config.json says "
            f"({some(rounded)}), as in transformers. To keep them, load into a model in their "
            "dtype: fp4pass.load(dir, model=model).",
            stacklevel=3,
        )


def module_for(
    modules: Mapping[str, nn.Module], reader: reading.CheckpointReader, name: str, advice: str
) -> nn.Module:
    """Return the module that a packed layer has its place in. Raises CheckpointError."""
    module, layer = modules.get(name), reader.layers[name]
    weight = None if module is None else module._parameters.get("weight")
    if module is None or weight is None or tuple(weight.shape) != layer.dense_shape:
        found = "a model without one" if weight is None else str(tuple(weight.shape))
        raise CheckpointError(
            f"{name}: expected a linear layer with a weight of {layer.dense_shape}, as "
            f"{reader.folder} has, got {found}. {advice}"
        )
    return module


def check_skeleton(
    skeleton: nn.Module,
    reader: reading.CheckpointReader,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Raise CheckpointError unless a model has just the layers and tensors of a folder."""
    advice = "Load into a model of the same architecture."
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    names = all_names(skeleton, {module_for(modules, reader, n, advice) for n in reader.layers})
    packed = {join(name, part) for name in names for part in BUFFERS}
    own = skeleton.state_dict()
    wanted = set(own) - {weight_name(name, modules[name]) for name in names}
    plain = {name for name in (*tensors, *aliases) if name not in packed}
    if plain != wanted:
        raise CheckpointError(
            f"{reader.folder} is of another architecture than the model: it lacks "
            f"{sorted(wanted - plain) or 'nothing'} and has {sorted(plain - wanted) or 'nothing'} "
            "beyond it."
        )
    for name in plain:
        saved = tensors[aliases.get(name, name)]
        if saved.shape != own[name].shape:
            raise CheckpointError(
                f"{name}: expected {tuple(own[name].shape)}, as the model has, got "
                f"{tuple(saved.shape)} in {reader.folder}."
            )
