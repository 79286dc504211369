"""Private APIs of PEFT: LoRA on layers that it does not know. Tested with 0.20 and 0.21."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from . import require_version

require_version("peft", ">=0.20,<0.22", extra="peft")

from peft import LoraConfig, PeftConfig  # noqa: E402
from peft.tuners.lora.layer import Linear  # noqa: E402

__all__ = ["LoraConfig", "LoraLinear", "PeftConfig", "register_layers", "variants"]


class LoraLinear(Linear):
    """PEFT's adapter on a linear layer, with public methods for what it reads of that layer."""

    def features(self, layer: Any) -> Any:
        """Return in_features and out_features of the layer below."""
        return super()._get_in_out_features(layer)

    def placement(self, layer: Any) -> Any:
        """Return the device of the layer below, and the dtype of its dense weight."""
        return super()._get_base_layer_device_and_dtype(layer)

    def _get_in_out_features(self, module: Any) -> Any:
        return self.features(module)

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> Any:
        return self.placement(base_layer)


def register_layers(config: LoraConfig, layers: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Have a config put adapters on layers of other classes, by the class of the layer."""
    config._register_custom_module(dict(layers))


def variants(config: LoraConfig) -> dict[str, Any]:
    """Return the options of a config that choose a variant of LoRA, such as DoRA."""
    names = [o.name for o in dataclasses.fields(config) if o.metadata.get("is_lora_variant")]
    return {name: value for name in names if (value := getattr(config, name))}
