"""transformers and PEFT: models quantized while from_pretrained loads them, adapters on them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.finish import finish
from ..config import LinearConfig, Rule, check_options, plain
from ..errors import CheckpointError, NonFiniteError, OptionError, StateError
from ..linear import QuantizedLinear
from ..packed_linear import become
from ..quantization.checks import require_layers
from ..quantization.plan import LayerPlan, Plan, plan_layers, scale_groups
from ..quantization.quantize import quantize_weight
from ..quantization.recipe import Recipe
from ..quantization.report import Row, planned_row
from ..quantization.scales import with_shared_scales
from ..quantization.state import forget_state

try:
    from transformers.core_model_loading import ConversionOps
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"fp4pass.integrations.transformers needs transformers 5.10 or newer: {error}. "
        "pip install 'fp4pass[hf]'."
    ) from error

if TYPE_CHECKING:
    from peft import LoraConfig

# What transformers calls us.
_METHOD = "fp4pass"

# Ways to start an adapter that leave the base weight as it is.
_LORA_STARTS = (True, False, "gaussian", "orthogonal", "eva")


# What is different while a model is loaded: nothing was calibrated.
_DEFAULTS: dict[str, Any] = {"method": "sse", "weight_only": True}


class Fp4PassConfig(QuantizationConfigMixin):
    """What `from_pretrained(..., quantization_config=...)` is to do.

    Args:
        rules: as for `fp4pass.convert`.
        **options: fields of `LinearConfig`. The method is "sse" by default, and must need no
            data; `weight_only` is True by default, for no input was calibrated.

    Raises:
        OptionError: an option does not exist, or a method needs data.
        RuleError: a rule is malformed.
    """

    def __init__(self, *, rules: Sequence[Rule] = (), **options: Any) -> None:
        check_options(options, "Fp4PassConfig: ")
        self.quant_method: Any = _METHOD
        self.recipe = Recipe(LinearConfig(**{**_DEFAULTS, **options}), tuple(rules))
        for config in self.recipe.configs():
            if config.needs:
                raise OptionError(
                    f"Method {config.method_name!r} needs calibration data, and there is none "
                    "while a model is loaded. Choose method='sse', or load the float model and "
                    "call fp4pass.prepare, fp4pass.calibrate and fp4pass.convert."
                )

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Read what `to_dict` returns, or the `quantization_config` of a folder."""
        # Folders in a layout of our own have the version that wrote them.
        rest = {k: v for k, v in config_dict.items() if k not in ("quant_method", "version")}
        recipe = Recipe.from_dict({**_DEFAULTS, **rest}, where="quantization_config")
        config = cls(**recipe.arguments())
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return {"quant_method": _METHOD, **self.recipe.to_dict()}


@dataclass
class _Group:
    """Layers with one global scale, which is known once all of their weights have arrived."""

    layers: dict[str, LayerPlan]
    awaited: set[str]


