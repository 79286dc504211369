"""transformers: models that are quantized while from_pretrained loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers import (
    loading_operation,
    mark_loaded,
    register_quantization,
    require_transformers,
    tied,
)
from .._compat.transformers_heads import unread_parameters
from ..checkpoint.finish import finish
from ..config import LinearConfig, Rule, check_rules, plain
from ..errors import CheckpointError, NonFiniteError, OptionError
from ..experts import current_weight, set_weight, weight_name
from ..quantization.checks import require_layers
from ..quantization.plan import LayerPlan, Plan, plan_layers, scale_groups
from ..quantization.quantize import quantize_weight, with_shared_scales
from ..quantization.recipe import Recipe
from ..quantization.report import planned_row
from ..quantization.rules import NEW, matching_rule
from ..quantization.scan import SkippedLayer, skip
from ..rows import Row
from ..signatures import with_options
from ..sources.unread import require_float
from .quantizer import PackedQuantizer

require_transformers()

from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

# The `quant_method` of our configs.
_METHOD = "fp4pass"

# Nothing is calibrated while a model is loaded.
_DEFAULTS: dict[str, Any] = {"fmt": "nvfp4", "method": "sse", "weight_only": True}


class Fp4PassConfig(QuantizationConfigMixin):
    """The options of `from_pretrained(..., quantization_config=...)`.

    Args:
        fmt: a scheme, "nvfp4a16" by default. The name of a format leaves inputs in floating point
            too: "nvfp4" is "nvfp4a16" here, unless `weight_only=False`.
        rules: as for `fp4pass.convert`.
        method: a name or an options object; it must need no calibration.
        weight_only: leave inputs in floating point; default True.
        **options: other fields of `LinearConfig`.

    Attributes:
        recipe: the options and rules.

    Raises:
        OptionError: an option does not exist, or a method needs calibration data.
        RuleError: a rule is malformed.

    Example:
        >>> rules = [("*.down_proj", None)]
        >>> config = fp4pass.integrations.Fp4PassConfig(method="sse", rules=rules)
        >>> load = AutoModelForCausalLM.from_pretrained
        >>> model = load("float-model", quantization_config=config)
        >>> type(model.lm_head).__name__, type(model.model.layers[0].mlp.up_proj).__name__
        ('Linear', 'QuantizedLinear')
    """

    @with_options
    def __init__(
        self,
        fmt: str = _DEFAULTS["fmt"],
        *,
        rules: Sequence[Rule] = (),
        method: object = _DEFAULTS["method"],
        weight_only: bool = _DEFAULTS["weight_only"],
        **options: Any,
    ) -> None:
        self.quant_method: Any = _METHOD
        config = LinearConfig(fmt, method, weight_only, **options)
        self.recipe = Recipe(config, check_rules(rules))
        for each in self.recipe.configs():
            if each.needs:
                raise OptionError(
                    f"Method {each.method_name!r} needs calibration data, and there is none while "
                    "a model is loaded. Choose method='sse', or load the float model and call "
                    "fp4pass.prepare, fp4pass.calibrate and fp4pass.convert."
                )

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config of plain values, such as the `quantization_config` of a folder.

        With `return_unused_kwargs` it returns the config and `kwargs`, as transformers asks.

        Example:
            >>> plain = {"fmt": "mxfp4", "method": {"name": "sse"}}
            >>> fp4pass.integrations.Fp4PassConfig.from_dict(plain).recipe.config.fmt
            'mxfp4'
        """
        # A checkpoint in our own layout has the version that wrote it.
        rest = {k: v for k, v in config_dict.items() if k not in ("quant_method", "version")}
        recipe = Recipe.from_dict({**_DEFAULTS, **rest}, where="quantization_config")
        config = cls(**recipe.arguments())
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; `from_dict` reads them.

        Example:
            >>> fp4pass.integrations.Fp4PassConfig(method="sse").to_dict()["weight_only"]
            True
        """
        return {"quant_method": _METHOD, **self.recipe.to_dict()}


@dataclass
class _Group:
    """Layers that share a global scale, which is known once all of their weights are loaded."""

    layers: dict[str, LayerPlan]
    awaited: set[str]


class Fp4PassQuantizer(PackedQuantizer):
    """Packs weights as they are read, so that only layers that share a scale are ever dense.

    Weights that are tied, shared or not in the checkpoint are packed when all is loaded, so that
    the result is always that of `convert`. transformers documents the methods that it calls, those
    with an underscore too.
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
        """Raise CheckpointError for a checkpoint that fp4pass packed."""
        if self.pre_quantized:
            raise CheckpointError(
                "The checkpoint: expected float weights, got weights that fp4pass packed in a "
                "layout that transformers does not know. Load it with fp4pass.load(dir), or give "
                "the folder of the float model to from_pretrained."
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Plan every layer of the skeleton, and choose the weights that are packed as they come."""
        # Those in FP8 would be cast, without their scales.
        files = [Path(each) for each in kwargs.get("checkpoint_files") or ()]
        if tensors := [each for each in files if each.suffix == ".safetensors"]:
            require_float(tensors[0].parent, tensors)
        self.hold_plan(model)
        with tied(model):
            self._plan = plan_layers(model, self._recipe.config, self._recipe.rules)
            require_layers(self._plan)
            names: dict[int, list[str]] = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            for layers in scale_groups(self._plan.layers):
                by_name = {weight_name(layer.name, layer.module): layer for layer in layers}
                if all(_arrives_once(model, each, names[each.weight_key]) for each in layers):
                    self._groups.update(dict.fromkeys(by_name, _Group(by_name, set(by_name))))
        for layer in self._plan.layers:
            name = weight_name(layer.name, layer.module)
            self._bytes[name] = layer.config.format.bits_per_weight(layer.shape) / 8

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor of the checkpoint is passed to `take`."""
        return param_name in self._groups

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of an element once it is packed, for device maps."""
        return self._bytes.get(param_name, param.element_size())

    def get_quantize_ops(self) -> Any:
        """Return what transformers calls with each tensor that needs quantization."""
        return loading_operation(self.take)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Put a weight into the model, if it fits there, and pack its group with the last."""
        group = self._groups.get(name)
        if group is None:
            return False
        module = group.layers[name].module
        if tensor.shape != module.get_parameter("weight").shape:
            self._postpone(group)
            return False
        weight = nn.Parameter(tensor)
        mark_loaded(weight)
        set_weight(module, weight)
        group.awaited.discard(name)
        if not group.awaited:
            try:
                self._convert(list(group.layers.values()))
            except NonFiniteError:
                # transformers would raise an error of its own; it is raised again at the end.
                self._postpone(group)
        return True

    def _without_new(self, model: Any) -> Plan:
        """Return the plan without weights that the checkpoint lacks, but those a rule takes."""
        unread = {id(parameter) for parameter in unread_parameters(model).values()}

        def planned(layer: LayerPlan | SkippedLayer) -> LayerPlan | SkippedLayer:
            if isinstance(layer, SkippedLayer) or layer.name in self._rows:
                return layer
            is_new = id(current_weight(layer.module)) in unread
            by_rule = matching_rule(layer.name, self._recipe.rules) is not None
            return skip(layer, NEW) if is_new and not by_rule else layer

        return Plan(tuple(map(planned, self._plan.entries)))

    def _postpone(self, group: _Group) -> None:
        """Pack a group when all is loaded."""
        for name in group.layers:
            self._groups.pop(name, None)

    def _convert(self, layers: Sequence[LayerPlan]) -> None:
        """Pack weights that are in the model: whole groups."""

        def arrived(layer: LayerPlan) -> LayerPlan:
            # The plan has the weight of the skeleton.
            return dataclasses.replace(layer, weight_key=id(current_weight(layer.module)))

        with torch.inference_mode(False), torch.no_grad():
            plan = with_shared_scales(Plan(tuple(map(arrived, layers))))
            for members in plan.by_weight():
                self._rows.update({row.name: row for row in quantize_weight(members)})

    def complete(self, model: Any) -> None:
        """Pack the remaining weights, and finish the model as `convert` does."""
        self._plan = self._without_new(model)
        self._convert([layer for layer in self._plan.layers if layer.name not in self._rows])
        entries = self._plan.entries
        rows = [self._rows.get(entry.name) or planned_row(entry) for entry in entries]
        recipe = self._recipe
        finish(model, {**plain(recipe.config.options()), "rules": plain(recipe.rules)}, rows)
        self._forget()


def _arrives_once(model: Any, layer: LayerPlan, names: Sequence[str]) -> bool:
    """Return whether a weight has one name, and is read in its final dtype."""
    # transformers casts what it reads to the dtype of the model, whatever that of the layer.
    return len(names) == 1 and layer.module.get_parameter("weight").dtype == model.config.dtype


register_quantization(_METHOD, Fp4PassConfig, Fp4PassQuantizer)
