"""Observers: the statistics of what linear layers read."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import CalibrationError
from ..graph.rewrite import OBSERVERS
from ..input_cache import compute_once
from ..kernels.statistics.naive import diagonal_blocks
from ..methods import STATISTICS, Stats
from ..ops.checks import require_dense
from .visible_tokens import visible_rows

# Hessian, token count and amax, which one operator adds to, and the other statistics.
State = tuple[Tensor, ...]

# Observers that share what they have seen may be called from several threads.
_LOCK = threading.RLock()


class _Sequence:
    """The name of a sequence of inputs: an object of its own."""


class _Seen:
    """What a sequence of inputs adds up to, for the observers that have seen just these inputs.

    Attributes:
        state: Changed in place only by a single holder, which then makes a new object of it.
        holders: How many observers it belongs to.
        sequence: Names the inputs; None if there are none yet.
    """

    def __init__(self, state: State, sequence: _Sequence | None) -> None:
        self.state, self.sequence = state, sequence
        self.holders = 1


class Observer(nn.Module):
    """Accumulates the statistics of what passes through it, and returns nothing.

    It is a node of a graph or, through `hook`, runs before a layer that no graph holds. Its state
    moves to the device of its input at the first call; it is neither a buffer nor a parameter, so
    that it is not saved and `.to(bfloat16)` does not cast it. It is made before any call:
    torch.compile would merge what two observers make in one graph.

    Args:
        needs: Fields of Stats to collect.
        columns: K, the width of the input.
        sharers: How many layers a graph feeds it for, 0 for a hook.

    Attributes:
        part: Which tokens of an exported graph it is fed with (visible_tokens.py).
        unmapped: A mask that hides tokens, but is not of the rows that it saw.
    """

    # For fx: not dead code, though it has no result, and no obstacle to merging what it reads.
    _is_impure = True
    only_reads = True

    unmapped: Tensor | None

    def __init__(self, needs: tuple[str, ...], columns: int, sharers: int = 0) -> None:
        super().__init__()
        self.needs = needs
        self.columns = columns
        self.sharers = sharers
        self.part, self.unmapped, self.is_unmapped_said = "", None, False
        # The whole Hessian has the blocks in it.
        self._hessian = "hessian" if "hessian" in needs else "block_hessian"
        self._others = tuple(name for name in needs if STATISTICS[name]["update"])
        # What inference mode makes could not be added to outside of it.
        with torch.inference_mode(False):
            zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
            shape = STATISTICS[self._hessian]["shape"](columns)
            hessian = zeros(shape) if self._hessian in needs else zeros(0, *shape[1:])
            others = [zeros(STATISTICS[name]["shape"](columns)) for name in self._others]
            state = (hessian, zeros(1, dtype=torch.int64), zeros(1), *others)
        self._seen = _Seen(state, None)

    @property
    def has_seen(self) -> bool:
        """Whether any input was added."""
        return self._seen.sequence is not None

    @property
    def tokens(self) -> int:
        """How many tokens were added."""
        return int(self.state[1])

    @property
    def state(self) -> State:
        """Hessian, token count, amax and the rest; equal sequences of inputs may share it."""
        return self._seen.state

    def replace(self, state: State) -> None:
        """Set the statistics."""
        self._seen.holders -= 1
        self._seen = _Seen(state, _Sequence())

    def forward(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Add an input x [..., K] of the layers; reference: the same tokens in the float model."""
        # An exported graph has no observer to write to, and its fake tensors must not stay here.
        # In torch 2.11 is_exporting is true in torch.compile as well, but there x is a Tensor.
        if torch.compiler.is_exporting() and type(x) is not Tensor:
            return
        if x.shape[-1:] != (self.columns,):
            # The layer raises for it.
            return
        if torch.compiler.is_compiling():
            self._observe(x, reference)
            return
        with _LOCK:
            self._observe(x, reference)

    def _observe(self, x: Tensor, reference: Tensor | None) -> None:
        state = self._seen.state
        with torch.inference_mode(False):
            if self._seen.holders > 1:
                state = tuple(total.clone() for total in state)
            if state[0].device != x.device:
                state = tuple(total.to(x.device) for total in state)
        observe = ops.observe_full if self._hessian == "hessian" else ops.observe
        visible = self._visible(x)
        # Most batches hide nothing, and graphs of them have no argument more.
        observe(x.detach(), *state[:3], *(() if visible is None else (visible,)))
        for name, total in zip(self._others, state[3:], strict=True):
            STATISTICS[name]["update"](total, x.detach(), reference)
        self.replace(state)

    def _visible(self, x: Tensor) -> Tensor | None:
        """Return which tokens of x count, None if all do."""
        rows = visible_rows(x, self.part)
        if rows.unmapped is not None:
            self.unmapped = rows.unmapped
        return rows.visible

    def stats(self) -> Stats:
        """Return what it has seen."""
        hessian, count, amax, *others = self.state
        found = dict(zip(self._others, others, strict=True))
        if self._hessian in self.needs:
            found[self._hessian] = hessian
        if "hessian" in found:
            found["block_hessian"] = diagonal_blocks(hessian)
        return Stats(tokens=int(count), input_amax=float(amax), **found)

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe what a layer is called with, as a forward pre-hook with keyword arguments.

        Observers that have seen the same inputs so far, and read this one in turn, stay equal: the
        first adds it, and the others take what that gave.
        """
        # Not as a module, which would look for hooks of its own for every layer of every call.
        x = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_compiling():
            self.forward(x)
            return
        if not isinstance(x, Tensor) or x.is_meta:
            # There is nothing to see, and the layer says what is wrong.
            return
        require_dense(f"The input of a prepared {type(module).__name__}", x)
        with _LOCK:
            key = ("observe", self.needs, self.columns, self._seen.sequence)
            # A tensor that is read in two calls may have tokens that one of them hides.
            visible = self._visible(x)
            add = functools.partial(self._add, x)
            seen = compute_once(x, key, module, add, visible, tensors=_state_of)()
            if seen is None:
                # Whoever had it has gone on since.
                self._add(x)
            elif seen is not self._seen:
                self._seen.holders -= 1
                seen.holders += 1
                self._seen = seen

    def _add(self, x: Tensor) -> weakref.ref[_Seen]:
        """What it has seen once x is added; a weak reference, for the cache must not keep it."""
        self.forward(x)
        return weakref.ref(self._seen)


def _state_of(seen: weakref.ref[_Seen]) -> State | None:
    found = seen()
    return None if found is None else found.state


def is_observer_hook(hook: object) -> bool:
    """Return whether a hook is `Observer.hook`."""
    return hasattr(getattr(hook, "__self__", None), "has_seen")


def shared_observer(holders: Sequence[nn.Module], needs: tuple[str, ...], columns: int) -> Observer:
    """Return the observer that exactly these modules share, a new one if there is none yet."""
    lists: list[list[Observer]] = [holder.__dict__[OBSERVERS] for holder in holders]
    for observer in lists[0]:
        shared = all(any(observer is other for other in others) for others in lists)
        if observer.sharers == len(holders) and shared:
            return observer
    observer = Observer(needs, columns, sharers=len(holders))
    for observers in lists:
        observers.append(observer)
    return observer


def collect(observers: Sequence[Observer], name: str) -> Stats:
    """Return the sum of what the observers of the layer of this name saw.

    Raises CalibrationError if a calibration input held NaN or infinity.
    """
    seen = [o.stats() for o in observers if o.tokens]
    if not seen:
        return Stats()
    stats = functools.reduce(lambda a, b: a.merged(b), seen)
    finite = all(math.isfinite(each.input_amax) for each in seen)
    if not finite or not all(total.isfinite().all() for total in stats.totals().values()):
        what = f"reached {stats.input_amax:.3g}, whose square float32 cannot hold"
        if not finite:
            what = "held NaN or infinity"
        raise CalibrationError(
            f"{name or 'the model'}: its inputs {what} during calibration. Find the batch or the "
            "layer they come from, then prepare and calibrate again."
        )
    return stats
