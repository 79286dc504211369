"""Adapters of PEFT in a model: they stay as they are until `fp4pass.merge` takes them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import StateError
from ..nn.linear import QuantizedLinear
from ..record.state import has_adapters


def peft_of(model: nn.Module) -> Any:
    """Return the module `_compat.peft`, None for a model without adapters."""
    if not has_adapters(model):
        return None
    from .._compat import peft

    return peft


def parents(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the path of a module to that of its parent, adapters aside."""
    peft = peft_of(model)
    named = model.named_modules() if peft else ()
    around = {path for path, module in named if peft.wrapped(module) is not None}

    def parent(name: str) -> str:
        path = name.rpartition(".")[0]
        while path in around:
            path = path.rpartition(".")[0]
        return path

    return parent


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that PEFT has put adapters into, which may be the one that is given."""
    peft = peft_of(model)
    return peft.base_of(model) if peft else model


def around_packed(model: nn.Module) -> dict[nn.Module, Any]:
    """Return what PEFT has put around each packed layer that has adapters, by the layer."""
    peft = peft_of(model)
    return peft.around_packed(model, _is_packed) if peft else {}


def forbid_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a converted model refuse to be merged into packed layers one by one."""
    if peft := peft_of(model):
        peft.refuse_merging(model, _is_packed, refuse_merge)


def _is_packed(layer: object) -> bool:
    return isinstance(layer, QuantizedLinear)


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Raise StateError: a packed layer takes no adapter in by itself, nor gives one back."""
    raise StateError(
        "An adapter cannot be merged into one packed layer and taken out again: the sum is rounded "
        "to 4 bits, in scales that several layers share. Merge for good with fp4pass.merge(model), "
        "keep the adapter beside the model (model.save_pretrained), or call "
        "fp4pass.dequantize(model) and merge into dense weights."
    )
