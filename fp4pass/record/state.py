"""Record the work of prepare, convert and load on a model, on its root module; find its source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._compat.transformers import is_pretrained
from ..core.files import parse_json
from ..errors import OptionError, StateError, expected
from .config import LinearConfig, Rule
from .rows import Report

_STATE = "_fp4pass_state"

# The tokenizer or processor that a model was calibrated with.
_TOKENIZER = "_fp4pass_tokenizer"

# The key of fp4pass.json for the strength of `fp4pass.smooth`, and a live model's record of it.
SMOOTH = "smooth"
_SMOOTHED = "_fp4pass_smoothed"

# Of a model whose weights are being packed, or were when that was cut off.
_INTERRUPTED_FLAG = "_fp4pass_interrupted"

_INTERRUPTED = (
    "The model is interrupted: a call of convert was cut off when some of its weights were packed, "
    "so it is neither the float model nor a converted one. Start again from the float model; "
    "convert(..., resume=FOLDER) keeps the searches that are finished."
)


@dataclass(frozen=True)
class ModelState:
    """The record of a model, as its user sees it."""

    status: ClassVar[str] = "converted"

    recipe: Mapping[str, Any]  # options, rules and calibration as plain values, as in fp4pass.json
    report: Report


@dataclass(frozen=True)
class PreparedState(ModelState):
    """The record of a prepared model: the options of `prepare`, and the facts of calibration."""

    status: ClassVar[str] = "prepared"

    config: LinearConfig  # the default of `convert`
    rules: tuple[Rule, ...]
    needs: tuple[str, ...]  # the statistics that the observers collect
    recording: Any = None  # the `Recording` of calls of layers, for `prepare(sequential=True)`


def config_of(given: Mapping[str, Any], before: PreparedState | None) -> LinearConfig:
    """Return the config of options as far as they are given; `prepare` set the default."""
    given = {name: value for name, value in given.items() if value is not None}
    return (LinearConfig() if before is None else before.config).override(given)


def set_state(model: nn.Module, state: ModelState) -> None:
    """Set the record of a model."""
    model.__dict__[_STATE] = state


def get_state(model: nn.Module) -> ModelState | None:
    """Return the record of a model, None without. Raises StateError if a conversion was cut off."""
    root = unwrap(model)
    if is_interrupted(root):
        raise StateError(_INTERRUPTED)
    return root.__dict__.get(_STATE)


def remember_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Remember the tokenizer or processor of a model, which `save` writes; None changes nothing."""
    if tokenizer is not None:
        unwrap(model).__dict__[_TOKENIZER] = tokenizer


def known_tokenizer(model: nn.Module) -> Any:
    """Return the tokenizer of `remember_tokenizer`, None without."""
    return unwrap(model).__dict__.get(_TOKENIZER)


def remember_smoothing(root: nn.Module, strength: float | None) -> None:
    """Remember that scales were folded into a live model, which has no state yet; None forgets."""
    root.__dict__[_SMOOTHED] = {} if strength is None else {SMOOTH: strength}


def smoothing_of(root: nn.Module) -> dict[str, float]:
    """Return what the recipe of a live model says of `remember_smoothing`."""
    return root.__dict__.get(_SMOOTHED, {})


def is_interrupted(root: nn.Module) -> bool:
    """Return whether a conversion of a model, or of a part of it, was cut off."""
    return any(_INTERRUPTED_FLAG in module.__dict__ for module in root.modules())


def set_interrupted(model: nn.Module) -> None:
    """Have all calls here refuse a model until `forget_state`: its first weight is about to go."""
    forget_state(model)
    model.__dict__[_INTERRUPTED_FLAG] = True
    # A model with adapters saves these alone, and they are whole.
    if hasattr(model, "save_pretrained") and not has_adapters(model):
        model.__dict__["save_pretrained"] = _refuse


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise StateError(_INTERRUPTED)


def forget_state(model: nn.Module) -> None:
    """Remove the record of a model, and those of parts that were prepared."""
    model.__dict__.pop(_INTERRUPTED_FLAG, None)
    if model.__dict__.get("save_pretrained") is _refuse:
        del model.__dict__["save_pretrained"]
    for module in model.modules():
        state = module.__dict__.get(_STATE)
        if isinstance(state, PreparedState) and state.recording is not None:
            state.recording.remove()
        if isinstance(state, PreparedState) or (module is model and state is not None):
            del module.__dict__[_STATE]


def has_adapters(model: nn.Module) -> bool:
    """Return whether there are modules of PEFT in a model; PEFT is not imported to look."""
    return any(
        cls.__module__.startswith("peft.")
        for kind in {type(module) for module in model.modules()}
        for cls in kind.__mro__
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, also when it is wrapped by torch.compile. Raises OptionError."""
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, str | os.PathLike):
            hint = (
                " Load the model first: with from_pretrained of transformers, or fp4pass.load if "
                "it is packed. To quantize a folder on the disk, call "
                "fp4pass.quantize_checkpoint(source, directory)."
            )
        raise OptionError(expected("model", "a torch.nn.Module", type(model).__name__) + hint)
    original: nn.Module = getattr(model, "_orig_mod", model)
    if isinstance(original, DistributedDataParallel | nn.DataParallel):
        kind = type(original).__name__
        raise OptionError(
            f"model: a {kind} gives its layers other names. Give the model inside, model.module."
        )
    return original


def report(model: nn.Module) -> Report:
    """Return the report of a prepared or converted model.

    Raises:
        StateError: fp4pass has not touched the model.

    Example:
        >>> model = fp4pass.convert(model, method="sse", rules=[("2", None)])
        >>> [(row.name, row.skip_reason) for row in fp4pass.report(model).skipped]
        [('2', "rule ('2', None)")]
    """
    state = get_state(model)
    if state is None:
        raise StateError(
            "The model was neither prepared nor converted. Call fp4pass.convert(model) first."
        )
    return state.report


WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def source_folder(model: nn.Module) -> Path | None:
    """Return the folder, or that in the cache, of a model of transformers; None for others."""
    if not is_pretrained(model):
        return None
    root: Any = model
    config = root.config
    return named_folder(str(root.name_or_path or ""), getattr(config, "_commit_hash", None))


def named_folder(name: str, revision: str | None = None) -> Path | None:
    """Return a folder, or that of a hub id in the cache; None where there is none."""
    if not name or os.path.isdir(name):
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        # A folder that is gone.
        return None
    return Path(found).parent if isinstance(found, str) else None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that from_pretrained finds in a folder, {} if it cannot."""
    try:
        for weights in WEIGHTS:
            if (folder / weights).is_file():
                return dict.fromkeys(_shapes(folder / weights), folder / weights)
            index = folder / f"{weights}.index.json"
            if index.is_file():
                listed = parse_json(index.read_text("utf-8"))["weight_map"]
                # Indices can list what is not there, and not what is.
                files = {folder / file for file in listed.values()}
                return {name: path for path in sorted(files) for name in _shapes(path)}
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError, RuntimeError):
        pass
    return {}


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, each in its file."""
    held = {path: _shapes(path) for path in sorted(set(files.values()))}
    return {name: tuple(held[path][name]) for name, path in files.items()}


def _shapes(path: Path) -> dict[str, Sequence[int]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}
    held = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {name: each.shape for name, each in held.items()}
