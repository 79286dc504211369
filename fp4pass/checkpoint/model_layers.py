"""Describe a model whose layers are packed, and complete it.

It says how layers are packed, their names on disk and what the config makes, sets the state, and
lets other libraries read the state dict of packed layers.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compat import transformers as compat
from .._compat.diffusers import declare, is_diffusers, loading_lora
from .._compat.torch import model_class
from .._compat.transformers_experts import StackView, adapter_of, parts_of
from .._compat.transformers_loading import names_on_disk, tensors_on_disk
from .._version import __version__
from ..core.fingerprint import dtype_name
from ..core.names import without_numbers
from ..distributed import is_sharded
from ..errors import CheckpointError, OptionError, ShapeError, StateError, as_option, expected, some
from ..graph.inductor import install_passes
from ..nn import experts as mixtures
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import INPUT_GLOBAL, PACKED
from ..nn.packed_linear import AROUND_STATE, PackedLinear
from ..quantization.observers.kv_cache import enable_cache
from ..quantization.plan import Plan
from ..quantization.replace import enable_dequantize, quantizes_input, share_inputs, use_slow_paths
from ..quantization.scan import parents
from ..record.rows import Report, Row
from ..record.state import ModelState, get_state, has_adapters, set_state
from .finished import ConvertedState
from .layouts import (
    BUFFERS,
    Layout,
    PackedLayer,
    Piece,
    below,
    fused_problems,
    get_layout,
    has_whole_tiles,
    join,
)
from .readers import Facts, of_stock, pretrained_problem
from .source_files import require_writable

# The end of the reasons of rows for source tensors that the model has no place for.
COPIED, NOT_COPIED = ": copied as it is", ": not copied"

# The end of the name of a layer's weight.
_WEIGHT = ".weight"


def is_transformers(root: nn.Module) -> bool:
    """Return whether a model is one of transformers, or one that PEFT has wrapped."""
    # Others have a config, too, that of a part of theirs.
    is_one = compat.is_pretrained(root) or has_adapters(root)
    return is_one and hasattr(root, "config") and hasattr(root.config, "save_pretrained")


def describe_layers(root: nn.Module, state: ModelState) -> dict[str, PackedLayer]:
    """Return the record of every converted layer, by its name. Raises CheckpointError."""
    layers, modules = {}, dict(root.named_modules(remove_duplicate=False))
    for row in state.report.converted:
        module = modules.get(row.name)
        if module is None or row.config is None or not hasattr(module, PACKED):
            raise CheckpointError(
                f"{row.name}: the model has changed since it was converted; there is no packed "
                "weight under this name. Save it before wrapping or replacing its layers."
            )
        layers[row.name] = PackedLayer(
            config=row.config,
            weight_dtype=dtype_name(getattr(module, "weight_dtype", torch.float32)),
            transposed=bool(getattr(module, "transposed", False)),
            shape=row.shape,
            stored_shape=stored_shape(getattr(module, "view", None), row.shape),
            static_inputs=(
                # Inputs in FP8 have the one scale that is stored.
                module._buffers.get(INPUT_GLOBAL) is not None
                and (fmt := row.config.input_format) is not None
                and not fmt.has_global_scale
            ),
        )
    return layers


def stored_shape(view: StackView | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return what `PackedLayer` says of the parameter that has a stack, () if there is none."""
    if view is None or (len(view.shape) == len(shape) and not view.spare):
        return ()
    return view.shape


def whole_record(piece: PackedLayer, stack: mixtures.ExpertStack) -> PackedLayer:
    """Return the record of a stack in a model, packed as a layer that is a piece of it."""
    view, shape = stack.view, tuple(stack.dense.shape)
    stored = stored_shape(view, shape)
    return dataclasses.replace(piece, shape=shape, transposed=view.transposed, stored_shape=stored)


