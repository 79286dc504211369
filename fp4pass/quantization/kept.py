"""Weights that a source in FP8 has packed already: a rule may keep them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..config import LinearConfig
from ..core.quant_state import QuantState

_KEPT = "_fp4pass_kept"

NOTE = "codes and scales are those of the source"


class KeptWeight(NamedTuple):
    """The codes and scales that the weight of a linear layer was made of.

    Attributes:
        fmt: the key of their format.
        read: returns them.
        input_scale: returns the one scale of inputs that lies beside, None without.
    """

    fmt: str
    read: Callable[[], QuantState]
    input_scale: Callable[[], float | None]


def keep_weight(module: nn.Module, kept: KeptWeight) -> None:
    """Remember what the weight of a linear layer was made of, as long as it is not changed."""
    weight = module._parameters["weight"]
    module.__dict__[_KEPT] = (kept, weight, None if weight is None else weight._version)


def kept_weight(module: nn.Module, config: LinearConfig) -> KeptWeight | None:
    """Return what a weight was made of where a config is of the same format, else None."""
    kept, weight, version = module.__dict__.get(_KEPT, (None, None, None))
    own = module._parameters.get("weight")
    if kept is None or own is None or own is not weight or own._version != version:
        return None
    is_same = config.format.key == kept.fmt and not config.is_rotated
    found: KeptWeight | None = kept if is_same else None
    return found


def forget_kept(module: nn.Module) -> None:
    """Forget what the weight of a layer was made of, once it is packed."""
    module.__dict__.pop(_KEPT, None)
