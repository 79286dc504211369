"""Adapters of PEFT in a model: they stay as they are, and cannot be merged into packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import StateError
from ..linear import QuantizedLinear
from ..state import has_adapters


def _peft(model: nn.Module) -> Any:
    """Return the module that reaches PEFT, None for a model without adapters."""
    if not has_adapters(model):
        return None
    from .._compat import peft

    return peft


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that belong to adapters, and not to the model below them."""
    peft = _peft(model)
    return peft.adapter_modules(model) if peft else set()


def inner_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the module that each adapter of a model is put around."""
    peft = _peft(model)
    found = {module: peft.wrapped(module) for module in model.modules()} if peft else {}
    return {module: inner for module, inner in found.items() if inner is not None}


def changed_parameters(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return the names of the parameters that adapters replace while they run, by module."""
    peft = _peft(model)
    return peft.changed_parameters(model) if peft else {}


def parents(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the path of a module to that of its parent, adapters aside."""
    inner = inner_modules(model)
    around = {path for path, module in model.named_modules() if module in inner}

    def parent(name: str) -> str:
        path = name.rpartition(".")[0]
        while path in around:
            path = path.rpartition(".")[0]
        return path

    return parent


def forbid_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a converted model refuse to be merged into packed layers."""
    if peft := _peft(model):
        peft.refuse_merging(model, lambda layer: isinstance(layer, QuantizedLinear), refuse_merge)


def allow_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a model whose layers are dense again merge as PEFT's own do."""
    if peft := _peft(model):
        peft.let_merge(model, refuse_merge)


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Raise StateError: a packed weight cannot take an adapter in, nor give one back."""
    raise StateError(
        "An adapter cannot be merged into a packed weight: the sum would have to be rounded to "
        "4 bits again. Keep it beside the model (model.save_pretrained), merge it into the float "
        "model and convert that, or call fp4pass.dequantize(model) and merge into dense weights."
    )
