"""What prepare, convert or load did to a model, kept on its root module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..config import LinearConfig, Rule
from ..errors import OptionError, expected

if TYPE_CHECKING:
    from .layer_inputs import Recording
    from .report import Report

_STATE = "_fp4pass_state"


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
    """

    status: str
    recipe: Mapping[str, Any]
    report: Report
    config: LinearConfig | None = None
    rules: tuple[Rule, ...] = ()
    needs: tuple[str, ...] = ()
    recording: Recording | None = None


def set_state(model: nn.Module, state: ModelState) -> None:
    """Remember what was done to a model."""
    model.__dict__[_STATE] = state


def get_state(model: nn.Module) -> ModelState | None:
    """Return what was done to a model, None for an untouched one. Looks through torch.compile."""
    return unwrap(model).__dict__.get(_STATE)


def forget_state(model: nn.Module) -> None:
    """Forget what was done to a model, and that parts of it were prepared."""
    for module in model.modules():
        state = module.__dict__.get(_STATE)
        if state is not None and (module is model or state.status == "prepared"):
            if state.recording is not None:
                state.recording.remove()
            del module.__dict__[_STATE]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, also when it is wrapped by torch.compile.

    Raises:
        OptionError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(expected("model", "a torch.nn.Module", type(model).__name__))
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original
