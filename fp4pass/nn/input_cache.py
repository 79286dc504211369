"""The input cache: linear layers that read one input compute its quantization once.

Layers that read one tensor, as q, k and v do, quantize and observe it alike, one after the other.
Each module that calls several such layers has a slot for the input that they read last, in each
thread, and only while its forward runs. The key is the tensor itself, by a weak reference, its
version, as autograd counts it, and where its memory is. A layer that asks a second time starts
over. So a write that torch cannot see, as through numpy, may come between two forwards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._compat.torch import add_forward_hooks, intercepts_operators, remove_forward_hooks

_T = TypeVar("_T")

# On a module: the layers that it calls. On such a layer: the same.
_CALLS, _CALLED_BY = "_fp4pass_calls", "_fp4pass_called_by"

# The name of the hooks.
_HOOKS = "fp4pass_input_cache"


class Siblings:
    """Layers that one module calls: they share results that depend on an input they all read."""


class _Slot:
    """The input that siblings read last in a forward, and the results for it."""

    def __init__(self) -> None:
        self.input: Callable[[], Tensor | None] = lambda: None
        self.state: Hashable = None
        self.results: dict[Hashable, Any] = {}
        # The ids of the layers that have asked.
        self.readers = set[int]()

    def take(self, x: Tensor, state: Hashable) -> None:
        """Start over with another input."""
        results: dict[Hashable, Any] = {}
        self.state, self.results, self.readers = state, results, set()
        # Not `self.results`: a reference back would keep the slot until a garbage collection.
        self.input = weakref.ref(x, lambda _: results.clear())


class _Slots(threading.local):
    """The slots of a thread, by siblings whose caller's forward runs."""

    def __init__(self) -> None:
        self.open: dict[Siblings | None, _Slot] = {}


_SLOTS = _Slots()


def share_among(caller: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Let layers that a module calls share results for an input, as long as its forward runs."""
    siblings = caller.__dict__[_CALLS] = Siblings()
    for layer in layers:
        layer.__dict__[_CALLED_BY] = siblings
    add_forward_hooks(caller, _HOOKS, _open, _close)


def share_nothing(model: nn.Module) -> None:
    """Undo `share_among` in a model."""
    for module in model.modules():
        module.__dict__.pop(_CALLED_BY, None)
        if module.__dict__.pop(_CALLS, None) is not None:
            remove_forward_hooks(module, _HOOKS)


def _open(caller: nn.Module, *args: Any) -> None:
    if not torch.compiler.is_compiling():
        _SLOTS.open[caller.__dict__[_CALLS]] = _Slot()


def _close(caller: nn.Module, *args: Any) -> None:
    if not torch.compiler.is_compiling():
        _SLOTS.open.pop(caller.__dict__[_CALLS], None)


def compute_once(
    x: Tensor,
    key: Hashable,
    layer: nn.Module,
    compute: Callable[[], _T],
    also: Tensor | None = None,
) -> _T:
    """Return `compute()`, or its result for a sibling of the layer that read the same input `x`."""
    # `key`, `x` and `also`, as a static scale, decide the result, which requires no gradient.
    # Nothing is kept while operators are traced or captured, in inference mode, which counts no
    # versions, for subclasses of Tensor, once `x` is gone, and once the forward of the caller ends.
    if torch.compiler.is_compiling():
        return compute()
    slot = _SLOTS.open.get(layer.__dict__.get(_CALLED_BY))
    if slot is None or not _is_tracked(x) or (also is not None and not _is_tracked(also)):
        return compute()
    if _is_recorded(x):
        return compute()
    state = _state(x)
    if x.is_cuda:
        state = (state, torch.cuda.current_stream(x.device).cuda_stream)
    if also is not None:
        key = (key, id(also), _state(also))
    if slot.input() is not x or slot.state != state or id(layer) in slot.readers:
        slot.take(x, state)
    slot.readers.add(id(layer))
    if key not in slot.results:
        # With `also`, so that no other tensor gets its id.
        slot.results[key] = (compute(), also)
    result: _T = slot.results[key][0]
    return result


def _is_tracked(x: Tensor) -> bool:
    """Return whether x is a plain tensor whose changes are counted."""
    return type(x) is Tensor and (x.is_cpu or x.is_cuda) and not x.is_inference()


def _is_recorded(x: Tensor) -> bool:
    """Return whether operators may be recorded to run again, or changes not be counted."""
    return (
        torch.is_inference_mode_enabled()
        or intercepts_operators()
        or torch.jit.is_tracing()
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _state(x: Tensor) -> Hashable:
    """Return facts of x, one of which changes whenever its values do."""
    # `x.data = y` changes no version.
    return x._version, x.data_ptr(), x.dtype, x.shape, x.stride()
