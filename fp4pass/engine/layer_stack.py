"""Record the calls of a stack of layers."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.machine import memory_limits
from ..errors import CalibrationError, StateError, as_option
from ..nn.experts import add_stacks
from ..ops.registration import opaque
from ..quantization.observers.visible_tokens import Kept
from ..quantization.plan import LayerPlan, Plan
from ..quantization.scan import SkippedLayer

# Positional and keyword arguments of a layer; the place of the hidden state holds None.
Arguments = tuple[list[Any], dict[str, Any]]

# Of all memory: so much is left for layers, and for others.
_LEFT = 1 / 4

# Bytes of zeros that are written at a time.
_WRITTEN = 1 << 24

# Origins of an input that is not just what the layer before it returned: something was added to
# that, or no layer of the stack has to do with it, or what was returned is changed in another way.
ADDED, APART, CHANGED = "added", "apart", "changed"

# The input of a layer, and what the layer before it returned, None where that is no tensor.
_Pair = tuple[Tensor, Tensor | None]


class Given(NamedTuple):
    """The hidden state of a layer that is not just what the layer before it returned."""

    state: Tensor
    adds: bool  # to what that layer returned, or takes its place

    def after(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of the layer once the one before it has returned `hidden`."""
        state = self.state.to(hidden.device)
        return hidden + state if self.adds else state


@dataclass
class Call:
    """One run of a batch through a stack, on the CPU."""

    hidden: Tensor  # what the next layer gets
    reference: Tensor  # the same in the float model
    # The other arguments of each layer, once if all have the same; None for one passed by.
    arguments: list[Arguments | None] = field(default_factory=list)
    # Which of its tokens count; None for all.
    tokens: Kept | None = None
    # By layer.
    given: dict[int, Given] = field(default_factory=dict)

    def of(self, index: int) -> Arguments | None:
        """Return the other arguments of layer `index`, None if it is not called."""
        return self.arguments[index if len(self.arguments) > 1 else 0]

    @property
    def visible(self) -> int:
        """The number of its tokens that count."""
        rows = None if self.tokens is None else self.tokens.reading.find(self.hidden).visible
        return self.hidden[..., 0].numel() if rows is None else int(rows.sum())


