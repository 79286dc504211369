"""Private APIs of PEFT: adapters in a model, and LoRA on layers that it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import needed

with needed("peft"):
    from peft import LoraConfig, LoraModel, PeftConfig, TaskType
    from peft import PeftModel as PeftModel
    from peft import PeftType as PeftType
    from peft.tuners import tuners_utils
    from peft.tuners.lora.layer import Linear, ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND, SEQ_CLS_HEAD_NAMES
    from peft.utils.other import AuxiliaryTrainingWrapper


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return what PEFT has put into a model beside its own layers, all that an adapter saves."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inner = wrapped(module)
            # Below it is what it was put around, which is the model's own.
            own = set() if inner is None else set(inner.modules())
            found |= set(module.modules()) - own
        elif isinstance(module, PeftModel):
            prompt = module._modules.get("prompt_encoder")
            found |= set() if prompt is None else set(prompt.modules())
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


def all_linear(
    config: PeftConfig, model: nn.Module, is_packed: Callable[[object], bool]
) -> set[str] | None:
    """Return the names of all linear layers but the head, None unless a config asks for them."""
    wanted = getattr(config, "target_modules", None)
    if not isinstance(wanted, str) or wanted.lower() != INCLUDE_LINEAR_LAYERS_SHORTHAND:
        return None
    head: nn.Module | None = None
    # PEFT leaves out the output layer of a model, where its class is linear.
    if isinstance(model, tuners_utils.PreTrainedModel):
        head = model.get_output_embeddings()
        if head is None and config.task_type == TaskType.SEQ_CLS:
            heads = (getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES)
            head = next((each for each in heads if each is not None), None)
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        inner: Any = module
        if isinstance(module, BaseTunerLayer):
            inside |= set(inner.modules())
            inner = inner.get_base_layer()
        if isinstance(inner, nn.Linear | tuners_utils.Conv1D) or is_packed(inner):
            found[name] = inner
    return {name for name, each in found.items() if each is not head}


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


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that PEFT has put adapters into, which may be the one that is given."""
    tuner: Any = _tuner_in(model)
    return model if tuner is None else tuner.model


def _tuner_in(model: nn.Module) -> BaseTuner | None:
    """Return what PEFT has put adapters into a model with, None for what transformers holds."""
    inner = model._modules.get("base_model") if type(model).__module__.startswith("peft.") else None
    return next((each for each in (model, inner) if isinstance(each, BaseTuner)), None)


def around_packed(model: nn.Module, is_packed: Callable[[object], bool]) -> dict[nn.Module, Any]:
    """Return what is put around each packed layer that has adapters, by the layer."""
    return {
        module.get_base_layer(): module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and is_packed(module._modules.get("base_layer"))
    }


def applied_adapters(around: Any) -> list[str]:
    """Return the names of the adapters that a layer adds to its output at each call."""
    if around.merged or around.disable_adapters:
        return []
    known = getattr(around, "lora_A", {})
    return [name for name in around.active_adapters if name in known]


def merge_problem(around: Any) -> str:
    """Return why adapters of a layer are no change of its weight that can be added, or ""."""
    if around.merged:
        return ""
    if not hasattr(around, "lora_A"):
        return f"its adapter is {type(around).__name__}, and not one of LoRA"
    names = applied_adapters(around)
    found = [
        f"{name} ({type(around.lora_variant[name]).__name__})"
        for name in names
        if name in around.lora_variant
    ]
    if found:
        return f"{', '.join(found)} is a variant of LoRA that reads the dense weight, as DoRA does"
    if any(around.lora_bias[name] for name in names) and around.get_base_layer().bias is None:
        return "its adapter has a bias (lora_bias), and the layer has none"
    return ""


def lora_change(around: Any) -> tuple[Tensor, Tensor | None]:
    """Return what adapters add to a weight, float32 [N, K], and to its bias, [N] or None."""
    weights, biases = [], []
    for name in applied_adapters(around):
        down, up = (part[name].weight.detach().float() for part in (around.lora_A, around.lora_B))
        weights.append(up @ down * around.scaling[name])
        if around.lora_bias[name]:
            biases.append(around.lora_B[name].bias.detach().float() * around.scaling[name])
    return torch.stack(weights).sum(0), torch.stack(biases).sum(0) if biases else None


@contextmanager
def silenced(arounds: Iterable[Any]) -> Iterator[None]:
    """Leave the adapters of some layers out of calls."""
    before = [(each, each._disable_adapters) for each in arounds]
    try:
        for each, _ in before:
            each._disable_adapters = True
        yield
    finally:
        for each, was in before:
            each._disable_adapters = was


def unload(model: nn.Module, merged: Iterable[Any]) -> nn.Module:
    """Take all adapters out of a model, in place, and return it without what PEFT is around it."""
    # Active ones are merged as PEFT does; layers in `merged` have them in their weight already.
    tuner: Any = _tuner_in(model)
    if tuner is None:
        # transformers puts adapters in without keeping a tuner.
        tuner = LoraModel.__new__(LoraModel)
        nn.Module.__init__(tuner)
        tuner.model, tuner.peft_config = model, getattr(model, "peft_config", {})
    for each in merged:
        each.__dict__["merge"] = lambda *args, **kwargs: None
    found: nn.Module = tuner._unload_and_optionally_merge(merge=True)
    if "_hf_peft_config_loaded" in found.__dict__:
        found.__dict__["_hf_peft_config_loaded"] = False
    return found
