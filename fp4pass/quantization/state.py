"""What prepare, convert or load did to a model, kept on its root module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from .._compat.torch import call_no_copies, call_with_copies
from ..config import LinearConfig, Rule
from ..errors import OptionError, StateError, expected
from .adapters import has_adapters

if TYPE_CHECKING:
    from .layer_inputs import Recording
    from .report import Report

_STATE = "_fp4pass_state"

# The tokenizer or processor that a model was calibrated with.
_TOKENIZER = "_fp4pass_tokenizer"

# Of a model whose weights are being packed, or were when that was cut off.
_CUT = "_fp4pass_interrupted"

_INTERRUPTED = (
    "The model is interrupted: a call of convert was cut off when some of its weights were packed, "
    "so it is neither the float model nor a converted one. Start again from the float model; "
    "convert(..., resume=FOLDER) keeps the searches that are finished."
)


@dataclass(frozen=True)
class LayerFile:
    """A file of packed tensors from which a model maps them.

    Attributes:
        path: of the file, which has each tensor under its name in the state dict.
        tensors: by their names, as they were mapped.
        versions: of these, which tell whether they were written to since.
        sums: their fingerprints.
        stamp: what tells whether the file is still the same.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    versions: Mapping[str, int]
    sums: Mapping[str, Any]
    stamp: tuple[int, ...]

    @staticmethod
    def of(path: Path, tensors: Mapping[str, Tensor], sums: Mapping[str, Any]) -> LayerFile:
        """Return the record of a file that was just mapped."""
        versions = {name: tensor._version for name, tensor in tensors.items()}
        return LayerFile(path, tensors, versions, sums, _stamp(path))

    def holds(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Return whether the file has just these tensors, and they are what was mapped."""
        return (
            tensors.keys() == self.tensors.keys()
            and all(tensors[name] is tensor for name, tensor in self.tensors.items())
            and all(each._version == self.versions[name] for name, each in self.tensors.items())
            and self.path.is_file()
            and _stamp(self.path) == self.stamp
        )


def _stamp(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class ModelState:
    """What was done to a model.

    Attributes:
        status: "prepared" or "converted".
        recipe: the options, rules and calibration as plain values; what fp4pass.json stores.
        report: a row for each linear layer.
        config: what `prepare` was told, the default of `convert`.
        rules: the rules that `prepare` was given.
        needs: the statistics that the observers collect.
        recording: what the layers were called with, for `prepare(sequential=True)`.
        read: the layers whose weights `calibrate` saw read.
        calibrated: the tokens that `calibrate` had seen, the most of any layer.
        files: those that packed layers are mapped from.
        carried: the file of each tensor that a checkpoint has beyond the model.
    """

    status: str
    recipe: Mapping[str, Any]
    report: Report
    config: LinearConfig | None = None
    rules: tuple[Rule, ...] = ()
    needs: tuple[str, ...] = ()
    recording: Recording | None = None
    read: frozenset[str] = frozenset()
    calibrated: int = 0
    files: tuple[LayerFile, ...] = ()
    carried: Mapping[str, Path] = field(default_factory=dict)


def config_of(given: Mapping[str, Any], before: ModelState | None) -> LinearConfig:
    """Return the config of options as far as they are given; `prepare` set the default."""
    given = {name: value for name, value in given.items() if value is not None}
    if before is None or before.config is None:
        return LinearConfig(**given)
    return before.config.override(given)


def set_state(model: nn.Module, state: ModelState) -> None:
    """Remember what was done to a model."""
    model.__dict__[_STATE] = state


def get_state(model: nn.Module) -> ModelState | None:
    """Return what was done to a model, None for an untouched one. Looks through torch.compile.

    Raises StateError if a conversion of it, or of a part of it, was cut off.
    """
    root = unwrap(model)
    if is_interrupted(root):
        raise StateError(_INTERRUPTED)
    return root.__dict__.get(_STATE)


def remember_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Remember the tokenizer or processor of a model, which `save` writes; None changes nothing.

    It stays with the model whatever is done to it, for a state does not.
    """
    if tokenizer is not None:
        unwrap(model).__dict__[_TOKENIZER] = tokenizer


def known_tokenizer(model: nn.Module) -> Any:
    """Return what `remember_tokenizer` was given, None without."""
    return unwrap(model).__dict__.get(_TOKENIZER)


def is_interrupted(root: nn.Module) -> bool:
    """Return whether a conversion of a model, or of a part of it, was cut off."""
    return any(_CUT in module.__dict__ for module in root.modules())


def set_interrupted(model: nn.Module) -> None:
    """Have everything refuse a model until `forget_state`: its first weight is about to go."""
    forget_state(model)
    model.__dict__[_CUT] = True
    if isinstance(model, fx.GraphModule):
        call_with_copies(model, set_interrupted)
    model.register_forward_pre_hook(_refuse, prepend=True)
    # A model with adapters saves these alone, and they are whole.
    if hasattr(model, "save_pretrained") and not has_adapters(model):
        model.__dict__["save_pretrained"] = _refuse


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise StateError(_INTERRUPTED)


def forget_state(model: nn.Module) -> None:
    """Forget what was done to a model, and that parts of it were prepared."""
    model.__dict__.pop(_CUT, None)
    call_no_copies(model, set_interrupted)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse:
            del model._forward_pre_hooks[key]
    if model.__dict__.get("save_pretrained") is _refuse:
        del model.__dict__["save_pretrained"]
    for module in model.modules():
        state = module.__dict__.get(_STATE)
        if state is not None and (module is model or state.status == "prepared"):
            if state.recording is not None:
                state.recording.remove()
            del module.__dict__[_STATE]


def unwrap(model: nn.Module, *others: object) -> nn.Module:
    """Return the model itself, also when it is wrapped by torch.compile.

    Args:
        model: what was given as the model.
        *others: what was given beside it, among which the model may be.

    Raises:
        OptionError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        hint = ""
        if any(isinstance(other, nn.Module) for other in others):
            hint = " Give the model as the first argument."
        elif isinstance(model, str | os.PathLike):
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