def all_names(root: nn.Module, modules: Container[nn.Module]) -> list[str]:
    """Return every name of some modules; one may be listed under several."""
    return [n for n, m in root.named_modules(remove_duplicate=False) if m in modules]


def ignored_names(root: nn.Module, state: ModelState) -> list[str]:
    """Return the names and patterns of the layers that stay dense."""
    modules = dict(root.named_modules(remove_duplicate=False))
    packed = [row.name for row in state.report.converted]
    rows = [row for row in state.report.skipped if not row.skip_reason.endswith(COPIED)]
    return ignored_layers(rows, packed, modules.__contains__)


def ignored_layers(
    rows: Iterable[Row], packed: Collection[str], is_module: Callable[[str], bool]
) -> list[str]:
    """Return the names and patterns of skipped layers, as other libraries match them."""
    # A stacked parameter of experts is a pattern, for there others make a linear of each expert.
    # Other parameters need none: nobody looks for a linear there, and a pattern of what is below
    # their module would cover packed layers.
    found: dict[str, None] = {}
    for row in rows:
        path, _, last = row.name.rpartition(".")
        if row.skip_reason.endswith(NOT_COPIED) or len(row.shape) == 1:
            continue
        # One matrix with a dimension of 1 before it is a table of positions.
        is_stack = len(row.shape) == 3 and row.shape[0] > 1
        if is_module(row.name) or last == "weight":
            found[row.name if is_module(row.name) else path] = None
        elif path and is_stack and not any(name.startswith(f"{path}.") for name in packed):
            found[below(path)] = None
    return list(found)


def require_static_scales(root: nn.Module, layers: Mapping[str, PackedLayer]) -> None:
    """Raise CheckpointError for inputs that need a global scale and have no stored one."""
    for name, layer in layers.items():
        dynamic = root.get_submodule(name)._buffers.get(INPUT_GLOBAL) is None
        fmt = layer.config.input_format
        if fmt is not None and fmt.has_global_scale and dynamic:
            raise CheckpointError(
                f"{name}: its input gets a global scale at each call, which {layer.fmt.key} has no "
                "place for on disk. Calibrate before convert, or choose "
                f"{as_option('fmt', f'{layer.fmt.name}a16')} or 'mxfp4'."
            )


def require_equal_parts(
    layout: Layout, layers: Mapping[str, PackedLayer], dense: Collection[str]
) -> None:
    """Raise CheckpointError for a layout of engines if layers that these fuse differ."""
    for parent, what in fused_problems(layers, dense) if layout.engines else ():
        raise CheckpointError(
            f"{parent}: {what}. Serving engines multiply by these as by one matrix. Give them "
            f"one scheme by {as_option('rules')}, or save with {as_option('layout', 'fp4pass')}, "
            "which only fp4pass reads."
        )


def split_note(root: nn.Module, plan: Plan) -> str:
    """Return that a plan gives layers that engines fuse several schemes, "" if it does not."""
    packed = {
        layer.name: PackedLayer(layer.config, "float32", False, layer.shape)
        for layer in plan.layers
    }
    skipped = [layer.name for layer in plan.skipped]
    for parent, problem in fused_problems(packed, skipped) if is_transformers(root) else ():
        return (
            f"{parent}: {problem}. Serving engines multiply by these as by one matrix, so that "
            "save will refuse them in the layouts of engines; give them one scheme by "
            f"{as_option('rules')}."
        )
    return ""


def require_no_others(root: nn.Module, holders: Container[nn.Module]) -> None:
    """Raise CheckpointError for packed layers that `convert` did not make."""
    for name, module in root.named_modules():
        if hasattr(module, PACKED) and module not in holders:
            raise CheckpointError(
                f"{name}: a {type(module).__name__}, made by fp4pass.parity.swap; a checkpoint of "
                "transformers holds what fp4pass.convert packed. Convert all of it, or keep "
                "state_dict with torch.save."
            )


