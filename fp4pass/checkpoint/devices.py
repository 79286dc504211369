"""Put a loaded model on the devices that a device map names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .._compat.transformers import whole_modules
from ..errors import OptionError, expected
from ..quantization.batches import require_device

# Device maps that accelerate works out.
_BALANCED = ("auto", "balanced", "balanced_low_0", "sequential")


def single_device(device_map: Any) -> torch.device | None:
    """Return the device that a device map names, None for several. Raises OptionError."""
    several = isinstance(device_map, Mapping) or device_map in _BALANCED
    if device_map is None or several:
        return None
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        maps = f"{', '.join(_BALANCED)}, or a dict from names of modules to devices"
        what = f"a device such as 'cuda:0', one of {maps}"
        raise OptionError(expected("device_map", what, device_map)) from error
    require_device(str(device), "device_map=")
    return device


def dispatch(model: nn.Module, device_map: Any) -> None:
    """Put a model where a device map of several devices says, in place."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map in _BALANCED:
        options: dict[str, Any] = {"no_split_module_classes": whole_modules(model)}
        memory = None
        if device_map != "sequential":
            memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **options)
        device_map = infer_auto_device_map(model, max_memory=memory, **options)
    devices = set(device_map.values())
    if len(devices) == 1:
        model.to(devices.pop())
    else:
        dispatch_model(model, device_map)
