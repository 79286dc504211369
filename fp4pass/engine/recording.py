"""Record the calls of the layers of a model, so that convert can make them again."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._compat import FAULTS
from ..core.machine import memory_limits
from ..distributed import ranks
from ..errors import CalibrationError, StateError, as_option, some
from ..nn.experts import add_stacks
from ..ops.registration import opaque
from ..quantization.observers.observer import observes
from ..quantization.observers.visible_tokens import Kept
from ..quantization.plan import LayerPlan, Plan
from ..quantization.scan import SkippedLayer

_log = logging.getLogger(__name__)

# Positional and keyword arguments of a layer; the place of the hidden state holds None.
Arguments = tuple[list[Any], dict[str, Any]]

# Of all memory: so much is left for layers, and for others.
_LEFT = 1 / 4

# Bytes of zeros that are written at a time.
_WRITTEN = 1 << 24


class Recorded(Exception):
    """Stop a forward: everything that it was run for is recorded."""


@dataclass
class Call:
    """One run of a batch through a stack, on the CPU."""

    hidden: Tensor  # what the next layer gets
    reference: Tensor  # the same in the float model
    # The other arguments of each layer, once if all have the same; None for one passed by.
    arguments: list[Arguments | None] = field(default_factory=list)
    # Which of its tokens count; None for all.
    tokens: Kept | None = None
    # The inputs that are not what the layer before returned, by layer.
    given: dict[int, Tensor] = field(default_factory=dict)

    def of(self, index: int) -> Arguments | None:
        """Return the other arguments of layer `index`, None if it is not called."""
        return self.arguments[index if len(self.arguments) > 1 else 0]


class Stack:
    """Layers, each called with the result of the one before it; other inputs are recorded."""

    def __init__(self, name: str, pattern: str, layers: Sequence[nn.Module]) -> None:
        # The pattern matches the names of all modules below the layers.
        self.name, self.pattern = name, pattern
        self.layers = list(layers)
        self.calls: list[Call] = []
        self._slot: int | str | None = None
        # Signatures of calls in which all layers got the same arguments, and what the model is
        # called with, None where that is not known: other layers may be called then.
        self._uniform: set[object] = set()
        self.context: object = None
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._open: Call | None = None
        # The first layer of the call that runs, whether one runs that need not be seen, and whether
        # a layer runs.
        self._start = 0
        self._passing = self._inside = False
        # The result of the last layer, and its version.
        self._output: tuple[Tensor | None, int] = (None, 0)

    def enter(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Record the call of a layer; return whether no layer after it need be seen."""
        is_back = self._open is not None and self._start < index < len(self._open.arguments)
        begins = index <= self._start or is_back or (self._open is None and not self._passing)
        if begins:
            # A loop of the caller's own does not tell where a forward ends.
            self.finish_open()
            self._start = index
            if self._slot is None:
                places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
                self._slot = next((at for at, x in places if isinstance(x, Tensor)), None)
            # The tensors copied before may be gone, and others have their identities.
            self._copies.clear()
        elif self._open is None:
            return False
        hidden = _pick(args, kwargs, self._slot)
        if not isinstance(hidden, Tensor):
            raise CalibrationError(
                f"{self.name}.{index}: expected a tensor as argument {self._slot!r}, as in the "
                f"first call of a layer of {self.name}, got {type(hidden).__name__}. Leave out "
                f"{as_option('sequential', True)}."
            )
        # Something may have been written to what the layer before returned.
        output, version = self._output
        is_chained = not is_back if begins else hidden is output and _version(hidden) == version
        self._inside = True
        # Tensors of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            positional = [self._keep(x, i == self._slot, index) for i, x in enumerate(args)]
            named = {key: self._keep(x, key == self._slot, index) for key, x in kwargs.items()}
            if begins:
                # A layer may change its input in place.
                state = offload_hidden_state(hidden, copy=True)
                call = Call(state, state, [None] * index, Kept.of(args, kwargs))
            else:
                assert self._open is not None
                call = self._open
                call.arguments += [None] * (index - len(call.arguments))
            call.arguments.append((positional, named))
            if not is_chained:
                call.given[index] = offload_hidden_state(hidden, copy=True)
            if not begins:
                return False
        if self._signature(call) in self._uniform:
            self._passing = True
            self.calls.append(call)
            return True
        self._open = call
        return False

    def leave(self, index: int, output: Any) -> None:
        """Record the result of a layer; after the last one the call is complete."""
        self._inside = False
        if self._open is not None:
            found = _first_output(output)
            self._output = found, 0 if found is None else _version(found)
        if index + 1 == len(self.layers):
            self.finish_open()

    def begin(self, index: int) -> None:
        """Give layer `index` what it is called with, once the one before it has run again."""
        # A tuple: a hook that records would add to the list for ever.
        for call in tuple(self.calls):
            if index in call.given:
                call.hidden = call.reference = call.given[index]

    def passes_on(self, call: Call, index: int) -> bool:
        """Return whether a later layer of a call reads what layer `index` returns."""
        called = (later for later in range(index + 1, len(self.layers)) if call.of(later))
        return next(called, None) not in (None, *call.given)

    def finish_open(self) -> None:
        """Keep the call whose forward is at its end; layers after the last one are passed by."""
        call = self._open
        # One that ended in a layer was cut off.
        if call is not None and not self._inside:
            call.arguments += [None] * (len(self.layers) - len(call.arguments))
            self.add(call)
        self.drop_open()

    def add(self, call: Call) -> None:
        """Keep a complete call, its arguments once if all layers have the same."""
        first = call.arguments[0]
        if all(_alike(first, other, _is_same) for other in call.arguments):
            call.arguments = [first]
            if self.context is not None and not call.given:
                self._uniform.add(self._signature(call))
        self.calls.append(call)

    def skim(self, run: Callable[[], object]) -> bool:
        """Record a call by `run`, most layers passed over; return whether that could be done."""
        before, found = len(self.calls), []
        try:
            for count in (2, 1):
                with self._passed_over(count):
                    run()
                self.finish_open()
                (call,) = self.calls[before:]
                del self.calls[before:]
                found.append(call)
                # The next call of this kind is to be seen by all layers.
                self._uniform.discard(self._signature(call))
        except FAULTS:
            found = []
        del self.calls[before:]
        self.drop_open()
        if len(found) < 2 or any(call.given for call in found):
            return False
        first, second = ([call.of(i) for i in range(len(self.layers))] for call in found)
        if not _alike(first, second, _is_equal):
            return False
        self.add(found[0])
        return True

    @contextmanager
    def _passed_over(self, count: int) -> Iterator[None]:
        """Have all layers but the first ones return their input."""
        like: list[Any] = []

        def pass_over(*args: Any, **kwargs: Any) -> Any:
            hidden = _pick(args, kwargs, self._slot)
            if isinstance(like[-1], Tensor):
                return hidden
            if type(like[-1]) is tuple and len(like[-1]) == 1:
                return (hidden,)
            raise CalibrationError(f"{self.name}: layers return more than their hidden state")

        def note(module: nn.Module, args: Any, output: Any) -> None:
            like.append(output)

        handle = self.layers[0].register_forward_hook(note)
        # Hooks of others may have put a forward there.
        before = [layer.__dict__.get("forward") for layer in self.layers[count:]]
        for layer in self.layers[count:]:
            layer.__dict__["forward"] = pass_over
        try:
            yield
        finally:
            handle.remove()
            for layer, forward in zip(self.layers[count:], before, strict=True):
                del layer.__dict__["forward"]
                if forward is not None:
                    layer.__dict__["forward"] = forward

    def layer_name(self, index: int) -> str:
        """Return the name that a layer has in the model, in which the root has none."""
        return f"{self.pattern.removesuffix('*')}{index}"

    def drop_open(self) -> None:
        """Forget a call that was cut off."""
        self._open, self._output = None, (None, 0)
        self._passing = self._inside = False
        self._copies.clear()

    def arguments(
        self, call: Call, index: int, hidden: Tensor, device: torch.device
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of layer `index` for a hidden state, all on `device`."""
        args, kwargs = _map_tensors(call.of(index), lambda x: x.to(device))
        moved = hidden.to(device, copy=True)
        if isinstance(self._slot, int):
            args[self._slot] = moved
        else:
            kwargs[self._slot] = moved
        return args, kwargs

    def _signature(self, call: Call) -> object:
        """Return everything that decides the arguments of later layers."""
        return self.context, _signature(call.hidden), _signature(call.arguments[0])

    def _keep(self, value: Any, hidden: bool, index: int) -> Any:
        """Return an argument as it is kept: a copy on the CPU, one for all layers, no caches."""
        if hidden:
            return None
        if type(value) in (tuple, list, dict):
            values = value.values() if isinstance(value, dict) else value
            kept = [self._keep(each, False, index) for each in values]
            return dict(zip(value, kept, strict=True)) if type(value) is dict else type(value)(kept)
        if hasattr(value, "get_seq_length"):
            if index == 0 and _is_filled(value):
                raise CalibrationError(
                    f"{self.name} is called with a cache that is filled. With "
                    f"{as_option('sequential', True)} "
                    "calibrate on whole texts: no generate, and no cache."
                )
            return None
        if not isinstance(value, Tensor):
            return value
        found = self._copies.get(id(value))
        if found is None:
            found = self._copies[id(value)] = (value, value.detach().to("cpu", copy=True))
        return found[1]


class Recording:
    """Record the calls of the stacks of a model, by hooks before and after layers."""

    def __init__(self, root: nn.Module, stacks: Sequence[Stack], whole: bool) -> None:
        """Attach the hooks; `whole`: every forward must run to its end, for more is observed."""
        self.root, self.stacks = root, list(stacks)
        self._whole = whole
        self._waiting: list[Stack] | None = None
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
        self._handles.append(self.root.register_forward_hook(self._end))

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a batch through a model, as far as there is something to record."""
        before = sum(len(stack.calls) for stack in self.stacks)
        self._waiting = list(self.stacks)
        context = _signature((tuple(args), dict(kwargs)))
        for stack in self.stacks:
            stack.context = context

        def skim() -> None:
            # A layer may change its input in place.
            copies: Any = _map_tensors((list(args), dict(kwargs)), torch.clone)
            model(*copies[0], **copies[1])

        try:
            if self._whole or len(self.stacks) != 1 or not self.stacks[0].skim(skim):
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

    def require_calls(self) -> None:
        """Raise CalibrationError if nothing was recorded."""
        for stack in self.stacks:
            stack.finish_open()
        if not any(stack.calls for stack in self.stacks):
            stack = self.stacks[0]
            raise CalibrationError(
                f"{stack.name}: calibration never reached these layers. Run batches that use them "
                "before convert."
            )

    def log_given(self) -> None:
        """Log the layers that are not calibrated on what the quantized layers before them give."""
        own = [
            stack.layer_name(index)
            for stack in self.stacks
            for index in sorted({index for call in stack.calls for index in call.given})
        ]
        if names := list(dict.fromkeys(itertools.chain(*ranks().gather(own)))):
            _log.warning(
                "%s: the model calls them with more than the results of the layers before them, "
                "so they are calibrated on their inputs in the float model.",
                some(names),
            )

    def passed_by(self, plan: Plan) -> Plan:
        """Return the plan of the layers of stacks that no call came to."""
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
        if known and not self._whole and self._waiting is not None and stack in self._waiting:
            self._waiting.remove(stack)
            if not self._waiting:
                raise Recorded

    @observes
    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack, index = self._places[layer]
        stack.leave(index, output)

    @observes
    def _end(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            for stack in self.stacks:
                stack.finish_open()


def outside(plan: Plan, stacks: Sequence[Stack]) -> Plan:
    """Return the plan of the layers that are in no stack, or are skipped."""
    inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
    return plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)


def find_stacks(root: nn.Module, chosen: Sequence[LayerPlan]) -> list[Stack]:
    """Return the stacks of layers that linears to quantize are in. Raises StateError."""
    add_stacks(layer.module for layer in chosen)
    stacks = list(stacks_of(root, {layer.module for layer in chosen}))
    leave_out = f"Leave out {as_option('sequential', True)} or {as_option('stream')}."
    if not stacks:
        raise StateError(
            "One layer after the other: expected a list of at least two layers (nn.ModuleList) "
            f"with linear layers, got {type(root).__name__} without one. {leave_out}"
        )
    owner = {m: layer for s in stacks for layer in s.layers for m in layer.modules()}
    first: dict[int, LayerPlan] = {}
    for layer in chosen:
        other = first.setdefault(layer.weight_key, layer)
        if owner.get(layer.module) is not owner.get(other.module):
            raise StateError(
                f"{other.name} and {layer.name} share one weight, but are in different layers, so "
                f"they cannot be converted one after the other. {leave_out}"
            )
    return stacks


def stacks_of(root: nn.Module, holders: set[nn.Module]) -> Iterator[Stack]:
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


def _first_output(output: Any) -> Tensor | None:
    """Return the result of a layer, or the first part of it; None where that is no tensor."""
    found = output
    if isinstance(output, tuple | list | Mapping) and len(output):
        found = next(iter(output.values() if isinstance(output, Mapping) else output))
    return found if isinstance(found, Tensor) else None


def hidden_state(output: Any, name: str) -> Tensor:
    """Return the hidden state for the next layer: the result, or the first part of it."""
    found = _first_output(output)
    if found is None:
        raise CalibrationError(
            f"{name} returns a {type(output).__name__} that begins with no tensor, so its layers "
            f"cannot be calibrated one after the other. Leave out {as_option('sequential', True)}."
        )
    return found


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to; those of inference mode do not tell."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:
        # One that holds states, and not keys and values, has no length.
        return bool(cache.has_previous_state())


def _pick(args: Sequence[Any], kwargs: Mapping[str, Any], slot: int | str | None) -> Any:
    if isinstance(slot, int):
        return args[slot] if slot < len(args) else None
    return kwargs.get(str(slot))


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(each, function) for each in value)
    if type(value) is dict:
        return {key: _map_tensors(each, function) for key, each in value.items()}
    return value