@dataclass(frozen=True)
class NamesOnDisk:
    """Names on disk by those in a model, of what has another one there."""

    tensors: Mapping[str, str] = field(default_factory=dict)  # dense ones
    layers: Mapping[str, str] = field(default_factory=dict)  # packed and dense
    stacks: Mapping[str, str] = field(default_factory=dict)  # as folders of the float model

    @classmethod
    def of(
        cls,
        root: nn.Module,
        dense: Iterable[str],
        packed: Mapping[str, nn.Module],
        whole: Mapping[str, str],
    ) -> NamesOnDisk:
        """Return the names on disk of what `save_pretrained` of a float model would rename."""
        # packed: layers that lie in a folder in one piece. whole: the names on disk of stacks that
        # lie there in pieces, and in one in a folder of the float model.
        if not is_transformers(root):
            return cls()
        weights = {mixtures.weight_name(name, module): module for name, module in packed.items()}
        # Each once, in the order of the model.
        names = names_on_disk(root, dict.fromkeys([*dense, *weights]))
        tensors, layers, stacks = dict[str, str](), dict[str, str](), dict[str, str]()
        for name, disk in ((name, disk) for name, disk in names.items() if disk != name):
            if isinstance(weights.get(name), mixtures.QuantizedExpertStack):
                stacks[name] = disk
                continue
            if name not in weights:
                tensors[name] = disk
            if name.endswith(_WEIGHT) and disk.endswith(_WEIGHT):
                layers[name.removesuffix(_WEIGHT)] = disk.removesuffix(_WEIGHT)
        return cls(tensors, layers, {**stacks, **whole})

    @property
    def in_model(self) -> dict[str, str]:
        """The names in the model of tensors and of the weights of layers, by those on disk."""
        weights = {name + _WEIGHT: disk + _WEIGHT for name, disk in self.layers.items()}
        found = {**weights, **self.tensors, **self.stacks}
        return {disk: name for name, disk in found.items() if disk != name}


class SplitStack(NamedTuple):
    """The layers of a stack in a folder, and its name where float folders have it whole."""

    pieces: list[Piece]
    whole: str = ""


