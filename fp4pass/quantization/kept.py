"""Weights that a source in FP8 has packed already: a rule may keep them as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..core.quant_state import QuantState
from ..nn.experts import ExpertStack
from ..record.config import LinearConfig

_KEPT = "_fp4pass_kept"

NOTE = "codes and scales are those of the source"


@dataclass(frozen=True)
class KeptWeight:
    """The codes and scales that the weight of a linear layer, or of stacked experts, is made of.

    Attributes:
        fmt: the key of their format, as the source has it.
        stored: the key of the format that holds them in a layer.
        read: returns them, for each matrix.
        input_scales: returns the scales of inputs that lie beside: one, one for each expert, or
            none.
        problem: why a layer cannot hold them, or "".
    """

    fmt: str
    stored: str
    read: Callable[[], Sequence[QuantState]]
    input_scales: Callable[[], tuple[float, ...]]
    problem: str = ""


class _Record(NamedTuple):
    """The codes that a weight was made of, and that weight: a layer may have another one later."""

    kept: KeptWeight
    weight: Any
    version: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        weight = copy.deepcopy(self.weight, memo)
        is_same = self.weight._version == self.version
        return _Record(self.kept, weight, weight._version if is_same else -1)


def keep_weight(holder: nn.Module, name: str, kept: KeptWeight) -> None:
    """Remember what a parameter was made of, as long as it is not changed."""
    weight = holder._parameters[name]
    assert weight is not None, "the folder has it"
    records = holder.__dict__.setdefault(_KEPT, {})
    records[name] = _Record(kept, weight, weight._version)


def kept_weight(module: nn.Module, config: LinearConfig) -> KeptWeight | None:
    """Return what a weight was made of where a config is of the same format, else None."""
    holder, name = _place(module)
    record, own = holder.__dict__.get(_KEPT, {}).get(name), holder._parameters.get(name)
    if record is None or own is not record.weight or own._version != record.version:
        return None
    is_same = config.format.key == record.kept.fmt and not config.is_rotated
    found: KeptWeight | None = record.kept if is_same else None
    return found


def forget_kept(module: nn.Module) -> None:
    """Forget what the weight of a layer was made of, once it is packed."""
    holder, name = _place(module)
    holder.__dict__.get(_KEPT, {}).pop(name, None)


def _place(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that has the weight of a layer or a stack, and its name there."""
    if isinstance(module, ExpertStack):
        return module.holder, module.last
    return module, "weight"
