"""The input cache: what linear layers compute of one input, computed once.

Layers that read one tensor, as q, k and v do, quantize and observe it alike, one after the other.
Each thread has one slot for the input that was read last. Its key is the tensor itself, by a weak
reference, its version, as autograd counts it, and where its memory is. A layer that asks a second
time starts over, so that no write which torch cannot see, as through numpy, lives on in a loop.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._compat.torch import intercepts_operators

_T = TypeVar("_T")


class _Entry:
    """An input and what was computed of it."""

    def __init__(self, x: Tensor, state: Hashable) -> None:
        results: dict[Hashable, Any] = {}
        self.state, self.results = state, results
        # The ids of the layers that have asked.
        self.readers: set[int] = set()
        # Not `self.results`: a reference back would keep the entry until a garbage collection.
        self.input = weakref.ref(x, lambda _: results.clear())


# The entry of each thread.
_SLOT = threading.local()


def compute_once(
    x: Tensor,
    key: Hashable,
    reader: object,
    compute: Callable[[], _T],
    also: Tensor | None = None,
) -> _T:
    """Return `compute()`, or what it gave another layer that read the same input `x`.

    `key`, `x` and `also`, as a static scale, decide the result, which requires no gradient. Nothing
    is kept while operators are traced or captured, in inference mode, which counts no versions, for
    subclasses of Tensor, and once `x` is gone.
    """
    if torch.compiler.is_compiling():
        return compute()
    if not _is_tracked(x) or (also is not None and not _is_tracked(also)) or _is_recorded(x):
        return compute()
    state = _state(x)
    if x.is_cuda:
        state = (state, torch.cuda.current_stream(x.device).cuda_stream)
    if also is not None:
        key = (key, id(also), _state(also))
    entry: _Entry | None = getattr(_SLOT, "entry", None)
    if (
        entry is None
        or entry.input() is not x
        or entry.state != state
        or id(reader) in entry.readers
    ):
        entry = _SLOT.entry = _Entry(x, state)
    entry.readers.add(id(reader))
    if key not in entry.results:
        # With `also`, so that no other tensor gets its id.
        entry.results[key] = (compute(), also)
    result: _T = entry.results[key][0]
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
    """Return what changes when the values of x do."""
    # `x.data = y` changes no version.
    return x._version, x.data_ptr(), x.dtype, x.shape, x.stride()
