"""Place the modules of a loaded model as a device map says."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.transformers import whole_modules
from ..core.files import path_of
from ..core.machine import require_device
from ..errors import OptionError, expected, nearest
from .layouts import BUFFERS
from .source_files import find_shards
from .writer import ShardWriter, bytes_of

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


def require_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise OptionError unless a map gives every module a place, and has no other names."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= set(model.state_dict())
    split = any(str(name).rpartition(".")[2] in BUFFERS for name in device_map)
    for name in device_map:
        if name not in known and not split:
            wanted = f"names of modules{nearest(name, known)}"
            raise OptionError(expected("device_map", wanted, repr(name)))
    for name in model.state_dict():
        above = ("", *itertools.accumulate(name.split("."), "{}.{}".format))
        if not split and not any(each in device_map for each in above):
            raise OptionError(expected("device_map", f"a place for {name}", repr(dict(device_map))))
    for name, place in device_map.items():
        if place != "disk" and single_device(place) is None:
            raise OptionError(expected("device_map", f"a device for {name!r}", repr(place)))


def dispatch(
    model: nn.Module, device_map: Any, offload_folder: str | os.PathLike[str] | None
) -> None:
    """Put a model where a device map of several devices says, in place."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map in _BALANCED:
        options: dict[str, Any] = {
            "no_split_module_classes": whole_modules(model),
            "offload_buffers": True,
        }
        memory = None
        if device_map != "sequential":
            balanced = {"no_split_module_classes": options["no_split_module_classes"]}
            memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **balanced)
        device_map = infer_auto_device_map(model, max_memory=memory, **options)
    devices = set(device_map.values())
    if len(devices) == 1 and "disk" not in devices:
        model.to(devices.pop())
        return
    index = _on_disk(model, device_map, offload_folder) if "disk" in devices else None
    # Packed weights are buffers.
    dispatch_model(model, device_map, offload_index=index, offload_buffers=True)


def _on_disk(
    model: nn.Module, device_map: Mapping[str, Any], folder: str | os.PathLike[str] | None
) -> dict[str, dict[str, str]]:
    """Write what a device map has on the disk, and return accelerate's index of it."""
    if folder is None:
        target = Path(tempfile.mkdtemp(prefix="fp4pass-"))
        weakref.finalize(model, shutil.rmtree, target, ignore_errors=True)
    else:
        target = path_of(folder, "offload_folder")
        target.mkdir(parents=True, exist_ok=True)
    writer, names = ShardWriter(target, "offloaded.safetensors", bytes_of("1GB")), []
    for name, tensor in model.state_dict().items():
        above = ("", *itertools.accumulate(name.split("."), "{}.{}".format))
        nearest_place = next(device_map[each] for each in reversed(above) if each in device_map)
        if nearest_place == "disk":
            # Tied tensors are written for each name.
            writer.add(name, tensor.detach().cpu().contiguous().clone())
            names.append(name)
    writer.close()
    files = find_shards(target, "offloaded.safetensors")
    return {name: {"safetensors_file": str(files[name]), "weight_name": name} for name in names}
