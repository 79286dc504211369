"""One layer of a stack learns to give what it gives in the float model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, expected
from .arguments import hidden_state
from .hidden_states import waiting
from .layer_stack import Call, Stack
from .learned import LearnedLayer, put
from .placing import Places
from .report import RefinedLayer
from .sequential import place_of_states

# Of what Adam remembers, for first and second moments.
_BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Refine:
    """Options of `refine`; docs/quality.md says what they are worth.

    Attributes:
        steps: of each layer, one batch each.
        lr: how far codes move in a step, in units of their block scale; it falls to 0.
        norm_lr: the same of norms and biases, in units of their root mean square; 0 keeps them.
        seed: of the order of the batches.

    Raises:
        OptionError: a value is out of range.
    """

    steps: int = 224
    lr: float = 0.01
    norm_lr: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                wanted = f"an integer from {least} on"
                raise OptionError(expected(f"Refine: {name}", wanted, repr(value)))
        for name in ("lr", "norm_lr"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise OptionError(expected(f"Refine: {name}", "a number from 0 on", repr(value)))


@dataclass(frozen=True, eq=False)
class Learning:
    """A layer, and what it learns from.

    Attributes:
        stack: of the converted model; its calls have what reaches the layer there.
        twin: the same stack of the float model.
        index: of the layer.
        learned: so many calls are learned from, the others judge.
        options: how it learns.
    """

    stack: Stack
    twin: Stack
    index: int
    learned: int
    options: Refine

    @property
    def name(self) -> str:
        """The name of the layer."""
        return f"{self.stack.name}.{self.index}"

    def run(self, device: torch.device | None, shared: frozenset[int]) -> RefinedLayer:
        """Refine the layer on a device, and have the next one see what it gives then."""
        layer, twin = self.stack.layers[self.index], self.twin.layers[self.index]
        with _placed(twin, self.name, device) as place:
            states_on = place_of_states(self.stack, place, paired=True)
            targets = [
                _kept(_output(self.twin, self.index, call, place), states_on)
                for call in self.twin.calls
            ]
        with _placed(layer, self.name, device) as place:
            before = self._error(targets, place)
            learned = LearnedLayer(layer, shared, small=self.options.norm_lr > 0)
            self._learn(learned, targets, place)
            values = learned.learned()
            del learned
            start = put(values)
            after = self._error(targets, place)
            kept = after < before
            if not kept:
                put(start)
            for call in self.stack.calls:
                call.hidden = _kept(_output(self.stack, self.index, call, place), states_on)
        if kept:
            # Parameters that were elsewhere are there again as they were.
            put({key: value for key, value in values.items() if key[1] in key[0]._parameters})
        for call, target in zip(self.twin.calls, targets, strict=True):
            call.hidden = target
        return RefinedLayer(self.name, before, after, kept)

    def _learn(self, layer: LearnedLayer, targets: Sequence[Tensor], place: torch.device) -> None:
        """Take the steps."""
        options = self.options
        groups: list[dict[str, Any]] = [
            {"params": [each], "lr": options.lr} for each in layer.weights
        ]
        groups += [
            {"params": [each], "lr": options.norm_lr * float(each.detach().square().mean().sqrt())}
            for each in layer.small
        ]
        values = [each for group in groups for each in group["params"]]
        if not values:
            return
        adam = torch.optim.Adam(groups, betas=_BETAS)
        falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, options.steps)
        order = _order(self.learned, options.seed)
        with layer.learning(), torch.enable_grad():
            for _ in range(options.steps):
                i = next(order)
                y = _output(self.stack, self.index, self.stack.calls[i], place, layer)
                loss = _loss(y, targets[i])
                # Not `backward`, which would add to the gradients of the model.
                gradients = torch.autograd.grad(loss, values, allow_unused=True)
                for value, gradient in zip(values, gradients, strict=True):
                    value.grad = gradient
                adam.step()
                falling.step()

    def _error(self, targets: Sequence[Tensor], place: torch.device) -> float:
        """Return |y - t| / |t| of what the layer as it is now gives held-out batches."""
        error = energy = 0.0
        for call, target in zip(
            self.stack.calls[self.learned :], targets[self.learned :], strict=True
        ):
            y, t = _output(self.stack, self.index, call, place).double(), target.to(place).double()
            error += float((y - t).square().sum())
            energy += float(t.square().sum())
        return math.sqrt(error / energy) if energy else 0.0


def _loss(y: Tensor, target: Tensor) -> Tensor:
    """Return |y - t|^2 over the mean square of t, so that gradients fit float16."""
    target = target.to(y.device).float()
    return (y.float() - target).square().sum() / target.square().mean()


def _order(count: int, seed: int) -> Iterator[int]:
    """Yield indices for ever, all of them in random order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _output(
    stack: Stack, index: int, call: Call, place: torch.device, learned: LearnedLayer | None = None
) -> Tensor:
    """Return what a layer hands to the next for the hidden state of a call."""
    args, kwargs = stack.arguments(call, index, call.hidden, place)
    output = stack.layers[index](*args, **kwargs) if learned is None else learned(args, kwargs)
    return hidden_state(output, f"{stack.name}.{index}")


def _kept(state: Tensor, states_on: torch.device) -> Tensor:
    return waiting(state) if states_on.type == "cpu" else state.to(states_on)


@contextmanager
def _placed(layer: nn.Module, name: str, device: torch.device | None) -> Iterator[torch.device]:
    """Bring a layer to a device and back."""
    with closing(Places(device, keeps=False)) as places, places.placed(layer, name) as place:
        yield place