def _alike(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether arguments have one structure, whose tensors and other values are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(_alike(*each, same) for each in zip(a, b, strict=True))
    if type(a) is dict:
        return list(a) == list(b) and all(_alike(a[key], b[key], same) for key in a)
    return same(a, b)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether values are one tensor or object, or equal plain values."""
    return a is b or (isinstance(a, bool | int | float | str) and bool(a == b))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a is b or bool(a == b)


def _signature(value: Any) -> object:
    """Return all of some arguments but values and batch size, which decide no call of a layer."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if type(value) in (tuple, list, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((key, _signature(each)) for key, each in items)
    return value if isinstance(value, bool | int | float | str) else type(value)


@opaque
def offload_hidden_state(state: Tensor, copy: bool = False) -> Tensor:
    """Return a hidden state on the CPU, in memory of its own if `copy`."""
    # Where less than a quarter of the memory would be left, it goes to a temporary file, deleted
    # with it. Raises CalibrationError if there is no room for that either.
    fits = all(each.available - _LEFT * each.total >= state.nbytes for each in memory_limits())
    if not state.numel() or fits:
        return state.detach().to("cpu", copy=copy)
    try:
        with tempfile.NamedTemporaryFile(prefix="fp4pass-") as file:
            # A disk that is full would end the process when the memory is written to.
            for start in range(0, state.nbytes, _WRITTEN):
                file.write(bytes(min(_WRITTEN, state.nbytes - start)))
            file.flush()
            stored = torch.from_file(file.name, shared=True, size=state.numel(), dtype=state.dtype)
    except OSError as error:
        raise CalibrationError(
            f"Hidden states fit neither in memory nor in {tempfile.gettempdir()}: {error}. Name "
            "another folder in TMPDIR, or calibrate on less text."
        ) from error
    return stored.view(state.shape).copy_(state.detach())
