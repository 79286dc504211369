"""Record what the layers of a model are called with, so that convert can call them again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..distributed import ranks
from ..errors import CalibrationError, StateError
from ..experts import ExpertStack, add_stack
from ..observers.reached import observes
from .arguments import map_tensors
from .layer_stack import THREADS, Call, Stack, equal_arguments, signature, this_thread
from .plan import LayerPlan, Plan
from .scan import SkippedLayer

# Of setting who runs a recording.
_LOCK = threading.Lock()


# What a model raises that takes something else of its layers than their hidden state.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Recorded(Exception):
    """Stop a forward: what it was run for is recorded."""


class Recording:
    """What the stacks of a model are called with, recorded by hooks before and behind layers."""

    def __init__(self, stacks: Sequence[Stack], whole: bool) -> None:
        """whole: every forward must run to its end, for more than the layers is observed."""
        self.stacks = list(stacks)
        self._whole = whole
        self._waiting: list[Stack] | None = None
        self._thread = 0
        self._places = {
            layer: (stack, index) for stack in stacks for index, layer in enumerate(stack.layers)
        }
        self._handles: list[RemovableHandle] = []
        # The calls of each stack, and their hidden states, as long as no weight is replaced.
        self._before: list[tuple[Stack, list[tuple[Call, Tensor]]]] = []
        self._attach()

    def _attach(self) -> None:
        for layer in self._places:
            self._handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._leave))

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a batch through a model, as far as there is something to record."""
        with _LOCK:
            if self._waiting is not None:
                raise CalibrationError(THREADS)
            self._waiting, self._thread = list(self.stacks), threading.get_ident()
        before = sum(len(stack.calls) for stack in self.stacks)
        context = signature((tuple(args), dict(kwargs)))
        for stack in self.stacks:
            stack.context = context
        try:
            if not self._skim(model, args, kwargs):
                model(*args, **kwargs)
                for stack in self.stacks:
                    stack.finish_open()
        except Recorded:
            return
        finally:
            self._waiting = None
            for stack in self.stacks:
                stack.drop_open()
                stack.context = None
        # Stopping at the first call would miss the others.
        calls = sum(len(stack.calls) for stack in self.stacks) - before
        self._whole = self._whole or calls > len(self.stacks)

    def _skim(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Record a batch without running most layers; return whether that could be done.

        Layers are passed over, each returning its input: first all but two, then all but one. What
        they are called with does not come from other layers if it is the same both times.
        """
        if self._whole or len(self.stacks) != 1:
            return False
        stack = self.stacks[0]
        before, found = len(stack.calls), []
        try:
            for count in (2, 1):
                # A layer may change its input in place.
                copies: Any = map_tensors((list(args), dict(kwargs)), torch.clone)
                with stack.passed_over(count):
                    model(*copies[0], **copies[1])
                stack.finish_open()
                (call,) = stack.calls[before:]
                del stack.calls[before:]
                found.append(call)
                stack.forget_signature(call)
        except FAULTS:
            found = []
        del stack.calls[before:]
        stack.drop_open()
        if len(found) < 2 or not equal_arguments(*(call.arguments for call in found)):
            return False
        stack.add(found[0])
        return True

    def outside(self, plan: Plan) -> Plan:
        """Return the plan of what is in no stack, or is skipped.

        Raises CalibrationError if nothing was recorded.
        """
        for stack in self.stacks:
            stack.finish_open()
        if not any(stack.calls for stack in self.stacks):
            stack = self.stacks[0]
            raise CalibrationError(
                f"{stack.name}: calibration never reached these layers. Run batches before "
                f"convert, or skip these layers with rules=[({stack.pattern!r}, None)]."
            )
        inside = {module for layer in self._places for module in layer.modules()}
        return plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)

    @property
    def unmapped(self) -> dict[str, Tensor]:
        """The layers that saw what a mask could not be mapped to, and that mask."""
        return {name: mask for stack in self.stacks for name, mask in stack.unmapped.items()}

    def passed_by(self, plan: Plan) -> Plan:
        """Return the plan of what is in layers that no call of a stack came to."""
        called = [
            [any(call.of(i) is not None for call in stack.calls) for i in range(len(stack.layers))]
            for stack in self.stacks
        ]
        everywhere = ranks().gather(called)
        inside = {
            module
            for i, stack in enumerate(self.stacks)
            for index, layer in enumerate(stack.layers)
            if not any(each[i][index] for each in everywhere)
            for module in layer.modules()
        }
        return plan.where(lambda e: not isinstance(e, SkippedLayer) and e.module in inside)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Take the hooks out while layers run again; undo that unless `remove` was called."""
        kept = [(stack, [(call, call.hidden) for call in stack.calls]) for stack in self.stacks]
        self.remove()
        self._before = kept
        del kept
        try:
            yield
        finally:
            for stack, calls in self._before:
                stack.calls = [call for call, _ in calls]
                for call, hidden in calls:
                    call.hidden = call.reference = hidden
            if self._before:
                self._attach()
            self._before = []

    def remove(self) -> None:
        """Take the hooks out for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()

    @observes
    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack, index = self._places[layer]
        known = stack.enter(index, args, kwargs)
        thread = this_thread()
        waiting = self._waiting if not thread or self._thread == thread else None
        if known and not self._whole and waiting is not None and stack in waiting:
            waiting.remove(stack)
            if not waiting:
                raise Recorded

    @observes
    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack, index = self._places[layer]
        stack.leave(index, output)


def record_layers(root: nn.Module, plan: Plan) -> tuple[Recording, Plan]:
    """Record what the stacks of a model are called with; return the plan of the rest, too."""
    chosen = plan.layers
    for layer in chosen:
        if isinstance(layer.module, ExpertStack):
            add_stack(layer.module)
    stacks = find_stacks(root, chosen)
    owner = {m for s in stacks for layer in s.layers for m in layer.modules()}
    outside = plan.where(lambda entry: entry.module not in owner)
    return Recording(stacks, whole=bool(outside.layers)), outside


def find_stacks(root: nn.Module, chosen: Sequence[LayerPlan]) -> list[Stack]:
    """Return the stacks of layers that linears to quantize are in. Raises StateError."""
    stacks = stacks_in(root, [layer.module for layer in chosen])
    if not stacks:
        raise StateError(
            "One layer after the other: expected a list of at least two layers (nn.ModuleList) "
            f"with linear layers, got {type(root).__name__} without one. Leave out sequential=True "
            "or stream=."
        )
    owner = {m: layer for s in stacks for layer in s.layers for m in layer.modules()}
    first: dict[int, LayerPlan] = {}
    for layer in chosen:
        other = first.setdefault(layer.weight_key, layer)
        if owner.get(layer.module) is not owner.get(other.module):
            raise StateError(
                f"{other.name} and {layer.name} share one weight, but are in different layers, so "
                "they cannot be converted one after the other. Leave out sequential=True or "
                "stream=."
            )
    return stacks


def stacks_in(root: nn.Module, modules: Sequence[nn.Module]) -> list[Stack]:
    """Return the stacks of layers that some modules are in, none if there is none."""
    return list(_stacks_of(root, set(modules)))


def _stacks_of(root: nn.Module, holders: set[nn.Module]) -> Iterator[Stack]:
    """Yield the outermost lists of at least two layers with linears below them."""
    inside: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        layers = list(module)
        kinds = {type(layer) for layer in layers}
        if isinstance(module, nn.Sequential) and len(kinds) > 1:
            continue
        holding = [layer for layer in layers if not holders.isdisjoint(layer.modules())]
        if len(holding) < 2 or len(set(layers)) < len(layers) or not holders.isdisjoint(layers):
            continue
        inside.update(m for layer in layers for m in layer.modules())
        yield Stack(name or type(root).__name__, f"{name}.*" if name else "*", layers)
