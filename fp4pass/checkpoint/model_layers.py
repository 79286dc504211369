"""Describe the packed layers of a model in memory: how they are packed, and their names on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .._compat.torch import model_class
from .._compat.transformers import is_pretrained
from .._compat.transformers_experts import StackView, adapter_of, parts_of
from .._compat.transformers_loading import names_on_disk, tensors_on_disk
from ..core.fingerprint import dtype_name
from ..errors import CheckpointError, as_option
from ..nn.experts import (
    ExpertStack,
    QuantizedExperts,
    QuantizedExpertStack,
    packed_stacks,
    stacks_of,
    weight_name,
)
from ..nn.linear import INPUT_GLOBAL, PACKED
from ..quantization.plan import Plan
from ..record.config import LinearConfig
from ..record.rows import Row
from ..record.state import ModelState, has_adapters
from .copied_files import COPIED, NOT_COPIED
from .layouts import Layout, PackedLayer, Piece, below, fused_problems, has_whole_tiles, join

# The end of the name of a layer's weight.
_WEIGHT = ".weight"


def is_transformers(root: nn.Module) -> bool:
    """Return whether a model is one of transformers, or one that PEFT has wrapped."""
    # Others have a config, too, that of a part of theirs.
    is_one = is_pretrained(root) or has_adapters(root)
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
            static_inputs=has_static_inputs(module, row.config),
        )
    return layers


def has_static_inputs(module: nn.Module, config: LinearConfig) -> bool:
    """Return whether inputs of a layer in FP8 have the one scale that it stores."""
    is_stored = module._buffers.get(INPUT_GLOBAL) is not None
    return is_stored and not config.weight_only and not config.format.has_global_scale


def stored_shape(view: StackView | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return what `PackedLayer` says of the parameter that has a stack, () if there is none."""
    if view is None or (len(view.shape) == len(shape) and not view.spare):
        return ()
    return view.shape


def whole_record(piece: PackedLayer, stack: ExpertStack) -> PackedLayer:
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
    """Return the names and patterns of skipped layers, as other libraries match them.

    A stacked parameter of experts is a pattern, for there others make a linear of each expert.
    Other parameters need none: nobody looks for a linear there, and a pattern of what is below
    their module would cover packed layers.
    """
    found: dict[str, None] = {}
    for row in rows:
        path, _, last = row.name.rpartition(".")
        if row.skip_reason.endswith(NOT_COPIED) or len(row.shape) == 1:
            continue
        # One matrix with a dimension of 1 before it is a table of positions.
        is_stack = len(row.shape) == 3 and row.shape[0] > 1
        if is_module(row.name):
            found[row.name] = None
        elif last == "weight":
            found[path] = None
        elif path and is_stack and not any(name.startswith(f"{path}.") for name in packed):
            found[below(path)] = None
    return list(found)


def require_static_scales(root: nn.Module, layers: Mapping[str, PackedLayer]) -> None:
    """Raise CheckpointError for inputs that need a global scale and have no stored one."""
    for name, layer in layers.items():
        dynamic = root.get_submodule(name)._buffers.get(INPUT_GLOBAL) is None
        if layer.fmt.has_global_scale and not layer.config.weight_only and dynamic:
            raise CheckpointError(
                f"{name}: its input gets a global scale at each call, which the {layer.fmt.key} "
                "layouts cannot express. Calibrate before convert (prepare, then run some "
                f"batches), or choose {as_option('fmt', f'{layer.fmt.name}a16')} or 'mxfp4'."
            )


def require_equal_parts(
    layout: Layout, layers: Mapping[str, PackedLayer], dense: Collection[str]
) -> None:
    """Raise CheckpointError for a layout of engines if layers that these fuse differ."""
    for parent, problem in fused_problems(layers, dense) if layout.engines else ():
        raise CheckpointError(
            f"{parent}: {problem}. Serving engines multiply by these as by one matrix. Give them "
            f"one scheme by {as_option('rules')}, or save with {as_option('layout', 'fp4pass')}, "
            "which only fp4pass reads."
        )


