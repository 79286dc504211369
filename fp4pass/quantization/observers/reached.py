"""Find the layers that calibration reached, and those whose tokens or weights it missed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat.torch import is_compiled
from ...graph.rewrite import OBSERVERS

Hook = TypeVar("Hook", bound=Callable[..., Any])

# On hooks that add to what a prepared model has seen.
_OBSERVES = "_fp4pass_observes"

# Layers that are named in a warning.
_NAMED = 3


def observes(hook: Hook) -> Hook:
    """Mark a hook that adds to what a prepared model has seen."""
    setattr(hook, _OBSERVES, True)
    return hook


@contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Take the observers and the recording of a prepared model off; put them back at the end.

    Calls in between enter no statistic. Code that torch.compile made has its observers inside.
    """
    taken: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = [
        (hooks, list(hooks.items()))
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        if any(hasattr(hook, _OBSERVES) for hook in hooks.values())
    ]
    try:
        for hooks, found in taken:
            for key in [key for key, hook in found if hasattr(hook, _OBSERVES)]:
                del hooks[key]
        yield
    finally:
        # In the order in which they were: the hooks of others may stand between.
        for hooks, found in taken:
            since = [each for each in hooks.items() if each not in found]
            hooks.clear()
            hooks.update([*found, *since])


class _WeightReads(TorchFunctionMode):
    """Collect the ids of those tensors that functions compute other tensors from."""

    def __init__(self, wanted: frozenset[int]) -> None:
        super().__init__()
        self.wanted, self.found = wanted, set[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A dtype or a shape is not what a weight is for.
        results = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(each, Tensor) for each in results):
            seen = {id(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
            self.found |= seen & self.wanted
        return result


@contextmanager
def track_weight_reads(layers: Mapping[str, nn.Module], found: set[str]) -> Iterator[None]:
    """Add to `found` the names of those layers whose weights are read, each by its module."""
    keys = {name: id(module._parameters.get("weight")) for name, module in layers.items()}
    with _WeightReads(frozenset(keys.values())) as reads:
        yield
    found |= {name for name, key in keys.items() if key in reads.found}


@contextmanager
def track_unreached_reads(model: nn.Module, found: set[str]) -> Iterator[None]:
    """Add to `found` those layers of a prepared model that are read but were never called."""
    waiting = {
        name: module
        for name, module in model.named_modules()
        if OBSERVERS in module.__dict__ and not any(o.has_seen for o in module.__dict__[OBSERVERS])
    }
    # Code is compiled for the modes that are on, and the fused path of attention leaves for any.
    attention = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    if not waiting or attention or is_compiled(model):
        yield
        return
    with track_weight_reads(waiting, found):
        yield


def seen_tokens(model: nn.Module, recording: Any) -> int:
    """Return how many tokens reached a prepared model so far: the most that any layer saw."""
    if recording is not None:
        return recording.tokens
    layers = (module.__dict__.get(OBSERVERS, ()) for module in model.modules())
    return max((sum(each.tokens for each in observers) for observers in layers), default=0)


def unmapped_layers(root: nn.Module) -> dict[str, Tensor]:
    """Return each layer, once, whose inputs a mask could not be mapped to, with that mask."""
    found = {}
    for name, module in root.named_modules():
        for observer in module.__dict__.get(OBSERVERS, ()):
            if observer.unmapped is not None and not observer.is_unmapped_said:
                found[name], observer.is_unmapped_said = observer.unmapped, True
    return found


def warn_of_unmapped(layers: Mapping[str, Tensor], stacklevel: int) -> None:
    """Warn of layers of these names, if there are any."""
    if not layers:
        return
    names = list(layers)
    named = ", ".join(name or "the model" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more layers" if len(names) > _NAMED else ""
    share = max(1 - float(mask.float().mean()) for mask in layers.values())
    warnings.warn(
        f"attention_mask hides {100 * share:.1f} % of the tokens of a batch, but the inputs of "
        f"{named}{more} are not of its [batch, tokens]: all of them entered the statistics. If "
        "padding is among them, calibrate on sequences of full length.",
        stacklevel=stacklevel + 1,
    )
