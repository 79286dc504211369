"""Adapters to other libraries, which are imported when a name is first used.

`Fp4PassConfig` quantizes a model while transformers loads it, `lora_config` puts PEFT's adapters on
a converted model, `quantized_cache` gives one that was converted with `kv_cache` its cache, and
`python -m fp4pass.integrations.lm_eval` is lm-eval with packed folders.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..quantization.kv_cache import quantized_cache
    from .peft import lora_config
    from .transformers import Fp4PassConfig

__all__ = ["Fp4PassConfig", "lora_config", "quantized_cache"]

_MODULES = {
    "Fp4PassConfig": ".transformers",
    "lora_config": ".peft",
    "quantized_cache": "..quantization.kv_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
