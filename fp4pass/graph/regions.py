"""Regions of a live model: modules that run their graph instead of their forward, in place.

The owner of a region keeps its identity, its children and its name; only its class becomes a
subclass whose forward runs the graph. The graph is a cache beside the state of the module: not in
`_modules`, left out by deepcopy and pickle, traced again when what it has read has changed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, QuantizedLinear, Usage, is_autocast
from ..quantization.observer import OBSERVERS, Observer, insert_observers, shared_observer
from .guards import Guards, is_hooked, traced_class
from .match import LinearNode, find_linears, is_linear
from .rewrite import call_unhooked, rewrite_linears, share_quantize
from .trace import NotProvable, trace

# Where an owner keeps its region.
_REGION = "_fp4pass_region"


class RegionOwner:
    """What the class of a region's owner has in front of the class that the user wrote."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """deepcopy and pickle: as the user's class, to become an owner again."""
        # From Python 3.11 on, every object has a __getstate__.
        getstate = getattr(self, "__getstate__", None)
        state = self.__dict__ if getstate is None else getstate()
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k != _REGION}
        return _rebuild, (traced_class(self),), state  # type: ignore[arg-type]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    module = cls.__new__(cls)
    module.__class__ = _owner_class(cls)
    return module


_OWNER_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _owner_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The one subclass of `cls`, with its name and signature, that runs regions."""
    if cls in _OWNER_CLASSES:
        return _OWNER_CLASSES[cls]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_plain_call(args, kwargs):
            graph_module = _current(self)
            if graph_module is not None:
                return graph_module(*args)
        return cls.forward(self, *args, **kwargs)

    body = {
        "forward": forward,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "fp4pass_region": True,
    }
    owner_class = _OWNER_CLASSES[cls] = type(cls.__name__, (RegionOwner, cls), body)
    return owner_class


def _is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a graph may stand for this call.

    torch.compile and export read the original forward, which they guard themselves; autocast is
    left to the converted linears; hooks on all modules must see every module.
    """
    return (
        not torch.compiler.is_compiling()
        and len(args) == 1
        and not kwargs
        and type(args[0]) is Tensor
        and not is_autocast(args[0].device)
        and not nn.modules.module._has_any_global_hook()
    )


def _current(owner: nn.Module) -> fx.GraphModule | None:
    """The region's graph module, traced again if it does not hold; None if there is none."""
    region: tuple[nn.Module, fx.GraphModule | None, Guards] | None = owner.__dict__.get(_REGION)
    # A replica, as nn.DataParallel makes, has a copy of the attributes of another owner.
    if region is None or region[0] is not owner or not region[2].hold():
        region = owner.__dict__[_REGION] = (owner, *_build(owner))
    return region[1]


def _build(owner: nn.Module) -> tuple[fx.GraphModule | None, Guards]:
    """Trace a region and run the passes on it: prepared linears get observers that they share,
    converted ones become operators, and those with hooks of the user's stay calls."""
    try:
        traced = trace(owner)
    except NotProvable:
        # Until other children are put in: adapters that are taken out again, for one.
        below = [(m, *item) for m in owner.modules() for item in m._modules.items()]
        found = [(m, n, child, type(child)) for m, n, child in below if child is not None]
        return None, Guards(children=found)
    graph = traced.module.graph
    called = [linear.holder for linear in find_linears(graph) if linear.called]
    free = {holder for holder in called if not is_hooked(holder)}
    traced.guards.plain.extend(free)

    def usage(linear: LinearNode) -> Usage | None:
        if linear.holder not in free or not isinstance(linear.holder, QuantizedLinear):
            return None
        for name in (PACKED, SCALE, GLOBAL, INPUT_GLOBAL, "bias"):
            tensor = getattr(linear.holder, name)
            traced.guards.objects.append((linear.holder, name, tensor))
            looked_at = name in (GLOBAL, INPUT_GLOBAL) and tensor is not None
            # Passes may look at the value. Inference tensors have no version, and no later values.
            if looked_at and not tensor.is_inference():
                traced.guards.versions.append((tensor, tensor._version))
        how = linear.holder.usage
        for name, value in dataclasses.asdict(how).items():
            traced.guards.constants.append((linear.holder, name, value))
        return how

    def observer(group: list[LinearNode]) -> Observer:
        holders = [linear.holder for linear in group]
        traced.guards.objects.extend((holder, "bias", holder.bias) for holder in holders)
        own: Observer = holders[0].__dict__[OBSERVERS][0]
        return shared_observer(holders, own.needs, own.columns)

    def observed(linear: LinearNode) -> bool:
        plain = linear.called and linear.holder in free and isinstance(linear.holder, nn.Linear)
        return plain and bool(linear.holder.__dict__.get(OBSERVERS))

    insert_observers(graph, observed, observer)
    call_unhooked(graph, observed)
    rewrite_linears(graph, usage)
    # Their values are guarded.
    share_quantize(graph, by_value=True)
    traced.module.recompile()
    return traced.module, traced.guards


def install_regions(root: nn.Module) -> int:
    """Make an owner of every largest module below `root`, itself included, that is provably a
    function of one tensor and holds a linear that is observed or converted. Returns how many."""
    inlined: set[nn.Module] = set()
    count = 0
    for module in root.modules():
        if module in inlined or is_linear(module) or isinstance(module, QuantizedLinear | Observer):
            continue
        if not _can_own(module):
            continue
        try:
            traced = trace(module)
        except NotProvable:
            continue
        inlined.update(traced.inlined)
        handled = [
            linear
            for linear in find_linears(traced.module.graph)
            if isinstance(linear.holder, QuantizedLinear) or OBSERVERS in linear.holder.__dict__
        ]
        module.__dict__.pop(_REGION, None)
        if handled and not isinstance(module, RegionOwner):
            module.__class__ = _owner_class(type(module))
            count += 1
    return count


def remove_regions(root: nn.Module) -> int:
    """Give the owners of regions below `root` their own class back. Returns how many there were."""
    owners: list[nn.Module] = [m for m in root.modules() if isinstance(m, RegionOwner)]
    for owner in owners:
        owner.__dict__.pop(_REGION, None)
        owner.__class__ = traced_class(owner)
    return len(owners)


def _can_own(module: nn.Module) -> bool:
    """Whether the class's forward is what runs, and copies and pickles are those of any object."""
    cls = traced_class(module)
    return (
        "forward" not in module.__dict__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and not hasattr(cls, "__deepcopy__")
    )


def region_graph(module: nn.Module) -> fx.GraphModule | None:
    """The graph that a module runs instead of its forward, if it owns a region."""
    return _current(module) if isinstance(module, RegionOwner) else None