def split_note(root: nn.Module, plan: Plan) -> str:
    """Return that a plan gives layers that engines fuse several schemes, "" if it does not.

    `save` refuses them in the layouts of engines.
    """
    if not is_transformers(root):
        return ""
    layers = {
        layer.name: PackedLayer(layer.config, "float32", False, layer.shape)
        for layer in plan.layers
    }
    found = dict(fused_problems(layers, [layer.name for layer in plan.skipped]))
    return "".join(
        f"{parent}: {problem}{f' ({len(found)} modules are so)' if len(found) > 1 else ''}. "
        "Serving engines multiply by these as by one matrix, so that save will refuse them in the "
        f"layouts of engines; give them one scheme by {as_option('rules')}."
        for parent, problem in list(found.items())[:1]
    )


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
    """Names on disk by those in a model, of what has another one there.

    Attributes:
        tensors: of dense tensors.
        layers: of layers, packed and dense.
        stacks: of stacks, as a folder of the float model has them.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        root: nn.Module,
        dense: Iterable[str],
        packed: Mapping[str, nn.Module],
        whole: Mapping[str, str],
    ) -> NamesOnDisk:
        """Return the names on disk of what `save_pretrained` of a float model would rename.

        `packed` are layers that lie in a folder in one piece, by all their names; `whole` the names
        on disk of stacks that lie there in pieces, and in one in a folder of the float model.
        """
        if not is_transformers(root):
            return cls()
        weights = {weight_name(name, module): module for name, module in packed.items()}
        # Each once, in the order of the model.
        names = names_on_disk(root, dict.fromkeys([*dense, *weights]))
        found = {name: disk for name, disk in names.items() if disk != name}
        stacks = {
            name: disk
            for name, disk in found.items()
            if isinstance(weights.get(name), QuantizedExpertStack)
        }
        layers = {
            name.removesuffix(_WEIGHT): disk.removesuffix(_WEIGHT)
            for name, disk in found.items()
            if name not in stacks and name.endswith(_WEIGHT) and disk.endswith(_WEIGHT)
        }
        tensors = {name: disk for name, disk in found.items() if name not in weights}
        return cls(tensors, layers, {**stacks, **whole})

    @property
    def in_model(self) -> dict[str, str]:
        """The names in the model of tensors and of the weights of layers, by those on disk."""
        weights = {name + _WEIGHT: disk + _WEIGHT for name, disk in self.layers.items()}
        found = {**weights, **self.tensors, **self.stacks}
        return {disk: name for name, disk in found.items() if disk != name}


# Stacks of experts whose layers lie on disk one by one.


@dataclass(frozen=True)
class SplitStack:
    """A stack [E, N, K] that lies in a folder in layers.

    Attributes:
        pieces: the layers.
        whole: the name of the stack in folders of the float model that have it in one tensor, "" if
            they have these layers, too.
    """

    pieces: list[Piece]
    whole: str = ""


def split_stacks(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, SplitStack]:
    """Return the stacks of a model, packed or not, that lie in a folder in layers.

    layers: what is packed in the model, whole: a process may hold a part of it.
    """
    stacks = dict(_all_stacks(model, layers)) if is_transformers(model) else {}
    # The names of the halves of each expert: gate and up are apart. All at once, for some lie
    # among the experts of another stack.
    halves, owners = {}, list[tuple[str, int]]()
    for name, (experts, _) in stacks.items():
        first = len(owners)
        owners += [(name, half) for half in range(2 * experts)]
        halves[name] = torch.arange(first, len(owners)).view(experts, 2, 1)
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
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of every stack of a model, and how many experts and rows it has."""
    for path, owner in model.named_modules():
        packed = packed_stacks(owner) if isinstance(owner, QuantizedExperts) else {}
        for key in packed:
            experts, rows, _ = layers[join(path, key)].shape
            yield join(path, key), (experts, rows)
        for key, stack in stacks_of(owner).items():
            experts, rows, _ = stack.dense.shape
            yield join(path, key), (experts, rows)


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
    """Return the layers as they are on disk, the stacks that are taken apart, and why others not.

    A stack whose owner has another one that is dense or quantized otherwise stays in one piece:
    engines want one scheme for all products of an expert.
    """
    written: dict[str, PackedLayer] = {}
    split: dict[str, SplitStack] = {}
    whole: dict[str, str] = {}
    known = split_stacks(model, layers)
    for name, layer in layers.items():
        if not layer.is_stacked:
            written[name] = layer
            continue
        if name not in known:
            whole[name] = f"folders of {model_class(model).__name__} have them under other names"
        elif not has_whole_tiles(known[name].pieces, layer.fmt):
            size = known[name].pieces[0].stop - known[name].pieces[0].start
            whole[name] = f"gate and up of {size} rows share blocks of {layer.fmt.rows} rows"
        elif not _is_uniform(name, layers, model):
            whole[name] = "another stack of their layer is not packed alike"
        if name in whole:
            written[name] = layer
            continue
        split[name] = known[name]
        for piece in known[name].pieces:
            shape = (piece.stop - piece.start, layer.shape[2])
            written[piece.name] = dataclasses.replace(
                layer, shape=shape, transposed=False, stored_shape=()
            )
    return written, split, whole


def stacks_in(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, list[Piece]]:
    """Return the stacks of a model that packed layers are the pieces of, by their names on disk.

    Folders may lack the name of the base model before all others, or have it beyond the model's.
    """
    prefix: str = getattr(model, "base_model_prefix", "")
    found: dict[str, list[Piece]] = {}
    for name, stack in split_stacks(model, {}).items():
        for named in (str, lambda n: n.removeprefix(f"{prefix}."), lambda n: join(prefix, n)):
            pieces = [piece._replace(name=named(piece.name)) for piece in stack.pieces]
            if name not in layers and all(piece.name in layers for piece in pieces):
                found.setdefault(name, pieces)
    return found


def _is_uniform(name: str, layers: Mapping[str, PackedLayer], model: nn.Module) -> bool:
    """Return whether a stack is packed as the other stack of its owner."""
    path = name.rpartition(".")[0]
    adapter = adapter_of(model.get_submodule(path))
    others = [layers.get(join(path, each)) for each in (adapter.names if adapter else ())]
    return len({each and each.scheme for each in others}) == 1
