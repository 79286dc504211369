"""Adapters of PEFT in a model: they stay as they are until `fp4pass.merge` takes them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..errors import StateError
from ..nn.linear import QuantizedLinear
from ..record.state import has_adapters


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


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that PEFT has put adapters into, which may be the one that is given."""
    peft = _peft(model)
    return peft.base_of(model) if peft else model


def around_packed(model: nn.Module) -> dict[nn.Module, Any]:
    """Return what PEFT has put around each packed layer that has adapters, by the layer."""
    peft = _peft(model)
    return peft.around_packed(model, _is_packed) if peft else {}


def applied_adapters(around: nn.Module) -> list[str]:
    """Return the names of the adapters that a layer adds to its output at each call."""
    return _peft(around).applied_adapters(around)


def merge_problem(around: nn.Module) -> str:
    """Return why adapters of a layer are no change of its weight that can be added, or ""."""
    return _peft(around).merge_problem(around)


def lora_change(around: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return what adapters add to a weight, float32 [N, K], and to its bias, [N] or None."""
    return _peft(around).lora_change(around)


def silenced(model: nn.Module, arounds: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Leave the adapters of some layers of a model out of calls."""
    peft = _peft(model)
    return peft.silenced(arounds) if peft else nullcontext()


def unload(model: nn.Module, merged: Iterable[nn.Module]) -> nn.Module:
    """Take all adapters out of a model, in place, and return it without what PEFT is around it.

    merged: what PEFT has put around layers that have their adapters in their weight already.
    """
    return _peft(model).unload(model, merged)


def forbid_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a converted model refuse to be merged into packed layers one by one."""
    if peft := _peft(model):
        peft.refuse_merging(model, _is_packed, refuse_merge)


def allow_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a model whose layers are dense again merge as PEFT's own do."""
    if peft := _peft(model):
        peft.let_merge(model, refuse_merge)


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
