"""Observers: the statistics of what linear layers read."""

from __future__ import annotations

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
from ..kernels.statistics.reference import HESSIAN_BLOCK, diagonal_blocks, observe_cross_ref
from ..methods import Stats

# Hessian, token count and amax.
State = tuple[Tensor, Tensor, Tensor]

# Observers that share what they have seen may be called from several threads.
_LOCK = threading.Lock()


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
    """

    # For fx: not dead code, though it has no result, and no obstacle to merging what it reads.
    _is_impure = True
    only_reads = True

    def __init__(self, needs: tuple[str, ...], columns: int, sharers: int = 0) -> None:
        super().__init__()
        self.needs = needs
        self.columns = columns
        self.sharers = sharers
        groups = math.ceil(columns / HESSIAN_BLOCK) if "block_hessian" in needs else 0
        # What inference mode makes could not be added to outside of it.
        with torch.inference_mode(False):
            blocks = (groups, HESSIAN_BLOCK, HESSIAN_BLOCK)
            # The whole Hessian has the blocks in it.
            shape = (columns, columns) if "hessian" in needs else blocks
            state = (
                torch.zeros(shape, dtype=torch.float32, device="cpu"),
                torch.zeros(1, dtype=torch.int64, device="cpu"),
                torch.zeros(1, dtype=torch.float32, device="cpu"),
            )
            whole = (columns, columns) if "cross" in needs else (0, 0)
            self.cross = torch.zeros(whole, dtype=torch.float32, device="cpu")
        self._seen = _Seen(state, None)

    @property
    def state(self) -> State:
        """Hessian, token count and amax; equal sequences of inputs may share it."""
        return self._seen.state

    def replace(self, state: State) -> None:
        """Set the statistics."""
        self._seen.holders -= 1
        self._seen = _Seen(state, _Sequence())

    def forward(self, x: Tensor) -> None:
        """Add an input to the statistics.

        Args:
            x: [..., K] float, the input of the layers observed.
        """
        # An exported graph has no observer to write to, and its fake tensors must not stay here.
        # In torch 2.11 is_exporting is true in torch.compile as well, but there x is a Tensor.
        if torch.compiler.is_exporting() and type(x) is not Tensor:
            return
        if x.shape[-1:] != (self.columns,):
            # The layer raises for it.
            return
        state = self._seen.state
        with torch.inference_mode(False):
            if self._seen.holders > 1:
                state = (state[0].clone(), state[1].clone(), state[2].clone())
            if state[0].device != x.device:
                state = (state[0].to(x.device), state[1].to(x.device), state[2].to(x.device))
        observe = ops.observe_full if "hessian" in self.needs else ops.observe
        observe(x.detach(), *state)
        self.replace(state)

    def observe_pair(self, x: Tensor, reference: Tensor) -> None:
        """Add an input, and (a - x) x^T if it is needed.

        Args:
            x: [..., K] float.
            reference: [..., K], the a of each x.
        """
        self.forward(x)
        if len(self.cross):
            self.cross = self.cross.to(x.device)
            observe_cross_ref(x.detach(), reference.detach(), self.cross)

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
        with _LOCK:
            key = ("observe", self.needs, self.columns, self._seen.sequence)
            seen = compute_once(x, key, self, lambda: self._add(x))()
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


def is_observer_hook(hook: object) -> bool:
    """Return whether a hook is `Observer.hook`."""
    return isinstance(getattr(hook, "__self__", None), Observer)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward and our own observing."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or type(module).__call__ is not nn.Module.__call__
        or not all(is_observer_hook(hook) for hook in module._forward_pre_hooks.values())
    )


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
    """Return the sum of what several observers of one layer saw.

    Args:
        observers: Those of the layer.
        name: Of the layer, for the error.

    Raises:
        CalibrationError: A calibration input held NaN or infinity.
    """
    states = [o.state for o in observers if o.state[1]]
    if not states:
        return Stats()
    hessian, count, amax = states[0]
    for other_hessian, other_count, other_amax in states[1:]:
        hessian = hessian + other_hessian.to(hessian.device)
        count = count + other_count.to(count.device)
        amax = torch.maximum(amax, other_amax.to(amax.device))
    if not (amax.isfinite().all() and hessian.isfinite().all()):
        what = f"reached {float(amax):.3g}, whose square float32 cannot hold"
        if not amax.isfinite().all():
            what = "held NaN or infinity"
        raise CalibrationError(
            f"{name or 'the model'}: its inputs {what} during calibration. Find the batch or the "
            "layer they come from, then prepare and calibrate again."
        )
    if hessian.ndim == 2:
        crosses = [o.cross for o in observers if o.state[1] and len(o.cross)]
        # Some layer may see part of its inputs together with one that needs less.
        cross = sum(crosses[1:], crosses[0]) if len(crosses) == len(states) else None
        return Stats(diagonal_blocks(hessian), int(count), float(amax), hessian, cross)
    return Stats(hessian if len(hessian) else None, int(count), float(amax))
