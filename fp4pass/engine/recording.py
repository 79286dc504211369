"""Record the calls of the layers of a model, so that convert can make them again."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._compat import FAULTS
from .._compat.torch import is_compiled
from ..distributed import ranks
from ..errors import CalibrationError
from ..quantization.observers.reached import observes, unobserved
from ..quantization.plan import Plan
from ..quantization.scan import SkippedLayer
from .layer_stack import Call, Stack, alike, is_equal, map_tensors, signature


class Recorded(Exception):
    """Stop a forward: everything that it was run for is recorded."""


class Recording:
    """Record the calls of the stacks of a model, by hooks before and behind layers."""

    def __init__(self, root: nn.Module, stacks: Sequence[Stack], whole: bool) -> None:
        """Attach the hooks; `whole`: every forward must run to its end, for more is observed."""
        self.root, self.stacks = root, list(stacks)
        self._whole = whole
        self._waiting: list[Stack] | None = None
        self._skims = False
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
        hook = self.root.register_forward_hook(self._end, with_kwargs=True)
        self._handles.append(hook)

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a batch through a model, as far as there is something to record."""
        self._waiting = list(self.stacks)
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

        Layers are passed over, each returning its input: first all but two, then all but one.
        Arguments that are the same both times do not come from other layers.
        """
        if self._whole or len(self.stacks) != 1:
            return False
        stack = self.stacks[0]
        before, found = len(stack.calls), []
        self._skims = True
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
        finally:
            self._skims = False
            stack.unknown.clear()
        del stack.calls[before:]
        stack.drop_open()
        if len(found) < 2 or any(call.given for call in found):
            return False
        # Once, or for each layer.
        count = max(len(call.arguments) for call in found)
        first, second = (
            call.arguments * count if len(call.arguments) == 1 else call.arguments for call in found
        )
        if not alike(first, second, is_equal):
            return False
        stack.add(found[0])
        return True

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

    def warn_of_unfollowed(self, stacklevel: int) -> None:
        """Warn of layers that cannot be calibrated on what the quantized layers before them give.

        Those of all processes are named.
        """
        own = [s.layer_name(i) for s in self.stacks for i in s.unfollowed]
        names = list(dict.fromkeys(itertools.chain(*ranks().gather(own))))
        if names:
            more = f" and {len(names) - 3} more layers" if len(names) > 3 else ""
            warnings.warn(
                f"{', '.join(names[:3])}{more}: the model changes the results of the layers before "
                "them by more than an addition, so they are calibrated on their inputs in the "
                "float model.",
                stacklevel=stacklevel + 1,
            )

    @property
    def tokens(self) -> int:
        """The tokens that were recorded, the most of any stack."""
        return max((sum(call.visible for call in stack.calls) for stack in self.stacks), default=0)

    @property
    def unmapped(self) -> dict[str, Tensor]:
        """The layers with inputs that a mask could not be mapped to, and that mask."""
        return {name: mask for stack in self.stacks for name, mask in stack.unmapped.items()}

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
    def _end(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Complete the calls, and run again where it is not known what comes between layers."""
        if torch.compiler.is_compiling():
            return
        for stack in self.stacks:
            stack.finish_open()
        if self._skims or is_compiled(root):
            return

        def again() -> None:
            with unobserved(root), torch.no_grad(), suppress(*FAULTS):
                root(*args, **kwargs)

        for stack in self.stacks:
            if stack.unknown:
                stack.learn_origins(again)

    @observes
    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack, index = self._places[layer]
        stack.leave(index, output)
