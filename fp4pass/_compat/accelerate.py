"""Private APIs of accelerate: hooks that offload parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import require
from .transformers_loading import Later


def hook_of(module: nn.Module) -> Any:
    """Return the hook that accelerate put on a module, None without."""
    return getattr(module, "_hf_hook", None)


def _hooks_of(module: nn.Module) -> Sequence[Any]:
    """Return the hooks that the one of a module is made of."""
    hook = hook_of(module)
    return getattr(hook, "hooks", (hook,))


def require_for(root: nn.Module) -> None:
    """Raise VersionError if hooks on a model are of an accelerate that is too old."""
    if any(hook_of(module) is not None for module in root.modules()):
        require("accelerate")


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


@contextmanager
def held(layer: nn.Module) -> Iterator[None]:
    """Bring all that hooks bring of a layer, once, and keep it until the end."""
    # Its modules are without hooks as long; those that are converted then get new ones.
    hooks = {module: hook for module in layer.modules() if (hook := hook_of(module)) is not None}
    if not hooks:
        yield
        return
    from accelerate.hooks import _accelerate_added_attributes as added

    before = {
        module: {
            key: module.__dict__[key]
            for key in ("_hf_hook", "_old_forward", "forward", *added)
            if key in module.__dict__
        }
        for module in hooks
    }
    weights = {module: module._parameters.get("weight") for module in hooks}
    for module, hook in hooks.items():
        hook.pre_forward(module)
        for key in before[module]:
            del module.__dict__[key]
        old: Any = before[module].get("_old_forward")
        if getattr(old, "__func__", None) is not type(module).forward:
            # Something else had put it there before the hook.
            module.__dict__["forward"] = old
    kinds = {module: type(module) for module in hooks}
    try:
        yield
    finally:
        for module, hook in hooks.items():
            if type(module) is kinds[module] and ("weight" in module._parameters) == (
                weights[module] is not None
            ):
                module.__dict__.update(before[module])
                hook.post_forward(module, None)
            elif isinstance(hook.weights_map, _Later):
                # The part that was not packed.
                make_later(module, hook.weights_map.made)
            else:
                offload_again(module, hook)


class _Later(Mapping[str, Any]):
    """The tensors of a module: some are made when they are asked for."""

    def __init__(self, made: Mapping[str, Later], there: Mapping[str, Tensor]) -> None:
        self.made, self.there = made, there

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name].make() if name in self.made else self.there[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.made, *self.there))

    def __len__(self) -> int:
        return len(self.made) + len(self.there)


def make_later(module: nn.Module, made: Mapping[str, Later]) -> None:
    """Have some parameters of a module be made for each of its calls, and dropped behind it."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    tensors = {**module._parameters, **module._buffers}
    left = {name: make for name, make in made.items() if tensors.get(name) is not None}
    if not left:
        return
    there = {k: x.detach() for k, x in tensors.items() if x is not None and k not in left}
    hook = AlignDevicesHook(
        execution_device=torch.device("cpu"), offload=True, weights_map=_Later(left, there)
    )
    add_hook_to_module(module, hook)


def sources_of(layer: nn.Module) -> list[Tensor]:
    """Return what the parameters of a layer that are made later are made of."""
    maps = (getattr(hook_of(module), "weights_map", None) for module in layer.modules())
    return [
        tensor
        for each in maps
        if isinstance(each, _Later)
        for later in each.made.values()
        for tensor in later.sources
    ]


def is_made_later(module: nn.Module) -> bool:
    """Return whether parameters of a module are made for each of its calls."""
    return isinstance(getattr(hook_of(module), "weights_map", None), _Later)


def offloaded_tensors(root: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return what reads each tensor that hooks keep elsewhere, by its name in the state dict."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for one in _hooks_of(module):
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
    hooks = [hook for m in module.modules() for hook in _hooks_of(m)]
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(one) for one in found if one is not None), None)


def remove_hook(module: nn.Module) -> Any:
    """Remove the hook of a module and return it, None without."""
    hook = hook_of(module)
    if hook is None:
        return None
    require("accelerate")
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(module)
    # accelerate leaves the bound forward of the class before, which would hide the new one.
    module.__dict__.pop("forward", None)
    return hook


def offload_from(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Have the hook of a module bring these tensors, and not its own copies; False without one."""
    found = [one for one in _hooks_of(module) if getattr(one, "offload", False)]
    for one in found:
        one.weights_map.update(tensors)
    return bool(found)


def offload_again(module: nn.Module, hook: Any) -> None:
    """Give a converted module a hook as it had: packed buffers are offloaded if the weight was."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for old in getattr(hook, "hooks", (hook,)):
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
