"""Private APIs of PEFT: adapters in a model, and LoRA on layers that it does not know."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from . import require_version

# The versions that the tests have run with.
require_version("peft", ">=0.20,<0.22", extra="peft")

from peft import LoraConfig, PeftConfig, PeftModel, PeftType, TaskType  # noqa: E402
from peft.tuners import tuners_utils  # noqa: E402
from peft.tuners.lora.layer import Linear, ParamWrapper  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND, SEQ_CLS_HEAD_NAMES  # noqa: E402
from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: E402

__all__ = [
    "LoraLinear",
    "adapter_modules",
    "all_linear",
    "below_adapter",
    "changed_parameters",
    "is_lora",
    "let_merge",
    "preparing",
    "refuse_merging",
    "register_layers",
    "takes_all_linear",
    "targets",
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


def let_merge(model: nn.Module, refuse: Callable[..., None]) -> None:
    """Have adapters on layers that are dense again merge as PEFT's own do."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for name in ("merge", "unmerge"):
                if module.__dict__.get(name) is refuse:
                    del module.__dict__[name]
        if isinstance(module, LoraLinear):
            module.__class__ = Linear  # type: ignore[assignment]
            # As PEFT has it for layers that store [K, N].
            is_transposed = isinstance(module.get_base_layer(), tuners_utils.Conv1D)
            module.fan_in_fan_out = module.is_target_conv_1d_layer = is_transposed


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


def is_lora(config: PeftConfig) -> bool:
    """Return whether a config is one of LoRA, whose layers can be registered."""
    # That of AdaLoRA is a LoraConfig too.
    return config.peft_type == PeftType.LORA


def takes_all_linear(config: PeftConfig) -> bool:
    """Return whether a config asks for all linear layers but the head of the model."""
    wanted = getattr(config, "target_modules", None)
    return isinstance(wanted, str) and wanted.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND


def all_linear(config: PeftConfig, model: nn.Module, packed: Iterable[str]) -> set[str]:
    """Return the names of all linear layers of a model, dense and packed, but its head."""
    own: Any = tuners_utils._maybe_include_all_linear_layers(copy.copy(config), model)
    head = _head(config, model)
    return set(own.target_modules) | {
        name for name in packed if model.get_submodule(name) is not head
    }


def _head(config: PeftConfig, model: Any) -> nn.Module | None:
    """Return the output layer of a model, which PEFT leaves out where its class is linear."""
    if not isinstance(model, tuners_utils.PreTrainedModel):
        return None
    head: nn.Module | None = model.get_output_embeddings()
    if head is not None or config.task_type != TaskType.SEQ_CLS:
        return head
    heads = (getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES)
    return next((head for head in heads if head is not None), None)


def below_adapter(model: nn.Module, name: str) -> str:
    """Return the name of the outermost adapter around a layer, its own where it has none."""
    parent, _, last = name.rpartition(".")
    while last == "base_layer" and isinstance(model.get_submodule(parent), BaseTunerLayer):
        name = parent
        parent, _, last = name.rpartition(".")
    return name


def targets(tuner: Any, config: PeftConfig, names: Iterable[str]) -> list[str]:
    """Return those of the names of layers on which a prepared config puts adapters."""
    return [name for name in names if tuner._check_target_module_exists(config, name)]


@contextmanager
def preparing(tuner: Any, fit: Callable[[PeftConfig], None]) -> Iterator[None]:
    """Have a tuner call `fit` with each config that it has prepared, before it changes a model."""
    prepare = tuner._prepare_adapter_config

    def prepare_adapter_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        config = prepare(config, *args, **kwargs)
        fit(config)
        return config

    tuner.__dict__["_prepare_adapter_config"] = prepare_adapter_config
    try:
        yield
    finally:
        del tuner.__dict__["_prepare_adapter_config"]


def variants(config: LoraConfig) -> dict[str, Any]:
    """Return the options of a config that choose a variant of LoRA, such as DoRA."""
    names = [o.name for o in dataclasses.fields(config) if o.metadata.get("is_lora_variant")]
    return {name: value for name in names if (value := getattr(config, name))}
