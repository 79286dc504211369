"""Layers that calibration never reached: why, and what becomes of them."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._compat.torch import is_compiled
from ..observers.observer import OBSERVERS
from .layer_inputs import Recording
from .plan import LayerPlan, Plan
from .scan import SkippedLayer, skip

_READ = "its weight is read without calling the layer"
_UNREACHED = "calibration never reached it"

# Why layers are skipped that a recipe alone would quantize.
BY_CALIBRATION = (_READ, _UNREACHED)


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


def seen_tokens(model: nn.Module, recording: Recording | None) -> int:
    """Return how many tokens reached a prepared model so far: the most that any layer saw."""
    if recording is not None:
        return max((stack.tokens for stack in recording.stacks), default=0)
    layers = (module.__dict__.get(OBSERVERS, ()) for module in model.modules())
    return max((sum(each.tokens for each in observers) for observers in layers), default=0)


def with_unreached(plan: Plan, read: Collection[str]) -> Plan:
    """Return the plan with layers skipped, or quantized by "sse", that calibration never reached.

    Those that are left are errors of `require_statistics`.
    """

    def settled(layer: LayerPlan) -> LayerPlan | SkippedLayer:
        config = layer.config
        if layer.stats.tokens:
            return layer
        lacking = not all(map(layer.stats.has, config.needs))
        if layer.name in read and (lacking or not config.weight_only):
            return skip(layer, _READ)
        if not lacking or config.unreached == "error":
            return layer
        if config.unreached == "skip":
            return skip(layer, _UNREACHED)
        config = config.override({"method": config.unreached, "weight_only": True})
        return dataclasses.replace(layer, config=config)

    return Plan(tuple(settled(e) if isinstance(e, LayerPlan) else e for e in plan.entries))


def covering_globs(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return patterns that match all of some names and none of the others, few and short."""
    left, found = list(names), []
    while left:
        best = max(_patterns(left[0]), key=lambda p: (not _matches(p, others), _matches(p, left)))
        found.append(best)
        left = [name for name in left[1:] if not fnmatch.fnmatchcase(name, best)]
    return found


def _patterns(name: str) -> list[str]:
    """Return patterns that match a name, those that say less of it first; the last is the name."""
    parts, numbered = name.split("."), without_numbers(name).split(".")
    found = []
    for i in range(1, len(parts)):
        found += [".".join([*each[:i], "*"]) for each in (numbered, parts) if each[i - 1] != "*"]
    tails = [".".join(["*", *numbered[i:]]) for i in range(len(parts) - 1, 0, -1)]
    return [*found, *tails, ".".join(numbered), name]


def without_numbers(name: str) -> str:
    """Return a name with a * for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _matches(pattern: str, names: Collection[str]) -> int:
    return sum(fnmatch.fnmatchcase(name, pattern) for name in names)
