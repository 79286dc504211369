"""Private APIs of diffusers, imported when needed: configs and registries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from . import callers, require
from .peft_hooks import after_import

# The key of config.json that says how a folder is quantized.
_CONFIG = "quantization_config"


def is_diffusers(model: object) -> bool:
    """Return whether an object is a model of diffusers; that is not imported to look."""
    modeling = sys.modules.get("diffusers.models.modeling_utils")
    return modeling is not None and isinstance(model, modeling.ModelMixin)


def loading_lora() -> Mapping[str, Any] | None:
    """Return the LoRA that `load_lora_weights` of a pipeline is loading, None where none runs."""
    # It looks up dense weights in the state dict of the model.
    for frame in callers("diffusers.loaders.lora_base"):
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "load_lora_weights" and module.startswith("diffusers."):
            return frame.f_locals.get("state_dict", {})
    return None


def declare(model: Any, declared: Mapping[str, Any] | None) -> None:
    """Set what `save_pretrained` of a model of diffusers declares, None for a float model."""
    require("diffusers")
    from diffusers.configuration_utils import FrozenDict

    rest = {name: value for name, value in model.config.items() if name != _CONFIG}
    model._internal_dict = FrozenDict(rest if declared is None else {**rest, _CONFIG: declared})


def register_quantizer(
    method: str, read: Callable[[Mapping[str, Any]], Any], make: Callable[..., Any]
) -> None:
    """Register a quantization method once diffusers is imported.

    Args:
        method: the `quant_method` of a folder.
        read: called for a folder of this method.
        make: called with the config and `pre_quantized=`.
    """

    class Config:
        @classmethod
        def from_dict(cls, declared: Mapping[str, Any]) -> Any:
            return read(declared)

    def install(auto: ModuleType) -> None:
        # `quant_mapping` of a pipeline compares with the classes of configs.
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Config
        auto.AUTO_QUANTIZER_MAPPING[method] = make

    after_import("diffusers.quantizers.auto", install)