class Stack:
    """Layers, each of which is called with the result of the one before it, or not with just that.

    Additions of a model between layers are recorded, and made again once the layers before are
    quantized. Any other input that a layer has is recorded as it is.
    """

    def __init__(self, name: str, pattern: str, layers: Sequence[nn.Module]) -> None:
        # The pattern matches the names of all modules below the layers.
        self.name, self.pattern = name, pattern
        self.layers = list(layers)
        self.calls: list[Call] = []
        # Masks that hide tokens, but do not fit the input of a linear below the layers.
        self.unmapped: dict[str, Tensor] = {}
        self._slot: int | str | None = None
        # Signatures of calls in which all layers got the same arguments, and what the model is
        # called with, None where that is not known: other layers may be called then.
        self._uniform: set[object] = set()
        self.context: object = None
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._open: Call | None = None
        # The known origins of inputs, and the inputs of the present forward with unknown ones.
        self.origins: dict[int, str] = {}
        self.unknown: dict[int, tuple[Call, _Pair]] = {}
        # The first layer of the call that runs, whether one runs that need not be seen, and whether
        # a layer runs.
        self._start = 0
        self._passing = self._inside = False
        # The result of the last layer, and a copy of it.
        self._output: Tensor | None = None
        self._returned: Tensor | None = None

    def enter(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Record the call of a layer; return whether no layer behind it need be seen."""
        is_back = self._open is not None and self._start < index < len(self._open.arguments)
        begins = index <= self._start or is_back or (self._open is None and not self._passing)
        if begins:
            # A loop of the caller's own does not tell where a forward ends.
            self.finish_open()
            self._start = index
            if self._slot is None:
                places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
                self._slot = next((at for at, x in places if isinstance(x, Tensor)), None)
                if self._slot is None:
                    raise CalibrationError(
                        f"{self.name}.{index} is called without a tensor, so its layers cannot be "
                        "calibrated one after the other. Leave out "
                        f"{as_option('sequential', True)}."
                    )
            # The tensors copied before may be gone, and others have their identities.
            self._copies.clear()
        elif self._open is None:
            return False
        hidden = pick(args, kwargs, self._slot)
        if not isinstance(hidden, Tensor):
            raise CalibrationError(
                f"{self.name}.{index}: expected a tensor as argument {self._slot!r}, as in the "
                f"first call of a layer of {self.name}, got {type(hidden).__name__}. Leave out "
                f"{as_option('sequential', True)}."
            )
        # Something may have been written to what the layer before returned.
        is_output = hidden is self._output
        is_output = is_output and (self._returned is None or hidden.equal(self._returned))
        is_chained = not is_back if begins else is_output
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
                self._keep_given(call, index, hidden)
            if not begins:
                return False
        if self._signature(call) in self._uniform:
            self._passing = True
            self.calls.append(call)
            return True
        self._open = call
        return False

    def leave(self, index: int, output: Any) -> None:
        """Record the result of a layer; behind the last one the call is complete."""
        self._inside = False
        if self._open is not None:
            self._output = first_output(output)
            if self._output is not None and not torch.compiler.is_compiling():
                self._returned = self._output.detach().clone()
        if index + 1 == len(self.layers):
            self.finish_open()

    def _keep_given(self, call: Call, index: int, hidden: Tensor) -> None:
        """Record the input of a layer that is not just what the layer before it returned."""
        origin = self.origins.get(index)
        if origin == ADDED and self._returned is not None:
            call.given[index] = Given(offload_hidden_state(hidden - self._returned), adds=True)
            return
        call.given[index] = Given(offload_hidden_state(hidden, copy=True), adds=False)
        if origin is None:
            self.unknown.setdefault(index, (call, (hidden.detach().clone(), self._returned)))

    def learn_origins(self, run: Callable[[], object]) -> None:
        """Find out where unknown inputs come from: `run` makes the last forward again.

        Layers return other numbers then. Additions to their results stay the same.
        """
        unknown, self.unknown = self.unknown, {}
        again: dict[int, _Pair] = {}
        returned: Tensor | None = None

        def enter(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = pick(args, kwargs, self._slot)
            if index in unknown and isinstance(hidden, Tensor):
                again.setdefault(index, (hidden.clone(), returned))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal returned
            state = first_output(output)
            # The last dimension alone is that of features in every model.
            rolled = None if state is None else state.roll(1, -1)
            returned = None if rolled is None else rolled.clone()
            return _with_first(output, rolled)

        handles = []
        try:
            for index, layer in enumerate(self.layers):
                hook = functools.partial(enter, index)
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
                handles.append(layer.register_forward_hook(leave))
            run()
        finally:
            for handle in handles:
                handle.remove()
        for index, (call, pair) in unknown.items():
            if not any(call is each for each in self.calls):
                # Of a forward that was cut off.
                continue
            self.origins[index] = _origin(pair, again.get(index))
            hidden, before = pair
            if self.origins[index] == ADDED and before is not None:
                call.given[index] = Given(offload_hidden_state(hidden - before), adds=True)

    @property
    def unfollowed(self) -> list[int]:
        """The layers whose inputs are made by the float layers before them."""
        indices = {i for call in self.calls for i, given in call.given.items() if not given.adds}
        return sorted(i for i in indices if self.origins.get(i) != APART)

    def begin(self, index: int) -> None:
        """Give layer `index` what it is called with, once the one before it has run again."""
        # A tuple: a hook that records would add to the list for ever.
        for call in tuple(self.calls):
            given = call.given.get(index)
            if given is not None:
                same = call.reference is call.hidden
                call.hidden = given.after(call.hidden)
                call.reference = call.hidden if same else given.after(call.reference)

    def passes_on(self, call: Call, index: int) -> bool:
        """Return whether a later layer of a call reads what layer `index` returns."""
        for later in range(index + 1, len(self.layers)):
            if call.of(later) is not None:
                return later not in call.given or call.given[later].adds
        return False

    def finish_open(self) -> None:
        """Keep the call whose forward is at its end; layers behind the last one are passed by."""
        call = self._open
        # One that ended in a layer was cut off.
        if call is not None and not self._inside:
            call.arguments += [None] * (len(self.layers) - len(call.arguments))
            self.add(call)
        self.drop_open()

    def add(self, call: Call) -> None:
        """Keep a complete call, its arguments once if all layers have the same."""
        first = call.arguments[0]
        if all(alike(first, other, is_same) for other in call.arguments):
            call.arguments = [first]
            if self.context is not None and not call.given:
                self._uniform.add(self._signature(call))
        self.calls.append(call)

    def forget_signature(self, call: Call) -> None:
        """Have the next call of this kind be seen by all layers."""
        self._uniform.discard(self._signature(call))

    @contextmanager
    def passed_over(self, count: int) -> Iterator[None]:
        """Have all layers but the first ones return their input."""
        like: list[Any] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            like.append(output)

        def pass_over(*args: Any, **kwargs: Any) -> Any:
            hidden = pick(args, kwargs, self._slot)
            if isinstance(like[-1], Tensor):
                return hidden
            if type(like[-1]) is tuple and len(like[-1]) == 1:
                return (hidden,)
            raise CalibrationError(f"{self.name}: layers return more than their hidden state")

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
        self._open = self._output = self._returned = None
        self._passing = self._inside = False
        self._copies.clear()

    def arguments(
        self, call: Call, index: int, hidden: Tensor, device: torch.device
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of layer `index` for a hidden state, all on `device`."""
        args, kwargs = map_tensors(call.of(index), lambda x: x.to(device))
        moved = hidden.to(device, copy=True)
        if isinstance(self._slot, int):
            args[self._slot] = moved
        else:
            kwargs[self._slot] = moved
        return args, kwargs

    def _signature(self, call: Call) -> object:
        """Return everything that decides the arguments of later layers."""
        return self.context, signature(call.hidden), signature(call.arguments[0])

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


def _with_first(output: Any, state: Tensor | None) -> Any:
    """Return the result of a layer with another hidden state, None where that cannot be."""
    if isinstance(output, Tensor) or state is None:
        return state
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[next(iter(changed))] = state
        return changed
    return type(output)([state, *output[1:]]) if type(output) in (tuple, list) else None


def _origin(first: _Pair, again: _Pair | None) -> str:
    """Return where an input comes from, by two runs in which layers returned other numbers."""
    (hidden, before), (other, after) = first, again or (first[0], None)
    if before is None or after is None or before.shape != after.shape or before.equal(after):
        return CHANGED
    if hidden.equal(other):
        return APART
    if not hidden.shape == other.shape == before.shape or not hidden.is_floating_point():
        return CHANGED
    a, b, c, d = (x.float() for x in (hidden, before, other, after))
    room = 8 * torch.finfo(hidden.dtype).eps * (a.abs() + b.abs() + c.abs() + d.abs())
    return ADDED if bool((((a - b) - (c - d)).abs() <= room).all()) else CHANGED


def outside(plan: Plan, stacks: Sequence[Stack]) -> Plan:
    """Return the plan of the layers that are in no stack, or are skipped."""
    inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
    return plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)


