"""Adapters to other libraries, which are imported when a name is first used.

`Fp4PassConfig` quantizes a model while transformers loads it, `PackedConfig` keeps one packed that
is so already, `quantized_cache` gives one that was converted with `kv_cache` its cache, and
`python -m fp4pass.integrations.lm_eval` is lm-eval with packed folders. PEFT's own configs put
adapters on converted models.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from .._compat.peft_hooks import around_adapters
from .._compat.transformers_quantizers import choose_config
from ..experts import QUANTIZED

if TYPE_CHECKING:
    from ..observers.kv_cache import quantized_cache
    from .packed_folders import PackedConfig
    from .transformers import Fp4PassConfig

__all__ = ["Fp4PassConfig", "PackedConfig", "quantized_cache"]

_MODULES = {
    "Fp4PassConfig": ".transformers",
    "PackedConfig": ".packed_folders",
    "quantized_cache": "..observers.kv_cache",
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
    # It imports PEFT, and refuses versions that were not tested.
    from .peft import fitted

    with fitted(tuner, model, adapter):
        yield


def _merge(tuner: Any, adapters: Sequence[str] | None) -> nn.Module | None:
    """Merge adapters on packed layers for PEFT's `merge_and_unload`; others are left to it."""
    if not any(isinstance(module, QUANTIZED) for module in tuner.model.modules()):
        return None
    from .peft import merge_and_unload

    return merge_and_unload(tuner, adapters)


around_adapters(_around, _merge)


# Those that transformers reads with no library, or with one that fp4pass is not in need of.
_KEPT_PACKED = ("modelopt", "quark")


def _choose(declared: Mapping[str, Any], given: Any) -> Any:
    """Return the config of a folder that stays packed, None for one that transformers reads."""
    if given is None and declared.get("quant_method") == "quark":
        # Quark has formats of its own library.
        from ..checkpoint.layouts.quark import is_read

        if not is_read(declared):
            return None
    elif given is not None and type(given).__name__ != "PackedConfig":
        return None
    # It imports transformers, and refuses versions that were not tested.
    from .packed_folders import PackedConfig

    return PackedConfig.from_dict(declared)


choose_config(_KEPT_PACKED, _choose)
