"""Record the calls of a stack of layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, as_option, as_rules
from ..observers.visible_tokens import Kept
from .layer_calls import (
    Call,
    alike,
    first_tensor,
    hidden_state,
    is_filled,
    is_same,
    map_tensors,
    offload_hidden_state,
    pick,
    signature,
)

THREADS = (
    "Two threads run batches through a model that was prepared with sequential=True, or a call in "
    "another thread was cut off. Calibrate it in one thread, with fp4pass.calibrate."
)


class Stack:
    """Layers, each of which is called with the result of the one before it."""

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
        # The first layer of the call that runs, whether one runs that need not be seen, and whether
        # a layer runs.
        self._start = 0
        self._passing = self._inside = False
        # The thread that it is of.
        self._thread = 0
        self._output: Tensor | None = None

    def enter(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Record the call of a layer; return whether no layer behind it need be seen."""
        thread = this_thread()
        if thread and self._open is not None and self._thread not in (0, thread):
            raise CalibrationError(THREADS)
        begins = index <= self._start or (self._open is None and not self._passing)
        if begins:
            # A loop of the caller's own does not tell where a forward ends.
            self.finish_open()
            self._thread, self._start = thread, index
            if self._slot is None:
                self._slot = first_tensor(args, kwargs, f"{self.name}.{index}")
            # The tensors copied before may be gone, and others have their identities.
            self._copies.clear()
        elif self._open is None:
            return False
        elif (
            index < len(self._open.arguments)
            or self._output is None
            or pick(args, kwargs, self._slot) is not self._output
        ):
            before = f"{self.name}.{len(self._open.arguments) - 1}"
            raise CalibrationError(
                f"{self.name}.{index} is not called with just what {before} returned, so its "
                "layers cannot be calibrated one after the other. Leave out "
                f"{as_option('sequential', True)}, or skip these layers with "
                f"{as_rules(self.pattern)}."
            )
        self._inside = True
        # Tensors of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            positional = [self._keep(x, i == self._slot, index) for i, x in enumerate(args)]
            named = {key: self._keep(x, key == self._slot, index) for key, x in kwargs.items()}
            if not begins:
                assert self._open is not None
                passed = index - len(self._open.arguments)
                self._open.arguments += [*[None] * passed, (positional, named)]
                return False
            # A layer may change its input in place.
            hidden = offload_hidden_state(pick(args, kwargs, self._slot), copy=True)
            tokens = Kept.of(args, kwargs)
        call = Call(hidden, hidden, [*[None] * index, (positional, named)], tokens)
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
            self._output = hidden_state(output, f"{self.name}.{index}")
        if index + 1 == len(self.layers):
            self.finish_open()

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
            if self.context is not None:
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

    @property
    def tokens(self) -> int:
        """The number of tokens that were recorded."""
        return sum(call.visible for call in self.calls)

    def drop_open(self) -> None:
        """Forget a call that was cut off."""
        self._open = self._output = None
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


def this_thread() -> int:
    """Return the identity of this thread, 0 in compiled code, which cannot ask."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
