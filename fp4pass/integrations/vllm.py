"""The plugin of vLLM: its linear layers with weights in 4 bits multiply by fp4pass's kernels.

vLLM's own config reads a folder, and its own methods make and load the parameters. Only the product
of a linear layer is another one, of the tensors as they were loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from packaging.version import Version
from torch import Tensor, nn

from .engines import TESTED, global_scales, keep_loaded, multiply

# vLLM shows the messages of its own loggers.
_log = logging.getLogger("vllm.plugins.fp4pass")

_NAME = "fp4pass"

# The release that the names of classes and attributes are of.
_RELEASE = (0, 33)


def register() -> None:
    """Have vLLM multiply packed linear layers by fp4pass's kernels.

    vLLM calls it in each of its processes, as the entry point `vllm.general_plugins`. It registers
    the quantization config "fp4pass", which vLLM chooses for folders of compressed-tensors,
    ModelOpt and Quark with weights in nvfp4 or mxfp4 and inputs in floating point. Experts and
    layers in other formats stay with vLLM, and so do all layers where `--quantization` or
    `--linear-backend` is given or VLLM_BATCH_INVARIANT is set.

    Without an NVIDIA GPU of compute capability 8.9 or 9.0 it does nothing, nor where the
    environment variable FP4PASS_VLLM is 0; 1 has it serve later GPUs, which the kernels were not
    tested on. A vLLM other than 0.33 stays as it is, and so does one where an error is raised here;
    a line of the log says so. A second call changes nothing.

    Example:
        >>> from fp4pass.integrations.vllm import register
        >>> register()  # without vLLM nothing changes
    """
    try:
        if _applies():
            _register()
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        # It would keep vLLM from starting.
        _log.warning("fp4pass: its plugin is off (%s: %s).", type(error).__name__, error)


def _applies() -> bool:
    asked = os.environ.get("FP4PASS_VLLM", "")
    if asked == "0":
        return False
    import vllm
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    number = 0 if capability is None else capability.to_int()
    if number < min(TESTED) or (number not in TESTED and asked != "1"):
        return False
    is_known = Version(vllm.__version__).release[:2] == _RELEASE
    if not is_known:
        words = "fp4pass: its plugin is for vLLM %d.%d, and leaves %s as it is."
        _log.warning(words, *_RELEASE, vllm.__version__)
    return is_known


def _register() -> None:
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if _NAME in quantization.QUANTIZATION_METHODS:
        return

    class Fp4PassConfig(QuantizationConfig):
        """Chooses vLLM's own config of a folder; it has no instances."""

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            """Return the name of this config for folders with layers that fp4pass multiplies."""
            try:
                is_taken = user_quant in (None, _NAME) and _own_config(hf_quant_cfg)
            except (AttributeError, TypeError) as error:
                _log.warning("fp4pass: vLLM alone reads this unknown folder (%s).", error)
                return None
            return _NAME if is_taken else None

        @classmethod
        def get_config_filenames(cls) -> list[str]:
            """Return the file that ModelOpt may have the config in."""
            return ["hf_quant_config.json"]

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            """Return vLLM's config of a folder, which gives some layers another product."""
            own = quantization.get_quantization_config(_own_config(config)).from_config(config)
            return _with(_Config, own, Counter())

    quantization.register_quantization_config(_NAME)(Fp4PassConfig)


def _own_config(declared: Mapping[str, Any]) -> str:
    """Return the name of vLLM's config of a folder with layers to multiply, "" of others."""
    method, inner = str(declared.get("quant_method")), declared.get("quantization") or declared
    groups = list((inner.get("config_groups") or {}).values())
    if method == "compressed-tensors":
        found = any(_is_4_bits(each, "weights", "input_activations") for each in groups)
        return method if found else ""
    if method == "quark":
        layers = (declared.get("layer_quant_config") or {}).values()
        groups = [declared.get("global_quant_config") or {}, *layers]
        return method if any(_is_4_bits(each, "weight", "input_tensors") for each in groups) else ""
    algorithm = str(inner.get("quant_algo")).upper() if method.startswith("modelopt") else ""
    if algorithm == "MIXED_PRECISION":
        layers = (inner.get("quantized_layers") or {}).values()
        return "modelopt_mixed" if "W4A16_NVFP4" in str([*layers]).upper() else ""
    # As vLLM takes it.
    is_float = bool(groups) and all(each.get("input_activations") is None for each in groups)
    found = algorithm == "W4A16_NVFP4" or (algorithm == "NVFP4" and is_float)
    return "modelopt_fp4" if found else ""


