"""The plugin of SGLang: its linear layers with weights in nvfp4 multiply by fp4pass's kernels."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from .engines import TESTED, global_scales, keep_loaded, multiply

# SGLang shows the messages of its own loggers.
_log = logging.getLogger("sglang.srt.plugins.fp4pass")

# The release that the names below are of.
_RELEASE = (0, 5, 23)

_LAYERS = "sglang.srt.layers.quantization"
# Linear layers with inputs in floating point, and the name of their product.
_METHODS = {
    f"{_LAYERS}.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4."
    "CompressedTensorsW4A16Fp4": "apply_weights",
    f"{_LAYERS}.modelopt_quant.ModelOptNvFp4A16LinearMethod": "apply",
}


def register() -> None:
    """Have SGLang multiply packed linear layers by fp4pass's kernels.

    SGLang calls it in each of its processes, as the entry point `sglang.srt.plugins`. It hooks the
    linear layers of folders of compressed-tensors and ModelOpt with weights in nvfp4 whose inputs
    SGLang has in floating point. Experts and layers in other formats stay with SGLang.

    It does nothing where the environment variable FP4PASS_SGLANG is 0, and changes no layer on a
    GPU but those of compute capability 8.9 and 9.0; 1 has it serve later GPUs, which the kernels
    were not tested on. An SGLang other than 0.5.23 stays as it is, and a line of the log says so.
    A second call changes nothing.

    Example:
        >>> from fp4pass.integrations.sglang import register
        >>> register()  # without SGLang nothing changes
    """
    if os.environ.get("FP4PASS_SGLANG", "") == "0":
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.version import __version__
    except ImportError as error:
        _log.warning("fp4pass: its plugin is off (%s).", error)
        return
    if Version(__version__).release[:3] != _RELEASE:
        words = "fp4pass: its plugin is for SGLang %d.%d.%d, and leaves %s as it is."
        _log.warning(words, *_RELEASE, __version__)
        return
    _hook(HookRegistry.register, HookType.AROUND)


@functools.cache
def _hook(register: Callable[..., None], around: Any) -> None:
    for path, product in _METHODS.items():
        register(f"{path}.process_weights_after_loading", _process, around)
        register(f"{path}.{product}", _apply, around)


@functools.cache
def _serves(device: torch.device) -> bool:
    """Return whether layers on a device are multiplied, and log it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    number = 10 * capability[0] + capability[1]
    asked = os.environ.get("FP4PASS_SGLANG", "") == "1"
    found = number in TESTED or (asked and number > max(TESTED))
    if found:
        _log.info("fp4pass: linear layers in nvfp4 on %s multiply by its kernels.", device)
    return found


def _process(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """Keep the tensors as they were loaded, with the global scale of each joined layer."""
    packed = getattr(layer, "weight_packed", None)
    packed = layer.weight if packed is None else packed
    if not _serves(packed.device):
        return original(method, layer)
    for name in ("input_scale", "input_global_scale"):
        if hasattr(layer, name):
            delattr(layer, name)
    layer.fp4pass_key, scales = global_scales(layer)
    keep_loaded(layer, packed, layer.weight_scale, scales)
    # SGLang takes an output embedding without it for a dense one.
    layer.workspace = None
    return None


def _apply(
    original: Callable[..., Any], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Any:
    """Return x W^T + bias, [..., N]."""
    if hasattr(layer, "fp4pass_key"):
        return multiply(layer, x, bias)
    return original(method, layer, x, bias)
