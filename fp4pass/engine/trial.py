"""Predict the time of a conversion by a trial on a copy of a layer."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import FAULTS
from ..core.clock import Clock
from ..errors import Fp4PassError
from ..nn.experts import add_stacks
from ..quantization.observers.batches import call_arguments, device_of
from ..quantization.observers.observer import Observer
from ..quantization.plan import LayerPlan, Plan, with_statistics
from ..quantization.quantize import quantize_layers, with_shared_scales
from ..quantization.replace import attach_observers
from ..quantization.scan import module_layers
from ..quantization.stacks import caller_of
from .layer_device import held_layer
from .layer_runner import Runner, is_paired, place_of_states
from .layer_stack import Stack
from .schedule import planned_stacks

_log = logging.getLogger(__name__)

# Rows of a weight that warms up kernels, which are compiled at their first call.
_WARM_ROWS = 32

# Errors of models that cannot run as the trial runs them.
_FAULTS = (*FAULTS, Fp4PassError)


@dataclass(frozen=True)
class Trial:
    """The seconds of the parts of a conversion.

    Attributes:
        search: of all weights.
        batch: of the forwards for the batch of the trial.
        size: of that batch, as `size_of` has it.
    """

    search: float
    batch: float = 0.0
    size: int = 1

    def seconds(self, size: int) -> float:
        """Return how long it takes with batches of this size together."""
        return self.search + self.batch * size / self.size


class _Reached(Exception):
    """Stop a forward: the call of the layer is known."""


def try_layer(
    root: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    sequential: bool,
    device: torch.device | str | None = None,
) -> Trial | None:
    """Time a conversion by a copy of one layer: the first one of the model's largest stack.

    Args:
        root: the float model; it is not changed.
        plan: the layers and their configs.
        batch: a calibration batch; None without data.
        sequential: whether layers are calibrated one after the other.
        device: of the work; by default that of the layers.

    Returns:
        None for a model that cannot be tried: no batch reaches its largest layer.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            first = _Try(root, plan, batch, sequential, device)
            found = first.time()
            if first.place.type == "cpu":
                return found
            # Kernels for these sizes were compiled meanwhile, which happens once.
            del first
            return _Try(root, plan, batch, sequential, device).time()
    except _FAULTS as error:
        # An error of the model is for the call itself to raise.
        _log.info("no layer could be tried: %s: %s", type(error).__name__, error)
        return None


def size_of(batch: Any) -> int:
    """Return the numbers in the first tensor of a batch: its tokens."""
    args, kwargs = call_arguments(batch, None)
    return next((x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), 1)


