"""Adapters to other libraries, which are imported when a name is first used.

`Fp4PassConfig` quantizes a model while transformers or diffusers loads it, `PackedConfig` keeps one
packed that is so already, `quantized_cache` gives one that was converted with `kv_cache` its cache,
and `python -m fp4pass.integrations.lm_eval` is lm-eval with packed folders. PEFT's own configs put
adapters on converted models.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from .._compat.diffusers import register_quantizer
from .._compat.peft_hooks import around_adapters
from .._compat.transformers_loading import choose_config
from ..nn.experts import QUANTIZED
from ..quantization.adapters import around_packed, refuse_merge
from .choosing import ASKED, KEPT_PACKED, METHOD, choose, diffusers_quantizer, read_described

if TYPE_CHECKING:
    from ..quantization.observers.kv_cache import quantized_cache
    from .packed_folders import PackedConfig
    from .transformers import Fp4PassConfig

__all__ = ["Fp4PassConfig", "PackedConfig", "quantized_cache"]

_MODULES = {
    "Fp4PassConfig": ".transformers",
    "PackedConfig": ".packed_folders",
    "quantized_cache": "..quantization.observers.kv_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)


@contextmanager
def _around(tuner: Any, model: nn.Module, adapter: str) -> Iterator[None]:
    """Put plain adapters of PEFT on converted layers; other models are left to it."""
    if not any(isinstance(module, QUANTIZED) for module in model.modules()):
        yield
        return
    # It imports PEFT, and refuses old versions.
    from .peft import fitted

    with fitted(tuner, model, adapter):
        yield


def _before_merge(tuner: Any) -> None:
    """Raise StateError, before anything is changed, where PEFT would merge into packed layers."""
    if around_packed(tuner.model):
        refuse_merge()


around_adapters(_around, _before_merge)
choose_config(KEPT_PACKED, ASKED, choose)
register_quantizer(METHOD, read_described, diffusers_quantizer)
