"""Private APIs of accelerate: hooks that offload parameters. Tested with 1.10 to 1.15."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import require_version

# The versions that the tests have run with.
_VERSIONS = ">=1.10,<1.16"


def hook_of(module: nn.Module) -> Any:
    """Return the hook that accelerate put on a module, None without."""
    return getattr(module, "_hf_hook", None)


def require_tested(root: nn.Module) -> None:
    """Raise VersionError if hooks on a model are of an accelerate that is not tested."""
    if any(hook_of(module) is not None for module in root.modules()):
        require_version("accelerate", _VERSIONS, extra="hf")


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Bring the parameters of an offloaded module to its device for as long as needed."""
    hook = hook_of(module)
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)


def offloaded_tensors(root: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return what reads each tensor that hooks keep elsewhere, by its name in the state dict."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        hook = hook_of(module)
        for one in getattr(hook, "hooks", (hook,)):
            if not getattr(one, "offload", False) or one.weights_map is None:
                continue
            tensors = [module.named_parameters(recurse=one.place_submodules)]
            if one.offload_buffers:
                tensors.append(module.named_buffers(recurse=one.place_submodules))
            for name, tensor in itertools.chain(*tensors):
                if tensor.is_meta:
                    read = functools.partial(one.weights_map.__getitem__, name)
                    found[f"{path}.{name}" if path else name] = read
    return found


def execution_device(module: nn.Module) -> torch.device | None:
    """Return where hooks run the modules below, None without hooks that name a device."""
    hooks = [hook for m in module.modules() if (hook := hook_of(m)) is not None]
    each = [one for hook in hooks for one in getattr(hook, "hooks", (hook,))]
    found = (getattr(hook, "execution_device", None) for hook in each)
    return next((torch.device(one) for one in found if one is not None), None)


def remove_hook(module: nn.Module) -> Any:
    """Remove the hook of a module and return it, None without."""
    hook = hook_of(module)
    if hook is None:
        return None
    require_version("accelerate", _VERSIONS, extra="hf")
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(module)
    # accelerate leaves the bound forward of the class before, which would hide the new one.
    module.__dict__.pop("forward", None)
    return hook


def offload_again(module: nn.Module, hook: Any) -> None:
    """Give a converted module a hook as it had: packed buffers are offloaded if the weight was."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    for old in hooks:
        if not isinstance(old, AlignDevicesHook):
            add_hook_to_module(module, old, append=True)
            continue
        new = AlignDevicesHook(
            execution_device=old.execution_device,
            offload=old.offload,
            io_same_device=old.io_same_device,
            offload_buffers=old.offload,
            place_submodules=old.place_submodules,
            skip_keys=old.skip_keys,
        )
        add_hook_to_module(module, new, append=True)
        dataset = getattr(old.weights_map, "dataset", None)
        if isinstance(dataset, dict):
            dataset.pop(f"{old.weights_map.prefix}weight", None)