class _Try:
    """A copy of one layer, and its part of a plan."""

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        batch: Any,
        sequential: bool,
        device: torch.device | str | None,
    ) -> None:
        self.root, self.plan, self.batch, self.sequential = root, plan, batch, sequential
        self.stacks = planned_stacks(root, plan)
        self.stack = max(self.stacks, key=lambda each: self._weights(each.layers), default=None)
        if self.stack is None:
            # A linear layer alone, which is not called after others like it.
            linears = [each for each in plan.layers if not each.is_stack]
            largest = max(linears, key=lambda each: math.prod(each.shape))
            self.layer, self.name, self.index = largest.module, largest.name, 0
        else:
            layers = self.stack.layers
            self.index = next(i for i, each in enumerate(layers) if self._weights([each]))
            self.layer, self.name = layers[self.index], self.stack.layer_name(self.index)
        with held_layer(self.layer):
            self.copy = copy.deepcopy(self.layer)
            home = next(x.device for x in self.copy.parameters())
        self.place = home if device is None else torch.device(device)
        self.copy.to(self.place)
        # A model that is being packed refuses to be called.
        self.whole = nn.ModuleList([self.copy])
        self.own = self._planned()
        # Of all weights, by those of the layer.
        self.share = self._weights([root]) / self._weights([self.layer])
        # It is followed by one that is not run.
        self.calls = Stack("the trial", "*", [self.copy, nn.Identity()])

    def time(self) -> Trial:
        """Time the search, and a batch."""
        self._warm_up()
        if self.batch is None:
            return Trial(self.share * self._seconds(lambda: self._quantize(Plan(tuple(self.own)))))
        around, runs = self._time_around()
        plain = self._seconds(self._run)
        outside = max(around - runs * plain, 0.0)
        run, search = self._time_sequential() if self.sequential else self._time_whole()
        if self.sequential:
            # A batch runs to the first layer, unless more is to be seen of it.
            stacks, whole = self.stacks, self._weights([self.root])
            inside = len(stacks) == 1 and self._weights(stacks[0].layers) == whole
            outside = 0.0 if inside else outside + self.share * plain
        return Trial(self.share * search, self.share * run + outside, size_of(self.batch))

    def _weights(self, modules: Iterable[nn.Module]) -> int:
        """Return how many weights of the plan are in some modules."""
        inside = {each for module in modules for each in module.modules()}
        layers = [each for each in self.plan.layers if caller_of(each.module) in inside]
        return sum({each.weight_key: math.prod(each.shape) for each in layers}.values())

    def _planned(self) -> list[LayerPlan]:
        """Return the plan of the layers of the copy."""
        planned = {each.name: each for each in self.plan.layers}
        found = []
        for layer in module_layers(self.copy):
            name = f"{self.name}.{layer.name}" if layer.name else self.name
            if name in planned:
                found.append(LayerPlan(**vars(layer), config=planned[name].config))
        add_stacks(layer.module for layer in found)
        return found

    def _warm_up(self) -> None:
        """Observe and quantize a few rows of each width."""
        linears = [each for each in self.own if not each.is_stack and not each.transposed]
        for layer in {each.columns: each for each in linears}.values():
            weight = layer.module.get_parameter("weight")[:_WARM_ROWS].clone()
            thin = nn.Linear(layer.columns, len(weight), bias=False, device="meta")
            thin.weight = nn.Parameter(weight, requires_grad=False)
            observer = Observer(tuple(sorted(layer.config.needs)), layer.columns)
            x = torch.linspace(-1, 1, weight.numel(), device=weight.device).view_as(weight)
            observer(x, x)
            facts: dict[str, Any] = {
                "module": thin,
                "weight_key": id(thin.weight),
                "shape": tuple(weight.shape),
            }
            warm = dataclasses.replace(layer, **facts, stats=observer.stats())
            quantize_layers(nn.ModuleList([thin]), with_shared_scales(Plan((warm,))))

    def _time_around(self) -> tuple[float, float]:
        """Return the seconds of a batch in the model, and how many layers like this one ran.

        The stack is run as far as the layer, if the model lets the others be passed over.
        """
        args, kwargs = call_arguments(self.batch, device_of(self.root))

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for calls in (self.calls, *([self.stack] if self.stack else [])):
                calls.enter(self.index if calls is self.stack else 0, args, kwargs)
            self.calls.leave(0, torch.empty(0))
            self.calls.finish_open()
            raise _Reached

        handle = self.layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with suppress(_Reached):
                self.root(*args, **kwargs)
        finally:
            handle.remove()
            if self.stack is not None:
                self.stack.drop_open()
        if self.stack is not None:
            with suppress(*_FAULTS), self.stack.passed_over(self.index + 1):
                return self._seconds(lambda: self.root(*args, **kwargs)), self.index + 1
        return self._seconds(lambda: self.root(*args, **kwargs)), self.share

    def _run(self) -> None:
        (call,) = self.calls.calls
        args, kwargs = self.calls.arguments(call, 0, call.hidden, self.place)
        self.copy(*args, **kwargs)

    def _time_whole(self) -> tuple[float, float]:
        """Return the seconds of a batch in the observed layer, and of its search."""
        attach_observers(self.copy, self.own, {n for each in self.own for n in each.config.needs})
        run = self._seconds(self._run)
        plan = with_statistics(Plan(tuple(self.own)))
        return run, self._seconds(lambda: self._quantize(plan))

    def _time_sequential(self) -> tuple[float, float]:
        """Return the same for a layer that is calibrated behind the others."""
        paired = any(map(is_paired, self.plan.layers))
        runner = Runner(self.calls, 0, self.place, place_of_states(self.calls, self.place, paired))
        clock = Clock(self.place)
        groups = runner.pair(self.own) if paired else [self.own]
        run, search = clock.lap(), 0.0
        for group in groups:
            part = runner.observe(group)
            run += clock.lap()
            self._quantize(part)
            search += clock.lap()
        runner.advance(paired)
        return run + clock.lap(), search

    def _quantize(self, plan: Plan) -> None:
        """Quantize layers of the copy, as far as the batch reached them."""
        known = Plan(tuple(e for e in plan.layers if all(map(e.stats.has, e.config.needs))))
        quantize_layers(self.whole, with_shared_scales(known))

    def _seconds(self, work: Callable[[], object]) -> float:
        clock = Clock(self.place)
        work()
        return clock.lap()
