"""Describe the packed layers of a model in memory: how they are packed, and their names on disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .._compat.transformers import is_pretrained
from .._compat.transformers_experts import StackView
from .._compat.transformers_loading import names_on_disk
from ..core.fingerprint import dtype_name
from ..errors import CheckpointError, as_option
from ..nn.experts import QuantizedExpertStack, weight_name
from ..nn.linear import INPUT_GLOBAL, PACKED
from ..quantization.plan import Plan
from ..record.config import LinearConfig
from ..record.rows import Row
from ..record.schemes import scheme_name
from ..record.state import ModelState, has_adapters
from .beside import COPIED, NOT_COPIED
from .layouts import Layout, PackedLayer, below, fused_problems

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
            other = scheme_name(layer.fmt, weight_only=True)
            raise CheckpointError(
                f"{name}: its input gets a global scale at each call, which the {layer.fmt.key} "
                "layouts cannot express. Calibrate before convert (prepare, then run some "
                f"batches), or choose {as_option('fmt', other)} or 'mxfp4'."
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

        Args:
            root: the converted model; one that is not of transformers has one name for each.
            dense: the names of its dense tensors.
            packed: its packed layers that lie in a folder in one piece, by all their names.
            whole: names on disk of the stacks that lie there in pieces, and in one in a folder of
                the float model.
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