def _is_4_bits(group: Mapping[str, Any], weights: str, inputs: str) -> bool:
    """Return whether weights are in 4-bit floating point, and inputs are not quantized."""
    weight = group.get(weights) or {}
    weight = weight[0] if isinstance(weight, list) else weight
    is_float = weight.get("type") == "float" and weight.get("num_bits") == 4
    return (is_float or weight.get("dtype") == "fp4") and not group.get(inputs)


@functools.cache
def _class_of(methods: Any, vllm_class: Any) -> Any:
    # vLLM knows its classes by their names, too.
    return type(vllm_class.__name__, (vllm_class,), {**vars(methods), "vllm_class": vllm_class})


def _with(methods: type, thing: Any, counts: Counter[str]) -> Any:
    """Return an object of vLLM, whose class now has other methods."""
    vllm_class: Any = type(thing)
    thing.__class__ = _class_of(methods, vllm_class)
    thing.fp4pass = counts
    return thing


def _blank(vllm_class: type) -> Any:
    """Return a config without attributes, for pickle and copy."""
    made = _class_of(_Config, vllm_class)
    return made.__new__(made)


# Objects can change to classes that add no slots. Their attributes have names that vLLM's have not.


class _Config:
    """Methods for a quantization config of vLLM: some layers get another product."""

    __slots__ = ()
    vllm_class: Any
    fp4pass: Counter[str]  # what is said of a model's layers

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return vLLM's method of a layer."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        found = method = self.vllm_class.get_quant_method(self, layer, prefix)
        self.fp4pass["linear"] += isinstance(layer, LinearBase | ParallelLMHead)
        if type(method).__name__ == "CompressedTensorsLinearTransformMethod":
            method = method.quant_method
        if _is_weight_only(self, method, layer, prefix) and not _is_left_to_vllm(self):
            _with(_Method, method, self.fp4pass)
            self.fp4pass["taken"] += 1
        return found

    def __reduce__(self) -> Any:
        return _blank, (self.vllm_class,), vars(self)


def _is_weight_only(config: Any, method: Any, layer: Any, prefix: str) -> bool:
    """Return whether a method of vLLM has weights in nvfp4 or mxfp4, and inputs in float."""
    scheme: Any = getattr(layer, "scheme", None)
    match type(method).__name__, type(scheme).__name__:
        case "ModelOptLinearMethod", _:
            is_nvfp4 = type(method.wkey).__name__ == "KNvfp4Static" and method.ctx.group_size == 16
            return is_nvfp4 and method.akey is None
        case "QuarkLinearMethod", "QuarkOCP_MX":
            return scheme.weight_dtype == "mxfp4" and scheme.input_dtype is None
        case "CompressedTensorsLinearMethod", "CompressedTensorsW4A4Fp4":
            return scheme.use_a16
        case "CompressedTensorsLinearMethod", "CompressedTensorsW4A4Mxfp4":
            return not config.get_scheme_dict(layer, prefix).get("input_activations")
    return False


def _is_left_to_vllm(config: Any) -> bool:
    """Return whether the user chose kernels, or what inputs are quantized to."""
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none

    if config.online_quantization_config is not None:
        _log.warning("fp4pass: set FP4PASS_VLLM=0 where --quantization-config is given.")
        return True
    current = get_current_vllm_config_or_none()
    kernels = current and current.kernel_config
    chosen = kernels and (kernels.linear_backend_per_quant or kernels.linear_backend != "auto")
    return bool(chosen or envs.VLLM_BATCH_INVARIANT)


class _Method:
    """Methods for a linear method of vLLM: the product of its parameters is fp4pass's."""

    __slots__ = ()
    vllm_class: Any
    fp4pass: Counter[str]
    supports_pre_processed_weights = False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Make the parameters, which no kernel of vLLM changes."""
        self.vllm_class.create_weights(self, layer, *args, **kwargs)
        owner = getattr(layer, "scheme", self)
        kernel = SimpleNamespace(process_weights_after_loading=lambda layer: None)
        setattr(owner, "ocp_mx_linear" if hasattr(owner, "ocp_mx_linear") else "kernel", kernel)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the tensors as they were loaded, with the global scale of each joined layer."""
        # vLLM goes on with the largest one.
        layer.fp4pass_key, scales = global_scales(layer)
        self.vllm_class.process_weights_after_loading(self, layer)
        keep_loaded(layer, layer.weight, layer.weight_scale, scales)
        if not self.fp4pass["said"]:
            self.fp4pass["said"] = 1
            words = "fp4pass: %d of %d linear layers multiply by its kernels, the rest by vLLM's."
            _log.info(words, self.fp4pass["taken"], self.fp4pass["linear"])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias, [..., N]."""
        return multiply(layer, x, bias)
