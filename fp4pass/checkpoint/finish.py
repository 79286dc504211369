"""Complete a model whose linear layers are packed: its state, saving, compiling."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.diffusers import declare, is_diffusers
from .._compat.transformers import is_pretrained, own_config, saves_adapters, saving_model, untie
from .._version import __version__
from ..errors import CheckpointError, OptionError, StateError, expected
from ..graph.inductor import install_passes
from ..nn.experts import finalize_stacks
from ..nn.kv_cache import KV_CACHE
from ..quantization.adapters import parents
from ..quantization.observers.kv_cache import enable_cache
from ..quantization.replace import quantizes_input, share_inputs, use_slow_paths
from ..quantization.restore import enable_dequantize
from ..record.rows import Report, Row
from ..record.state import ModelState, forget_state, get_state, has_adapters, set_state
from .copied_files import beyond_model
from .finished import ConvertedState, LayerFile
from .layouts import BUFFERS, get_layout, join
from .model_layers import (
    NamesOnDisk,
    describe_layers,
    ignored_names,
    is_transformers,
    require_equal_parts,
    require_no_others,
    require_static_scales,
)
from .readers import SAVE_PRETRAINED, Facts, of_stock, problem
from .savers import asked_for
from .skeleton import require_made_by_config
from .source_files import require_writable

# The layout whose names the buffers have in memory.
_LAYOUT = "compressed-tensors"

# The `quant_method` of folders that diffusers writes.
IN_CONFIG = "fp4pass"


@dataclass(frozen=True, eq=False)
class SaveMethod:
    """A `save_pretrained` that checks a model before its class saves it.

    Attributes:
        root: the model.
        check: called with the model, `reason` and the options of the call.
        reason: why the model cannot be saved so, "" if it can.
    """

    root: Any
    check: Callable[..., None]
    reason: str

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's own method, which pipelines look at for its options."""
        return inspect.signature(type(self.root).save_pretrained.__get__(self.root))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the model and save it."""
        self.check(self.root, self.reason, **kwargs)
        return type(self.root).save_pretrained(self.root, *args, **kwargs)


@dataclass(frozen=True)
class DeclaredConfig:
    """The quantization_config that transformers writes when it saves a converted model itself."""

    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of it; in a folder, with what stock transformers needs beside."""
        # A forward that looks at its config is traced with it, and saves nothing.
        if torch.compiler.is_compiling():
            return copy.deepcopy(dict(self.data))
        model = saving_model()
        state = None if model is None else get_state(model)
        if model is None or state is None or saves_adapters(model):
            return copy.deepcopy(dict(self.data))
        facts = Facts(model, describe_layers(model, state), self.data)
        return copy.deepcopy({**self.data, **of_stock(facts)[1]})


def finish(
    root: nn.Module,
    recipe: Mapping[str, Any],
    rows: Sequence[Row],
    files: Sequence[LayerFile] = (),
    carried: Mapping[str, Path] | None = None,
) -> None:
    """Complete a converted or loaded model in place.

    Args:
        root: the model.
        recipe: the options, rules and calibration as plain values.
        rows: those of its report.
        files: from which it maps packed layers.
        carried: the file of each tensor that a checkpoint of it has beyond the model; by default
            those of the folder that it was read from, which get rows.
    """
    if carried is None:
        carried, beyond = beyond_model(root)
        rows = [*rows, *beyond]
    use_slow_paths(root)
    sharing = [module for module in root.modules() if quantizes_input(module)]
    share_inputs(root, sharing, parents(root))
    finalize_stacks(root)
    own_config(root)
    untie(root)
    state = ConvertedState(recipe, Report(tuple(rows)), tuple(files), carried)
    forget_state(root)
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
    if not is_pretrained(root):
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
    facts = Facts(root, layers, ignore=ignore, refused=refused)
    reason = problem(SAVE_PRETRAINED, facts)
    root.__dict__["save_pretrained"] = SaveMethod(root, _check, reason)
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
        if not (is_pretrained(part) or is_diffusers(part)):
            continue
        inside = f"{name}."
        rows = [row for row in state.report.rows if row.name.startswith(inside)]
        own = [dataclasses.replace(row, name=row.name.removeprefix(inside)) for row in rows]
        if any(row.config is not None for row in own):
            own_config(part)
            part_state = ConvertedState(state.recipe, Report(tuple(own)))
            set_state(part, part_state)
            _enable_save_pretrained(part, part_state)
            enable_dequantize(part)


def _check(root: Any, reason: str, **options: Any) -> None:
    """Raise CheckpointError for what others cannot load.

    Of a model that transformers has put adapters on `save_pretrained` writes these alone.
    """
    state = get_state(root)
    if state is None or saves_adapters(root):
        return
    if reason:
        raise CheckpointError(f"{reason} Save the model with fp4pass.save(model, dir) instead.")
    layers = describe_layers(root, state)
    require_no_others(root, {root.get_submodule(name) for name in layers})
    with asked_for():
        tensors = root.state_dict()
    require_made_by_config(root, layers, tensors)


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
    root.__dict__["save_pretrained"] = SaveMethod(root, _check_in_config, reason)


def _check_in_config(
    root: Any, reason: str, *, use_flashpack: bool = False, **options: Any
) -> None:
    """Raise an error unless `save_pretrained` of a model of diffusers can write it."""
    state = get_state(root)
    if state is None:
        return
    if reason:
        raise CheckpointError(f"{reason} Save the model with fp4pass.save(model, dir) instead.")
    if has_adapters(root):
        raise StateError(
            "The model has adapters of PEFT around packed layers, and nothing reads a folder of "
            "both. Save the adapters by model.save_lora_adapter(...), and the packed model before "
            "they are put on."
        )
    if use_flashpack:
        raise OptionError(expected("use_flashpack", "False: it casts packed weights", True))
    layers = describe_layers(root, state)
    require_no_others(root, {root.get_submodule(name) for name in layers})