def split_stacks(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, SplitStack]:
    """Return the stacks of a model that lie in a folder in layers; layers: what is packed."""
    stacks = dict(_all_stacks(model, layers)) if is_transformers(model) else {}
    # The names of the halves of each expert: gate and up are apart. All at once, for some lie
    # among the experts of another stack.
    owners = [(name, half) for name, (n, _) in stacks.items() for half in range(2 * n)]
    numbered = torch.arange(len(owners)).split([2 * n for n, _ in stacks.values()])
    halves = {name: own.view(-1, 2, 1) for name, own in zip(stacks, numbered, strict=True)}
    found: dict[str, SplitStack] = {}
    kept = set()
    for disk, numbers in (tensors_on_disk(model, halves) if halves else {}).items():
        name, first = owners[numbers.flatten()[0]]
        experts, rows = stacks[name]
        held = [owners[number] for number in numbers.flatten().tolist()]
        if held == [(name, half) for half in range(2 * experts)]:
            if pieces := _conventional(model, name, disk, experts, rows):
                found[name] = SplitStack(pieces, disk)
        elif held in ([(name, first)], [(name, first), (name, first + 1)]) and disk.endswith(
            _WEIGHT
        ):
            start = first % 2 * (rows // 2)
            stop = start + (rows if len(held) == 2 else rows // 2)
            piece = Piece(disk.removesuffix(_WEIGHT), first // 2, start, stop)
            found.setdefault(name, SplitStack([])).pieces.append(piece)
        else:
            kept |= {owner for owner, _ in held}
    return {name: found[name] for name in stacks if name in found and name not in kept}


def _all_stacks(
    model: nn.Module, layers: Mapping[str, PackedLayer]
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the name of every stack of a model, and how many experts and rows it has."""
    for path, owner in model.named_modules():
        for key in (
            mixtures.packed_stacks(owner) if isinstance(owner, mixtures.QuantizedExperts) else ()
        ):
            yield join(path, key), layers[join(path, key)].shape[:2]
        for key, stack in mixtures.stacks_of(owner).items():
            yield join(path, key), stack.dense.shape[:2]


def _conventional(model: nn.Module, stack: str, disk: str, experts: int, rows: int) -> list[Piece]:
    """Return the layers that others read though folders of the float model have a stack."""
    path, _, last = stack.rpartition(".")
    place, _, last_on_disk = disk.rpartition(".")
    # Under another name engines look for the stack alone.
    parts = parts_of(model.get_submodule(path), last) if last == last_on_disk else ()
    each = rows // max(len(parts), 1)
    return [
        Piece(join(f"{place}.{expert}", part), expert, i * each, (i + 1) * each)
        for expert in range(experts)
        for i, part in enumerate(parts)
    ]


def split_layers(
    model: nn.Module, layers: Mapping[str, PackedLayer]
) -> tuple[dict[str, PackedLayer], dict[str, SplitStack], dict[str, str]]:
    """Return the layers as on disk, the stacks that are taken apart, and why others are not."""
    # Engines want one scheme for all products of an expert.
    written: dict[str, PackedLayer] = {}
    split: dict[str, SplitStack] = {}
    whole: dict[str, str] = {}
    known = split_stacks(model, layers)
    for name, layer in layers.items():
        pieces = known[name].pieces if name in known else []
        if layer.is_stacked and not pieces:
            whole[name] = f"folders of {model_class(model).__name__} have them under other names"
        elif layer.is_stacked and not has_whole_tiles(pieces, layer.fmt):
            size = pieces[0].stop - pieces[0].start
            whole[name] = f"gate and up of {size} rows share blocks of {layer.fmt.rows} rows"
        elif layer.is_stacked and not _is_uniform(name, layers, model):
            whole[name] = "another stack of their layer is not packed alike"
        if name in whole or not layer.is_stacked:
            written[name] = layer
            continue
        split[name] = known[name]
        for piece in pieces:
            shape = (piece.stop - piece.start, layer.shape[2])
            written[piece.name] = dataclasses.replace(
                layer, shape=shape, transposed=False, stored_shape=()
            )
    return written, split, whole


def stacks_in(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, list[Piece]]:
    """Return the stacks of a model that packed layers are the pieces of."""
    prefix: str = getattr(model, "base_model_prefix", "")
    found: dict[str, list[Piece]] = {}
    for name, stack in split_stacks(model, {}).items():
        for named in (str, lambda n: n.removeprefix(f"{prefix}."), lambda n: join(prefix, n)):
            pieces = [piece._replace(name=named(piece.name)) for piece in stack.pieces]
            if name not in layers and all(piece.name in layers for piece in pieces):
                found.setdefault(name, pieces)
    return found


def _is_uniform(name: str, layers: Mapping[str, PackedLayer], model: nn.Module) -> bool:
    path = name.rpartition(".")[0]
    adapter = adapter_of(model.get_submodule(path))
    others = [layers.get(join(path, each)) for each in (adapter.names if adapter else ())]
    return len({each and each.scheme for each in others}) == 1


def is_left_over(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is of a module that a model has, or like a buffer that it has."""
    owner, _, last = name.rpartition(".")
    like = f"{owner.rpartition('.')[2]}.{last}"
    buffers = (each for each, _ in model.named_buffers())
    is_module = any(owner == each for each, _ in model.named_modules(remove_duplicate=False))
    return is_module or any(f".{each}".endswith(f".{like}") for each in buffers)


def require_made_by_config(
    root: nn.Module, layers: Mapping[str, PackedLayer], tensors: Mapping[str, Any]
) -> None:
    """Raise CheckpointError for a model of transformers that its config does not make."""
    # Modules that a user has added are no such edit, but for further layers in a list of layers.
    made = None if has_adapters(root) else _made(root)
    if made is None:
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    modules = dict(root.named_modules(remove_duplicate=False))
    packed = {modules[name]: layer for name, layer in layers.items()}
    names = all_names(root, packed)
    buffers = {join(name, part) for name in names for part in BUFFERS}
    own = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name not in buffers and isinstance(tensor, Tensor)
    }
    own |= {mixtures.weight_name(n, modules[n]): packed[modules[n]].dense_shape for n in names}
    problems = [
        f"{name} {shape} is {own.get(name, 'not in the model')}"
        for name, shape in wanted.items()
        if own.get(name) != shape
    ]
    # A layer like those of its list, which is longer than the config says.
    alike = {without_numbers(name) for name in wanted}
    beyond = (name for name in own if name not in wanted and without_numbers(name) in alike)
    problems += [f"{name} is beyond it" for name in beyond]
    problems += [
        f"{target} is not {source}, to which it is tied"
        for target, source in compat.tied_weights(made).items()
        if _differ(tensors.get(target), tensors.get(source))
    ]
    if problems:
        raise CheckpointError(
            f"{type(root).__name__}: expected a model that its config makes, got another, which no "
            f"library would load: {some(problems)}. Set the fields of model.config, or save with "
            "layout='fp4pass' for fp4pass.load(dir, model=model) of a model that is edited alike."
        )


def _made(root: nn.Module) -> nn.Module | None:
    if not is_transformers(root) or not hasattr(model_class(root), "_from_config"):
        return None
    try:
        return compat.meta_model(model_class(root), root.config)
    except compat.config_faults():
        # A class that cannot be made so; loading it is tried with memory for its buffers.
        return None


def _differ(*tensors: object) -> bool:
    """Return whether two dense tensors are known not to be equal; a packed one is not there."""
    # Only all processes together can compare tensors that are split over them.
    a, b = (each if type(each) in (Tensor, nn.Parameter) else None for each in tensors)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_meta or b.is_meta:
        return False
    return a.data_ptr() != b.data_ptr() and not torch.equal(a, b.to(a.device))


# The layout whose names the buffers have in memory.
_LAYOUT = "compressed-tensors"

# The `quant_method` of folders that diffusers writes.
IN_CONFIG = "fp4pass"


@dataclass(frozen=True, eq=False)
class SaveMethod:
    """A `save_pretrained` that checks a model before its class saves it."""

    root: Any
    reason: str  # why the model cannot be saved so, "" if it can

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's own method, which pipelines look at for its options."""
        return inspect.signature(type(self.root).save_pretrained.__get__(self.root))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model, or only its adapters, or raise an error for what others cannot load."""
        root, state, of_diffusers = self.root, get_state(self.root), is_diffusers(self.root)
        if state is not None and (of_diffusers or not compat.saves_adapters(root)):
            if self.reason:
                raise CheckpointError(
                    f"{self.reason} Save the model with fp4pass.save(model, dir) instead."
                )
            if of_diffusers and has_adapters(root):
                raise StateError(
                    "The model has adapters of PEFT around packed layers, and nothing reads a "
                    "folder of both. Save the adapters by model.save_lora_adapter(...), and the "
                    "packed model before they are put on."
                )
            if kwargs.get("use_flashpack"):
                raise OptionError(expected("use_flashpack", "False: it casts packed weights", True))
            layers = describe_layers(root, state)
            require_no_others(root, {root.get_submodule(name) for name in layers})
            if not of_diffusers:
                with asked_for():
                    tensors = root.state_dict()
                require_made_by_config(root, layers, tensors)
        return type(root).save_pretrained(root, *args, **kwargs)


@dataclass(frozen=True)
class DeclaredConfig:
    """The quantization_config that transformers writes when it saves a converted model itself."""

    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of it; in a folder, with what stock transformers needs beside."""
        model = None if torch.compiler.is_compiling() else compat.saving_model()
        # A forward that looks at its config is traced with it, and saves nothing.
        state = None if model is None else get_state(model)
        entries: Mapping[str, Any] = {}
        if model is not None and state is not None and not compat.saves_adapters(model):
            entries = of_stock(Facts(model, describe_layers(model, state), self.data))[1]
        return copy.deepcopy({**self.data, **entries})


def finish(
    root: nn.Module,
    recipe: Mapping[str, Any],
    rows: Sequence[Row],
    carried: Mapping[str, Path] | None = None,
) -> None:
    """Complete a converted or loaded model in place; nothing is known of it as it was before."""
    # recipe: options, rules and calibration as plain values. rows: of its report. carried: the file
    # of each tensor that a checkpoint of it has beyond the model.
    use_slow_paths(root)
    sharing = [module for module in root.modules() if quantizes_input(module)]
    share_inputs(root, sharing, parents(root))
    mixtures.finalize_stacks(root)
    compat.own_config(root)
    compat.untie(root)
    state = ConvertedState(recipe, Report(tuple(rows)), carried or {})
    set_state(root, state)
    enable_cache(root, recipe)
    _enable_save_pretrained(root, state)
    enable_dequantize(root)
    install_passes()


def _enable_save_pretrained(root: nn.Module, state: ModelState) -> None:
    """Let `save_pretrained` of a model write what others can load, or raise and name `save`."""
    if has_adapters(root):
        return
    if is_diffusers(root):
        _declare_in_config(root, state)
        return
    if not compat.is_pretrained(root):
        _enable_in_parts(root, state)
        return
    if not is_transformers(root) or not hasattr(root, "save_pretrained"):
        return
    layout, layers, refused = get_layout(_LAYOUT), describe_layers(root, state), ""
    try:
        require_static_scales(root, layers)
        require_equal_parts(layout, layers, [row.name for row in state.report.skipped])
        others = dict([*root.named_parameters(), *root.named_buffers()])
        packed = {join(name, part) for name in layers for part in BUFFERS}
        require_writable({name: each for name, each in others.items() if name not in packed})
    except CheckpointError as error:
        refused = str(error)
    ignore = ignored_names(root, state)
    reason = pretrained_problem(Facts(root, layers), ignore, refused)
    root.__dict__["save_pretrained"] = SaveMethod(root, reason)
    if reason:
        return
    config: Any = root.config
    cache = layout.cache.config(state.recipe.get(KV_CACHE), layout.name)
    # Engines look for the names on disk.
    disk = NamesOnDisk.of(root, [join(name, "weight") for name in ignore], {}, {}).layers
    ignore += [disk[name] for name in ignore if name in disk]
    config.quantization_config = DeclaredConfig(layout.config(layers, ignore) | cache)


def _enable_in_parts(root: nn.Module, state: ModelState) -> None:
    """Let models of libraries inside of another be saved, as of SentenceTransformer."""
    inside = ""
    for name, part in list(root.named_modules()):
        if not name or (inside and name.startswith(inside)):
            continue
        if not (compat.is_pretrained(part) or is_diffusers(part)):
            continue
        inside = f"{name}."
        rows = [row for row in state.report.rows if row.name.startswith(inside)]
        own = [dataclasses.replace(row, name=row.name.removeprefix(inside)) for row in rows]
        if any(row.config is not None for row in own):
            compat.own_config(part)
            part_state = ConvertedState(state.recipe, Report(tuple(own)))
            set_state(part, part_state)
            _enable_save_pretrained(part, part_state)
            enable_dequantize(part)


def _declare_in_config(root: nn.Module, state: ModelState) -> None:
    """Have the config of a model of diffusers describe what is packed; alone, as it writes it."""
    layers = describe_layers(root, state)
    odd = (name for name, layer in layers.items() if layer.is_stacked or layer.transposed)
    reason = "".join(
        f"{name}: the config has no place for stacks of experts and transposed weights."
        for name in [*odd][:1]
    )
    schemes: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        record = {"config": layer.config.to_dict(), "static_inputs": layer.static_inputs}
        key = json.dumps(record, sort_keys=True)
        schemes.setdefault(key, {**record, "layers": []})["layers"].append(name)
    skipped: dict[str, list[str]] = {}
    for row in state.report.skipped:
        skipped.setdefault(row.skip_reason, []).append(row.name)
    declared = {"quant_method": IN_CONFIG, "version": __version__, "schemes": [*schemes.values()]}
    declare(root, {**declared, "skipped": skipped, "recipe": dict(state.recipe)})
    root.__dict__["save_pretrained"] = SaveMethod(root, reason)


# Set while `fp4pass.save` reads the state dict of a model, whose `save_pretrained` may call it.
_ASKED: ContextVar[bool] = ContextVar("fp4pass_asked", default=False)


@contextmanager
def asked_for() -> Iterator[None]:
    """Give a state dict of packed layers, whoever calls."""
    before = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(before)


@contextmanager
def _look(layer: PackedLinear, destination: dict[str, Any], prefix: str) -> Iterator[None]:
    """Refuse savers that would not say what is packed; show pipelines with a LoRA a weight."""
    packed, name = layer.packed(), prefix.removesuffix(".")
    saving = None
    if packed:
        _refuse_foreign(layer, name)
        saving = compat.saving_model()
        if saving is not None and compat.saves_adapters(saving):
            saving = None
    if saving is not None and getattr(saving.config, "quantization_config", None) is None:
        raise part_error(name)
    yield
    if saving is not None and (
        layer.is_split or any(is_sharded(destination[prefix + each]) for each in packed)
    ):
        raise StateError(
            f"{name}: save_pretrained cannot write a layer that is split over processes. Call "
            "fp4pass.save(model, directory) in every process."
        )
    if (lora := loading_lora()) is not None:
        base = prefix.replace(".base_layer.", ".").removesuffix(".")
        down = lora.get(f"transformer.{base}.lora_A.weight")
        if down is not None and down.shape[1] > layer.in_features:
            raise ShapeError(
                f"{base}: expected a LoRA for {layer.in_features} input features, got one for "
                f"{down.shape[1]}, which widens the layer. Keep it dense when the model is "
                f"converted, by rules=[({base!r}, None)]."
            )
        # One number, of the shape and device of the dense weight.
        number = next(iter(packed.values())).new_zeros((), dtype=torch.float32)
        destination[f"{prefix}weight"] = number.expand(layer.out_features, layer.in_features)


def _refuse_foreign(layer: nn.Module, name: str) -> None:
    """Raise StateError where another library's `save_pretrained` leaves a layer undeclared."""
    # Models of transformers and diffusers that declare it may be asked for, also by a wrapper.
    owner = None if _ASKED.get() else compat.saving_owner()
    for part in owner.modules() if isinstance(owner, nn.Module) else ():
        is_known = compat.is_pretrained(part) or is_diffusers(part)
        config = getattr(part, "config", None) if is_known else None
        if getattr(config, "quantization_config", None) is not None and layer in part.modules():
            return
    if owner is not None:
        raise StateError(
            f"{name or 'The model'}: save_pretrained of {type(owner).__name__} would write its "
            "packed weight without a word of how it is packed. Save what was converted with "
            "fp4pass.save(model, dir), or keep its state_dict with torch.save."
        )


def part_error(name: str) -> StateError:
    """Return the error for saving a model if only a part of it is converted."""
    return StateError(
        f"A part of the model is converted ({name}), the model is not, so its config would not say "
        "what is packed. Save that part, or convert the whole float model, with "
        f"{as_option('rules')} for the layers to skip."
    )


AROUND_STATE.append(_look)
