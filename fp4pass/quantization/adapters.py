"""Adapters of PEFT in a model: they stay as they are, and cannot be merged into packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import StateError
from ..linear import QuantizedLinear
from ..state import has_adapters


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that belong to adapters, and not to the model below them."""
    if not has_adapters(model):
        return set()
    from .._compat.peft import adapter_modules

    return adapter_modules(model)


def parents(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives the path of a module's parent: below no adapter, as without."""
    inner = inner_modules(model)
    around = {path for path, module in model.named_modules() if module in inner}

    def parent(name: str) -> str:
        path = name.rpartition(".")[0]
        while path in around:
            path = path.rpartition(".")[0]
        return path

    return parent


def inner_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return what each adapter of a model is put around."""
    if not has_adapters(model):
        return {}
    from .._compat.peft import wrapped

    found = {module: wrapped(module) for module in model.modules()}
    return {module: inner for module, inner in found.items() if inner is not None}


def changed_parameters(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return the names of the parameters that adapters replace while they run, by module."""
    if not has_adapters(model):
        return {}
    from .._compat.peft import changed_parameters

    return changed_parameters(model)


def keep_apart(model: nn.Module) -> None:
    """Have the adapters of a converted model refuse to be merged into packed layers."""
    if has_adapters(model):
        from .._compat.peft import refuse_merging

        refuse_merging(model, lambda layer: isinstance(layer, QuantizedLinear), refuse_merge)


def let_merge(model: nn.Module) -> None:
    """Have the adapters of a model whose layers are dense again merge as PEFT's own do."""
    if has_adapters(model):
        from .._compat.peft import let_merge

        let_merge(model, refuse_merge)


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Raise StateError: a packed weight cannot take an adapter in, nor give one back."""
    raise StateError(
        "An adapter cannot be merged into a packed weight: the sum would have to be rounded to "
        "4 bits again. Keep it beside the model (model.save_pretrained), merge it into the float "
        "model and convert that, or call fp4pass.dequantize(model) and merge into dense weights."
    )
