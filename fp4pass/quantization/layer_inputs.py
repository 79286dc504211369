"""Record what the layers of a model are called with, so that convert can call them again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import CalibrationError, StateError
from ..experts import ExpertStack, add_stack
from .arguments import (
    Arguments,
    first_tensor,
    hidden_state,
    is_filled,
    map_tensors,
    pick,
    same_arguments,
)
from .plan import LayerPlan, Plan
from .scan import SkippedLayer

# Of setting who runs a recording.
_LOCK = threading.Lock()

_THREADS = (
    "Two threads run batches through a model that was prepared with sequential=True, or a call in "
    "another thread was cut off. Calibrate it in one thread, with fp4pass.calibrate."
)


class Recorded(Exception):
    """Stop a forward: what it was run for is recorded."""


@dataclass
class Call:
    """One run of a batch through a stack, on the CPU."""

    hidden: Tensor  # what the next layer gets
    reference: Tensor  # the same in the float model
    # What else each layer gets, once if it is the same for all.
    arguments: list[Arguments] = field(default_factory=list)


class Stack:
    """Layers, each of which is called with what the one before it returned."""

    def __init__(self, name: str, pattern: str, layers: Sequence[nn.Module]) -> None:
        # The pattern is of the names of what is below the layers.
        self.name, self.pattern = name, pattern
        self.layers = list(layers)
        self.calls: list[Call] = []
        self._slot: int | str | None = None
        # Signatures of calls in which all layers got the same arguments.
        self._uniform: set[object] = set()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._open: Call | None = None
        # The thread that it is of.
        self._thread = 0
        self._output: Tensor | None = None

    def enter(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Record the call of a layer; return whether no layer behind it need be seen."""
        thread = _this_thread()
        if thread and self._open is not None and self._thread not in (0, thread):
            raise CalibrationError(_THREADS)
        if index == 0:
            self._thread = thread
            if self._slot is None:
                self._slot = first_tensor(args, kwargs, f"{self.name}.0")
            # The tensors copied before may be gone, and others have their identities.
            self._copies.clear()
        elif self._open is None:
            return False
        elif (
            index != len(self._open.arguments)
            or self._output is None
            or pick(args, kwargs, self._slot) is not self._output
        ):
            raise CalibrationError(
                f"{self.name}.{index} is not called with just what {self.name}.{index - 1} "
                "returned, so its layers cannot be calibrated one after the other. Prepare without "
                f"sequential=True, or skip these layers with rules=[({self.pattern!r}, None)]."
            )
        # What inference mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            positional = [self._keep(x, i == self._slot, index) for i, x in enumerate(args)]
            named = {key: self._keep(x, key == self._slot, index) for key, x in kwargs.items()}
            if index:
                assert self._open is not None
                self._open.arguments.append((positional, named))
                return False
            # A layer may change its input in place.
            hidden = pick(args, kwargs, self._slot).detach().to("cpu", copy=True)
        call = Call(hidden, hidden, [(positional, named)])
        if _signature(call) in self._uniform:
            self._open = None
            self.calls.append(call)
            return True
        self._open = call
        return False

    def leave(self, index: int, output: Any) -> None:
        """Record what a layer returned; behind the last one the call is complete."""
        call = self._open
        if call is None:
            return
        self._output = hidden_state(output, f"{self.name}.{index}")
        if index + 1 < len(self.layers):
            return
        first = call.arguments[0]
        if all(same_arguments(first, other) for other in call.arguments):
            call.arguments = [first]
            self._uniform.add(_signature(call))
        self.calls.append(call)
        self.drop_open()

    @property
    def tokens(self) -> int:
        """How many tokens were recorded."""
        return sum(call.hidden[..., 0].numel() for call in self.calls)

    def drop_open(self) -> None:
        """Forget a call that was cut off."""
        self._open = self._output = None
        self._copies.clear()

    def arguments(
        self, call: Call, index: int, hidden: Tensor, device: torch.device
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return what layer `index` is called with, if it is to see `hidden`; all on `device`."""
        kept = call.arguments[index if len(call.arguments) > 1 else 0]
        args, kwargs = map_tensors(kept, lambda x: x.to(device))
        moved = hidden.to(device, copy=True)
        if isinstance(self._slot, int):
            args[self._slot] = moved
        else:
            kwargs[self._slot] = moved
        return args, kwargs

    def _keep(self, value: Any, hidden: bool, index: int) -> Any:
        """Return an argument as it is kept: a copy on the CPU, one for all layers, no caches."""
        if hidden:
            return None
        if type(value) in (tuple, list, dict):
            values = value.values() if isinstance(value, dict) else value
            kept = [self._keep(each, False, index) for each in values]
            return dict(zip(value, kept, strict=True)) if type(value) is dict else type(value)(kept)
        if hasattr(value, "get_seq_length"):
            if index == 0 and is_filled(value):
                raise CalibrationError(
                    f"{self.name} is called with a cache that is filled. With sequential=True "
                    "calibrate on whole texts: no generate, no past_key_values."
                )
            return None
        if not isinstance(value, Tensor):
            return value
        found = self._copies.get(id(value))
        if found is None:
            found = self._copies[id(value)] = (value, value.detach().to("cpu", copy=True))
        return found[1]


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
                raise CalibrationError(_THREADS)
            self._waiting, self._thread = list(self.stacks), threading.get_ident()
        before = sum(len(stack.calls) for stack in self.stacks)
        try:
            model(*args, **kwargs)
        except Recorded:
            return
        finally:
            self._waiting = None
            for stack in self.stacks:
                stack.drop_open()
        # Stopping at the first call would miss the others.
        calls = sum(len(stack.calls) for stack in self.stacks) - before
        self._whole = self._whole or calls > len(self.stacks)

    def outside(self, plan: Plan) -> Plan:
        """Return the plan of what is in no stack, or is skipped. Raises CalibrationError."""
        for stack in self.stacks:
            if not stack.calls:
                raise CalibrationError(
                    f"{stack.name}: calibration never reached these layers. Run batches before "
                    f"convert, or skip these layers with rules=[({stack.pattern!r}, None)]."
                )
        inside = {module for layer in self._places for module in layer.modules()}
        return plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)

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

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack, index = self._places[layer]
        known = stack.enter(index, args, kwargs)
        thread = _this_thread()
        waiting = self._waiting if not thread or self._thread == thread else None
        if known and not self._whole and waiting is not None and stack in waiting:
            waiting.remove(stack)
            if not waiting:
                raise Recorded

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
    stacks = list(_stacks_of(root, {layer.module for layer in chosen}))
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


def _this_thread() -> int:
    """Return what names this thread, 0 in code that is compiled, which cannot ask."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _signature(call: Call) -> object:
    """Return what decides the arguments of later layers: all but values and batch size."""

    def of(value: Any) -> object:
        if isinstance(value, Tensor):
            return value.dtype, tuple(value.shape[1:])
        if type(value) in (tuple, list):
            return tuple(map(of, value))
        if type(value) is dict:
            return tuple((key, of(each)) for key, each in value.items())
        return value if isinstance(value, bool | int | float | str) else type(value)

    return of(call.hidden), of(call.arguments[0])