def find_stacks(root: nn.Module, chosen: Sequence[LayerPlan]) -> list[Stack]:
    """Return the stacks of layers that linears to quantize are in. Raises StateError."""
    add_stacks(layer.module for layer in chosen)
    stacks = list(stacks_of(root, {layer.module for layer in chosen}))
    if not stacks:
        raise StateError(
            "One layer after the other: expected a list of at least two layers (nn.ModuleList) "
            f"with linear layers, got {type(root).__name__} without one. Leave out "
            f"{as_option('sequential', True)} or {as_option('stream')}."
        )
    owner = {m: layer for s in stacks for layer in s.layers for m in layer.modules()}
    first: dict[int, LayerPlan] = {}
    for layer in chosen:
        other = first.setdefault(layer.weight_key, layer)
        if owner.get(layer.module) is not owner.get(other.module):
            raise StateError(
                f"{other.name} and {layer.name} share one weight, but are in different layers, so "
                "they cannot be converted one after the other. Leave out "
                f"{as_option('sequential', True)} or {as_option('stream')}."
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


def first_output(output: Any) -> Tensor | None:
    """Return the result of a layer, or the first part of it; None where that is no tensor."""
    found = output
    if isinstance(output, tuple | list | Mapping) and len(output):
        found = next(iter(output.values() if isinstance(output, Mapping) else output))
    return found if isinstance(found, Tensor) else None


def hidden_state(output: Any, name: str) -> Tensor:
    """Return the hidden state for the next layer: the result, or the first part of it."""
    found = first_output(output)
    if found is None:
        raise CalibrationError(
            f"{name} returns a {type(output).__name__} that begins with no tensor, so its layers "
            f"cannot be calibrated one after the other. Leave out {as_option('sequential', True)}."
        )
    return found


def is_filled(cache: Any) -> bool:
    """Return whether a cache of transformers holds anything."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:
        # One that holds states, and not keys and values, has no length.
        return bool(cache.has_previous_state())


def pick(args: Sequence[Any], kwargs: Mapping[str, Any], slot: int | str | None) -> Any:
    """Return the argument in a place, None if there is none."""
    if isinstance(slot, int):
        return args[slot] if slot < len(args) else None
    return kwargs.get(str(slot))


def map_tensors(value: Any, function: Any) -> Any:
    """Return the same with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(each, function) for each in value)
    if type(value) is dict:
        return {key: map_tensors(each, function) for key, each in value.items()}
    return value


def alike(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether arguments have one structure, whose tensors and other values are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(alike(*each, same) for each in zip(a, b, strict=True))
    if type(a) is dict:
        return list(a) == list(b) and all(alike(a[key], b[key], same) for key in a)
    return same(a, b)


def is_same(a: Any, b: Any) -> bool:
    """Return whether values are one tensor or object, or equal plain values."""
    return a is b or (isinstance(a, bool | int | float | str) and bool(a == b))


def is_equal(a: Any, b: Any) -> bool:
    """Return whether values are equal, tensors in each number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or bool(a == b)


def signature(value: Any) -> object:
    """Return all of some arguments but values and batch size, which decide no call of a layer."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if type(value) in (tuple, list, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((key, signature(each)) for key, each in items)
    return value if isinstance(value, bool | int | float | str) else type(value)


@opaque
def offload_hidden_state(state: Tensor, copy: bool = False) -> Tensor:
    """Return a hidden state on the CPU, in memory of its own if `copy`.

    Where less than a quarter of the memory would be left, it goes to a temporary file, deleted with
    it. Raises CalibrationError if there is no room for that either.
    """
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
