"""Private APIs of PEFT: adapters in a model, and LoRA on layers that it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import require_version

# The versions that the tests have run with.
require_version("peft", ">=0.20,<0.22", extra="peft")

from peft import LoraConfig, PeftConfig, PeftModel  # noqa: E402
from peft.tuners.lora.layer import Linear, ParamWrapper  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402
from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: E402

__all__ = [
    "LoraConfig",
    "LoraLinear",
    "PeftConfig",
    "adapter_modules",
    "changed_parameters",
    "refuse_merging",
    "register_layers",
    "variants",
    "wrapped",
]


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return what PEFT has put into a model beside its own layers, all that an adapter saves."""
    found: set[nn.Module] = set()
    for module in model.modules():
        # Below it is what it was put around, which is the model's own.
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found |= _below(module) - _below(wrapped(module))
        elif isinstance(module, PeftModel):
            found |= _below(module._modules.get("prompt_encoder"))
    return found


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the model's own module that one of PEFT is put around and calls, None for others."""
    inner = module._modules
    if isinstance(module, BaseTunerLayer):
        return inner.get("base_layer")
    return inner.get("original_module") if isinstance(module, AuxiliaryTrainingWrapper) else None


def changed_parameters(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return the names of the parameters that adapters replace while they run, by module."""
    found: dict[nn.Module, set[str]] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            found.setdefault(module.get_base_layer(), set()).add(module.parameter_name)
    return found


def _below(module: nn.Module | None) -> set[nn.Module]:
    return set() if module is None else set(module.modules())


def refuse_merging(
    model: nn.Module, is_packed: Callable[[object], bool], refuse: Callable[..., None]
) -> None:
    """Have adapters on packed layers call `refuse` for what would write to the dense weight."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and is_packed(module._modules.get("base_layer")):
            module.__dict__["merge"] = refuse
            if module.merged:
                module.__dict__["unmerge"] = refuse


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
