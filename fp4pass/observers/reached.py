"""Layers that calibration reached, and those whose weights were read without a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._compat.torch import is_compiled
from ..graph.rewrite import OBSERVERS


class _Reads(TorchFunctionMode):
    """Notes the tensors, by identity, that functions make others of."""

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
def noting_reads(layers: Mapping[str, nn.Module], found: set[str]) -> Iterator[None]:
    """Add to `found` the names of those layers whose weights are read, each by its module."""
    keys = {name: id(module._parameters.get("weight")) for name, module in layers.items()}
    with _Reads(frozenset(keys.values())) as reads:
        yield
    found |= {name for name, key in keys.items() if key in reads.found}


@contextmanager
def noting_unreached(model: nn.Module, found: set[str]) -> Iterator[None]:
    """Note reads of the layers of a prepared model that no batch has reached so far."""
    waiting = {
        name: module
        for name, module in model.named_modules()
        if not any(observer.has_seen for observer in module.__dict__.get(OBSERVERS, ()))
        and OBSERVERS in module.__dict__
    }
    # Code is compiled for the modes that are on, and the fused path of attention leaves for any.
    attention = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    if not waiting or attention or is_compiled(model):
        yield
        return
    with noting_reads(waiting, found):
        yield


def seen_tokens(model: nn.Module, recording: Any) -> int:
    """Return how many tokens reached a prepared model so far: the most that any layer saw."""
    if recording is not None:
        return max((stack.tokens for stack in recording.stacks), default=0)
    layers = (module.__dict__.get(OBSERVERS, ()) for module in model.modules())
    return max((sum(each.tokens for each in observers) for observers in layers), default=0)