class Fp4PassQuantizer(HfQuantizer):
    """Packs weights as they are read: no more than the linears that share a scale are ever dense.

    What it can not pack on its way (weights that are tied, shared, or not in the checkpoint) it
    packs when all is loaded, so that the result is that of `convert` in every case.
    """

    def __init__(self, quantization_config: Fp4PassConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._recipe = quantization_config.recipe
        self._forget()

    def _forget(self) -> None:
        self._plan = Plan(())
        self._rows: dict[str, Row] = {}
        self._groups: dict[str, _Group] = {}
        self._bytes: dict[str, float] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises CheckpointError for a checkpoint that fp4pass wrote, which is packed already."""
        if self.pre_quantized:
            raise CheckpointError(
                "The checkpoint is quantized by fp4pass already, in a layout that transformers "
                "does not know. Load it with fp4pass.load(dir), or give the folder of the float "
                "model to from_pretrained."
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Plan every layer on the skeleton, and which weights to take as they come."""
        with _tied(model):
            self._plan = plan_layers(model, self._recipe.config, self._recipe.rules)
            require_layers(self._plan)
            names: dict[int, list[str]] = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            for layers in scale_groups(self._plan.layers):
                by_name = {f"{layer.name}.weight": layer for layer in layers}
                if all(_arrives_once(model, each, names[each.weight_key]) for each in layers):
                    self._groups.update(dict.fromkeys(by_name, _Group(by_name, set(by_name))))
        for layer in self._plan.layers:
            self._bytes[f"{layer.name}.weight"] = layer.config.format.bits_per_weight / 8

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of the checkpoint goes through `take`."""
        return param_name in self._groups

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of an element once it is packed: for device maps and memory set aside."""
        return self._bytes.get(param_name, param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        """What transformers calls with each tensor that needs quantization."""
        return _Take(self)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Put a weight into the model, and pack its group if it was the last; False if its shape
        is wrong, which transformers reports."""
        group = self._groups.get(name)
        if group is None:
            return False
        module = group.layers[name].module
        if tensor.shape != module.weight.shape:
            self._leave(group)
            return False
        weight = nn.Parameter(tensor)
        # Else transformers would initialize it again.
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        module.weight = weight
        group.awaited.discard(name)
        if not group.awaited:
            try:
                self._convert(list(group.layers.values()))
            except NonFiniteError:
                # transformers would make it an error of its own; raised again at the end.
                self._leave(group)
        return True

    def _leave(self, group: _Group) -> None:
        """Have a group wait until all is loaded."""
        for name in group.layers:
            self._groups.pop(name, None)

    def _convert(self, layers: Sequence[LayerPlan]) -> None:
        """Pack weights that are in the model, whole groups of them."""

        def arrived(layer: LayerPlan) -> LayerPlan:
            # What was planned was the skeleton's.
            return dataclasses.replace(layer, weight_key=id(layer.module._parameters["weight"]))

        with torch.inference_mode(False), torch.no_grad():
            plan = with_shared_scales(Plan(tuple(map(arrived, layers))))
            for members in plan.by_weight():
                self._rows.update({row.name: row for row in quantize_weight(members, {})})

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Pack what is left, and do the rest of what `convert` does."""
        self._convert([layer for layer in self._plan.layers if layer.name not in self._rows])
        entries = self._plan.entries
        rows = [self._rows.get(entry.name) or planned_row(entry) for entry in entries]
        # That of the stored layout takes its place, where there is one.
        del model.config.quantization_config
        recipe = self._recipe
        finish(model, {**plain(recipe.config.options()), "rules": plain(recipe.rules)}, rows)
        self._forget()
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Give every linear its class back, with the weight that its packed one stands for."""
        # transformers writes a string when it saves.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        before = model.dtype
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                _become_dense(name, module, dtype)
        for parameter in model.parameters():
            if dtype is not None and parameter.dtype == before:
                parameter.data = parameter.data.to(dtype)
        forget_state(model)
        # Where there is no public layout, `convert` has put a refusal here.
        model.__dict__.pop("save_pretrained", None)
        return model

    def is_serializable(self) -> bool:
        """Whether save_pretrained works; where there is no layout, the model refuses itself."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are: the products have a gradient for their input."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Take(ConversionOps):
    """Hands the tensors that are read for one parameter to the quantizer."""

    def __init__(self, quantizer: Fp4PassQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What is left for transformers to put into the model."""
        left = {}
        for name, tensors in input_dict.items():
            if not self.quantizer.take(name, tensors[0] if type(tensors) is list else tensors):
                left[name] = tensors
            elif missing_keys is not None:
                missing_keys.discard(name)
        return left


@contextmanager
def _tied(model: Any) -> Iterator[None]:
    """Tie the parameters of a skeleton, which transformers does only when they are loaded."""
    ties = dict(model.all_tied_weights_keys)
    untied = {name: model.get_parameter_or_buffer(name) for name in ties}
    model.tie_weights(recompute_mapping=False)
    try:
        yield
    finally:
        for name, tensor in untied.items():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, tensor)


def _arrives_once(model: Any, layer: LayerPlan, names: Sequence[str]) -> bool:
    """Whether the weight is one tensor of the checkpoint, under one name, in its final dtype."""
    # transformers casts what it hands us to the dtype of the model, whatever the layer has.
    return len(names) == 1 and layer.module.weight.dtype == model.config.dtype


def _become_dense(name: str, module: QuantizedLinear, dtype: torch.dtype | None) -> None:
    """Make a linear of a converted one, in place."""
    if module.weight_packed.is_meta:
        raise StateError(
            f"{name}: its packed weight is offloaded. Load the model with a device_map that "
            "offloads nothing to dequantize it."
        )
    weight = module.weight.to(dtype or module.weight_dtype).contiguous()
    cls: type[nn.Module] = Conv1D if module.transposed else nn.Linear
    become(module, cls, weight=nn.Parameter(weight))


# Again when this file is imported again, for then the classes are new.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(_METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(_METHOD, None)
register_quantization_config(_METHOD)(Fp4PassConfig)
register_quantizer(_METHOD)(Fp4PassQuantizer)


def lora_config(
    model: nn.Module | None = None,
    *,
    adapter: str | os.PathLike[str] | None = None,
    **options: Any,
) -> LoraConfig:
    """A `peft.LoraConfig` whose adapters can sit on converted linears.

    model: a converted model, all of whose converted linears get adapters unless target_modules
    says otherwise. adapter: a folder that an adapter was saved to, whose config this is to be:
    PeftModel.from_pretrained(model, dir, config=lora_config(adapter=dir)). options: as LoraConfig.
    Raises OptionError for what would need to write the dense weight (DoRA, PiSSA, LoftQ, ...).
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            f"lora_config needs peft 0.20 or newer: {error}. pip install peft."
        ) from error
    if adapter is not None:
        if options or model is not None:
            raise OptionError("The config of a saved adapter has all its options; give only it.")
        config = peft.PeftConfig.from_pretrained(os.fspath(adapter))
        if not isinstance(config, peft.LoraConfig):
            raise OptionError(f"{adapter} holds a {type(config).__name__}; only LoRA is supported.")
    else:
        if model is not None and options.get("target_modules") is None:
            options["target_modules"] = _converted_linears(model)
        config = peft.LoraConfig(**options)
    _require_plain(config)
    config._register_custom_module({QuantizedLinear: _lora_layer()})
    return config


def _converted_linears(model: nn.Module) -> list[str]:
    names = [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    if not names:
        raise StateError(
            "The model has no converted linear for an adapter to sit on. Convert it first, or "
            "give target_modules."
        )
    return names


def _require_plain(config: LoraConfig) -> None:
    """Refuse variants of LoRA that read or write the dense weight of their layer."""
    problems = [
        f"{option.name}={getattr(config, option.name)!r}"
        for option in dataclasses.fields(config)
        if option.metadata.get("is_lora_variant") and getattr(config, option.name)
    ]
    if config.init_lora_weights not in _LORA_STARTS:
        problems.append(f"init_lora_weights={config.init_lora_weights!r}")
    if config.target_parameters:
        problems.append(f"target_parameters={config.target_parameters!r}")
    if problems:
        raise OptionError(
            f"{', '.join(problems)}: not on converted linears, whose weight is packed and fixed. "
            "Plain LoRA works, with init_lora_weights True, 'gaussian', 'orthogonal' or 'eva'."
        )


@functools.cache
def _lora_layer() -> type[nn.Module]:
    """The class of an adapter on a converted linear; made when PEFT is there."""
    from peft.tuners.lora.layer import Linear

    class LoraQuantizedLinear(Linear):
        """y = base(x) + B A dropout(x) * scaling, where base is a converted linear."""

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[Any, Any]:
            return base_layer.weight_packed.device, base_layer.weight_dtype

        def update_layer(
            self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
        ) -> None:
            # Also for an adapter that is added later, with a config of PEFT's own.
            _require_plain(config)
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise StateError(
                "An adapter cannot be merged into a packed weight: the sum would have to be "
                "rounded to 4 bits again. Keep it beside the model (model.save_pretrained), or "
                "merge it into the float model and convert that."
            )

        def unmerge(self) -> None:
            """Nothing: an adapter is never merged."""

    return LoraQuantizedLinear
