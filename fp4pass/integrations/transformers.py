"""transformers: models that are quantized while from_pretrained loads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from .._compat import require
from .._compat import transformers as compat
from .._compat.transformers_loading import require_filled, when_loaded
from ..checkpoint.loading import PackedFolder
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.source_files import require_float
from ..errors import CheckpointError, OptionError
from ..methods.base import MethodChoice
from ..nn.experts import current_weight
from ..quantization.plan import NEW, LayerPlan, Plan, matching_rule
from ..quantization.recipe import Recipe
from ..quantization.replace import dequantize_model
from ..quantization.scan import SkippedLayer, skip
from ..record.config import LinearOptions, Rule, check_rules
from ..record.schemes import Scheme
from ..record.state import config_of
from . import METHOD
from .as_read import PackedAsRead

require("transformers")

from transformers.quantizers import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Nothing is calibrated while a model is loaded.
_METHOD: Final = "sse"


class Fp4PassConfig(QuantizationConfigMixin):
    """The options of `from_pretrained(..., quantization_config=...)` of transformers and diffusers.

    Args:
        fmt: a scheme, as for `fp4pass.convert`. Scales of quantized inputs are those of each call.
        rules: as for `fp4pass.convert`.
        method: a name or an options object; it must need no calibration.
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

    def __init__(
        self,
        fmt: Scheme | None = None,
        *,
        rules: Sequence[Rule] = (),
        method: MethodChoice = _METHOD,
        **options: Unpack[LinearOptions],
    ) -> None:
        self.quant_method: Any = METHOD
        config = config_of({"fmt": fmt, "method": method, **options}, None)
        self.recipe = Recipe(config, check_rules(rules, options.get("weight_only")))
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
        recipe = Recipe.from_dict({"method": _METHOD, **rest}, where="quantization_config")
        config = cls(**recipe.arguments())
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; `from_dict` reads them.

        Example:
            >>> fp4pass.integrations.Fp4PassConfig(method="sse").to_dict()["weight_only"]
            True
        """
        return {"quant_method": str(METHOD), **self.recipe.to_dict()}


class _Quantizer(HfQuantizer):
    """A quantizer whose models are converted ones once they are loaded."""

    _split: dict[str, str] | None = None
    # Products have a gradient for their input, so that adapters can be trained.
    is_trainable = True
    is_compileable = True

    def hold_plan(self, model: Any) -> None:
        """Take the plan of tensor parallelism from a model, which is split once it is whole."""
        self._split = compat.held_plan(model)

    @abstractmethod
    def complete(self, model: Any) -> None:
        """Complete a model whose tensors are loaded."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Complete the model, and split it if that was asked for."""
        # The config of the layout takes its place, if there is one.
        del model.config.quantization_config
        split, self._split = self._split, None
        self.complete(model)
        if split is not None:
            # Importing it takes a second.
            from ..parallel import parallelize

            parallelize(model, compat.released_mesh(model, split))
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Make every packed layer dense again, with its rounded weight."""
        return dequantize_model(model, dtype)

    def is_serializable(self) -> bool:
        """Return whether save_pretrained works; the model refuses where there is no layout."""
        return True


class Fp4PassQuantizer(_Quantizer):
    """Packs weights as they are read, so that only layers that share a scale are ever dense."""

    def __init__(self, quantization_config: Fp4PassConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._recipe = quantization_config.recipe
        self._weights: PackedAsRead | None = None

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

        def is_final(layer: LayerPlan) -> bool:
            # transformers casts what it reads to the dtype of the model, whatever the layer's.
            dtype: torch.dtype = layer.module.get_parameter("weight").dtype
            return dtype == model.config.dtype

        with compat.tied(model):
            self._weights = PackedAsRead(model, self._recipe, is_final)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor of the checkpoint is passed to `take`."""
        return self._weights is not None and self._weights.takes(param_name)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of an element once it is packed, for device maps."""
        known = {} if self._weights is None else self._weights.bytes
        return known.get(param_name, param.element_size())

    def get_quantize_ops(self) -> Any:
        """Return what transformers calls with each tensor that needs quantization."""
        assert self._weights is not None, "transformers plans the model first"
        return compat.loading_operation(self._weights.take)

    def _without_new(self, model: Any, weights: PackedAsRead) -> Plan:
        """Return the plan without weights that the checkpoint lacks, but those a rule takes."""
        unread = {id(parameter) for parameter in compat.unread_parameters(model).values()}

        def planned(layer: LayerPlan | SkippedLayer) -> LayerPlan | SkippedLayer:
            if isinstance(layer, SkippedLayer) or layer.name in weights.rows:
                return layer
            is_new = id(current_weight(layer.module)) in unread
            by_rule = matching_rule(layer.name, self._recipe.rules) is not None
            return skip(layer, NEW) if is_new and not by_rule else layer

        return Plan(tuple(map(planned, weights.plan.entries)))

    def complete(self, model: Any) -> None:
        """Pack the remaining weights, and finish the model as `convert` does."""
        assert self._weights is not None, "transformers plans the model first"
        self._weights.plan = self._without_new(model, self._weights)
        self._weights.complete(model)
        self._weights = None


compat.register_quantization(METHOD, Fp4PassConfig, Fp4PassQuantizer)


# The `quant_method` of configs that keep a folder packed.
PACKED = "fp4pass-packed"


class PackedConfig(QuantizationConfigMixin):
    """Keeps the weights of a packed folder packed: `from_pretrained(..., quantization_config=...)`.

    Folders of ModelOpt and Quark are kept packed without it, for transformers reads them in no
    other way. With it are those that transformers makes dense: compressed-tensors and gpt-oss.

    Attributes:
        declared: what the folder declares.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "packed-model")
        >>> config = fp4pass.integrations.PackedConfig()
        >>> load = AutoModelForCausalLM.from_pretrained
        >>> model = load("packed-model", quantization_config=config)
        >>> type(model.model.layers[0].mlp.up_proj).__name__
        'QuantizedLinear'
    """

    def __init__(self) -> None:
        self.quant_method: Any = PACKED
        self.declared: dict[str, Any] = {}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config of the `quantization_config` of a folder, as plain values.

        With `return_unused_kwargs` it returns the config and `kwargs`, as transformers asks.

        Example:
            >>> declared = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
            >>> fp4pass.integrations.PackedConfig.from_dict(declared).declared["quant_algo"]
            'NVFP4'
        """
        config = cls()
        config.declared = dict(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; `from_dict` reads them.

        Example:
            >>> fp4pass.integrations.PackedConfig().to_dict()
            {'quant_method': 'fp4pass-packed'}
        """
        return {"quant_method": PACKED, **self.declared}


class FolderQuantizer(_Quantizer):
    """Leaves packed layers to fp4pass, and everything else to transformers."""

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._folder: PackedFolder | None = None

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Give the skeleton its packed layers, without memory."""
        files = [Path(each) for each in kwargs.get("checkpoint_files") or ()]
        if not files or any(each.suffix != ".safetensors" for each in files):
            raise CheckpointError(
                "The checkpoint: expected a folder of packed weights in .safetensors files, got "
                f"{files[0].name if files else 'a state dict'}. Give the folder to from_pretrained."
            )
        self.hold_plan(model)
        # The skeleton is made within a context that has no memory.
        with torch.device("cpu"):
            reader = open_checkpoint(files[0].parent)
            folder = self._folder = PackedFolder(model, reader, is_part=True)
            folder.place()
        when_loaded(model, folder.fill, lambda name: name in folder.expected, folder.dense)

    def complete(self, model: Any) -> None:
        """Finish the model as `load` does."""
        assert self._folder is not None, "transformers calls the other method first"
        require_filled(model)
        self._folder.finish()
        self._folder = None


compat.register_quantization(PACKED, PackedConfig, FolderQuantizer)
