"""Adapters to other libraries, which are imported when a name is first used.

`Fp4PassConfig` quantizes a model while transformers or diffusers loads it, `PackedConfig` keeps one
packed that is so already, `quantized_cache` gives one that was converted with `kv_cache` its cache,
and `python -m fp4pass.integrations.lm_eval` is lm-eval with packed folders. PEFT's own configs put
adapters on converted models.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from .._compat.diffusers import register_quantizer
from .._compat.peft_hooks import around_adapters
from .._compat.transformers_loading import choose_config, loads_model
from ..checkpoint.layouts import CompressedTensors
from ..checkpoint.model_layers import IN_CONFIG
from ..nn.experts import QUANTIZED
from ..quantization.scan import around_packed, refuse_merge

if TYPE_CHECKING:
    from ..quantization.observers.kv_cache import quantized_cache
    from .transformers import Fp4PassConfig, PackedConfig

__all__ = ["Fp4PassConfig", "PackedConfig", "quantized_cache"]

_MODULES = {
    "Fp4PassConfig": ".transformers",
    "PackedConfig": ".transformers",
    "quantized_cache": "..quantization.observers.kv_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)


# Those that transformers reads with no library, or with one that fp4pass is not in need of.
_KEPT_PACKED = ("modelopt", "quark")

# Those that transformers reads, and that stay packed where sentence-transformers loads a model.
_ASKED = (CompressedTensors.name,)


class QuantMethod(str):
    """The `quant_method` of a config, which diffusers reads as a member of an enumeration."""

    @property
    def value(self) -> str:
        """The plain name."""
        return str(self)


# The method of `Fp4PassConfig`, and of the folders that diffusers writes.
METHOD = QuantMethod(IN_CONFIG)


def _choose(declared: Mapping[str, Any], given: Any) -> Any:
    """Return the config of a folder that stays packed, None for one that transformers reads."""
    if given is None and declared.get("quant_method") == CompressedTensors.name:
        # transformers reads these, unless the model is called by another library than itself.
        if not CompressedTensors().detect(declared) or not loads_model():
            return None
    elif given is None and declared.get("quant_method") == "quark":
        # Quark has formats of its own library.
        from ..checkpoint.layouts.vendors import is_read

        if not is_read(declared):
            return None
    elif given is not None and type(given).__name__ != "PackedConfig":
        return None
    # It imports transformers, and refuses old versions.
    from .transformers import PackedConfig

    return PackedConfig.from_dict(declared)


def _read_described(declared: Mapping[str, Any]) -> Any:
    """Return the config of a folder that diffusers wrote."""
    # It imports diffusers, and refuses old versions.
    from .diffusers import DescribedConfig

    return DescribedConfig(declared)


def _diffusers_quantizer(config: Any, **kwargs: Any) -> Any:
    """Return the quantizer of a config of diffusers."""
    from .diffusers import PackedQuantizer

    return PackedQuantizer(config, **kwargs)


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
choose_config(_KEPT_PACKED, _ASKED, _choose)
register_quantizer(METHOD, _read_described, _diffusers_quantizer)
