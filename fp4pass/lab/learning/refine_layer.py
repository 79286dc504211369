"""Train one layer of a stack to return what it returns in the float model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.layer_device import LayerDevice
from ...engine.layer_runner import place_of_states
from ...engine.layer_stack import Call, Stack, hidden_state, offload_hidden_state
from ...record.rows import RefinedLayer
from .learned_layer import Hessians, LearnedLayer, Values, put, values_of
from .options import Refine

# Decay rates of Adam's first and second moments.
_BETAS = (0.9, 0.99)

# So many batches say whether other block scales are better.
_TRIED = 8

# Smaller mean squares of a target are those of nothing.
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Pair:
    """A stack of the converted model, and the same of the float model.

    Attributes:
        stack: its calls have what reaches the next layer there.
        twin: that of the float model.
        taught: so many calls are learned from; the others judge.
    """

    stack: Stack
    twin: Stack
    taught: int


@dataclass(frozen=True, eq=False)
class Learning:
    """A layer and the data it learns from.

    Attributes:
        pair: the stacks that it is in.
        index: its place there.
        weights: the float weights of its quantized layers that learn.
        small: its norms and biases that learn, by their names.
        options: how it learns.
    """

    pair: Pair
    index: int
    weights: Mapping[nn.Module, Tensor]
    small: Mapping[str, nn.Parameter]
    options: Refine

    @property
    def name(self) -> str:
        """The name of the layer in the model."""
        return self.pair.stack.layer_name(self.index)

    @property
    def layer(self) -> nn.Module:
        """The layer of the converted model."""
        return self.pair.stack.layers[self.index]

    def run(self, device: LayerDevice) -> RefinedLayer:
        """Refine the layer on a device, and pass its output to the next layer."""
        stack, twin = self.pair.stack, self.pair.twin
        for each in (stack, twin):
            each.begin(self.index)
        with device.placed(twin.layers[self.index], self.name) as place:
            states_on = place_of_states(stack, place, paired=True)
            targets = [
                call.hidden
                if call.of(self.index) is None
                else _waiting(self._output(twin, call, place), states_on)
                for call in twin.calls
            ]
        learned: Values = {}
        try:
            with device.placed(self.layer, self.name) as place:
                work = _Work(self, targets, place)
                before, after = self._learn(work)
                learned = values_of([self.layer], self.small)
                for call in stack.calls:
                    if call.of(self.index) is not None and stack.passes_on(call, self.index):
                        call.hidden = _waiting(self._output(stack, call, place), states_on)
        finally:
            # Parameters that were elsewhere are there again as they were.
            put(learned)
        for call, target in zip(twin.calls, targets, strict=True):
            call.hidden = target
        return RefinedLayer(self.name, before, after, kept=after < before)

    def _learn(self, work: _Work) -> tuple[float, float]:
        """Return the errors before and after learning; the layer is as it was if it is no less."""
        before = after = work.error()
        if not self.weights and not self.small:
            return before, after
        layer = LearnedLayer(self.layer, self.weights, self.small)
        try:
            work.learn(layer)
            layer.freeze()
            after = work.error()
        finally:
            if not after < before:
                layer.restore()
        return before, after

    def _output(self, stack: Stack, call: Call, place: torch.device) -> Tensor:
        """Return the hidden state of a call that a layer passes to the next."""
        args, kwargs = stack.arguments(call, self.index, call.hidden, place)
        with nullcontext() if call.tokens is None else call.tokens.again(args, kwargs):
            return hidden_state(stack.layers[self.index](*args, **kwargs), self.name)


class _Work:
    """The calls of a layer that is where it is worked on."""

    def __init__(self, learning: Learning, targets: Sequence[Tensor], place: torch.device) -> None:
        self._learning, self._targets, self._place = learning, targets, place
        pair = learning.pair
        self._calls = pair.stack.calls
        reached = [i for i, call in enumerate(self._calls) if call.of(learning.index) is not None]
        self._taught = [i for i in reached if i < pair.taught]
        self._judging = [i for i in reached if i >= pair.taught]

    def learn(self, layer: LearnedLayer) -> None:
        """Take the steps, and leave their result in the layer."""
        options = self._learning.options
        if not self._taught:
            return
        if options.scales:
            judging = self._taught[:_TRIED]
            layer.search_scales(self._hessians(layer), lambda: self._error(judging))
        layer.lean(options.share)
        adam = torch.optim.Adam(_groups(layer, options), betas=_BETAS)
        sums = [group["lr"] for group in adam.param_groups]
        values = [*layer.latents, *layer.masters]
        totals = [torch.zeros_like(each) for each in values]
        order = _order(self._taught, options.seed)
        for step, rate in enumerate(options.rates):
            for group, total in zip(adam.param_groups, sums, strict=True):
                group["lr"] = total * rate
            i = next(order)
            with torch.enable_grad():
                errors, weights = self._errors(i)
                # Times K, so that its gradients fit float16.
                loss = (errors * weights).sum() * self._targets[i].shape[-1]
                # Not `backward`, which would add to the gradients of the model.
                gradients = torch.autograd.grad(loss, layer.learned, allow_unused=True)
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = None if gradient is None else gradient.float()
            adam.step()
            layer.show()
            if step >= options.averages_from:
                torch._foreach_add_(totals, values)
        count = options.steps - options.averages_from
        for value, total in zip(values, totals, strict=True):
            value.detach().copy_(total.div_(count))
        layer.show()

    def error(self) -> float:
        """Return the root of the mean error of the layer's present output on held-out batches."""
        return self._error(self._judging)

    def _error(self, calls: Sequence[int]) -> float:
        found = torch.zeros(2, dtype=torch.float64, device=self._place)
        for i in calls:
            errors, weights = self._errors(i)
            found += torch.stack(((errors * weights).sum(), self._size(i, weights))).double()
        error, size = found.tolist()
        return float((error / size) ** 0.5) if size else 0.0

    def _errors(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the mean square errors of tokens [T], float32, and their weights in the loss."""
        call = self._calls[i]
        y = self._learning._output(self._learning.pair.stack, call, self._place)
        target = self._targets[i].to(self._place).float()
        errors = (y.float() - target).square().mean(-1).flatten()
        return errors, self._weights(i, target.square().mean(-1).flatten())

    def _weights(self, i: int, squares: Tensor) -> Tensor:
        """Return the weights of tokens with targets of these mean squares."""
        tokens = self._calls[i].tokens
        visible = None if tokens is None else tokens.reading.find(self._targets[i]).visible
        is_seen = 1.0 if visible is None else visible.to(squares.device).float()
        if self._learning.options.token_weights == "none":
            return squares.new_ones(()) / (squares * is_seen).mean().clamp(min=_TINY) * is_seen
        # Zero targets give no scale for an error.
        return torch.where(squares > 0, 1 / squares.clamp(min=_TINY), 0.0) * is_seen

    def _size(self, i: int, weights: Tensor) -> Tensor:
        """Return the weighted sum of the mean squares of targets."""
        target = self._targets[i].to(self._place).float()
        return (target.square().mean(-1).flatten() * weights).sum()

    @torch.no_grad()
    def _hessians(self, layer: LearnedLayer) -> dict[nn.Parameter, Tensor]:
        sums = Hessians(layer)
        try:
            for i in self._taught:
                stack = self._learning.pair.stack
                self._learning._output(stack, self._calls[i], self._place)
        finally:
            found = sums.close()
        return found


def _groups(layer: LearnedLayer, options: Refine) -> list[dict[str, Any]]:
    """Return the parameters that learn, and how far each moves in all steps."""
    groups: list[dict[str, Any]] = [{"params": list(layer.latents), "lr": options.travel}]
    sizes = [each.square().mean().sqrt() for each in layer.masters]
    numbers = torch.stack(sizes).tolist() if sizes else []
    groups += [
        {"params": [master], "lr": options.norm_lr * size / options.rates[0]}
        for master, size in zip(layer.masters, numbers, strict=True)
    ]
    return [group for group in groups if group["params"]]


def _order(indices: Sequence[int], seed: int) -> Iterator[int]:
    """Yield indices for ever, all of them in random order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(indices), generator=generator).tolist():
            yield indices[i]


def _waiting(state: Tensor, states_on: torch.device) -> Tensor:
    return offload_hidden_state(state) if states_on.type == "cpu" else state.to(states_on)
