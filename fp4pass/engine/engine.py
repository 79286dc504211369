"""The parts of a plan, in the order in which they are quantized: all at once, or by layers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..core.progress import current
from ..distributed import ranks
from ..experts import ExpertStack, add_stack
from ..quantization.checks import require_statistics
from ..quantization.plan import LayerPlan, Plan
from ..quantization.quantize import with_shared_scales
from ..quantization.scan import SkippedLayer
from ..quantization.searches import search_cost, search_kind
from .layer_device import Places
from .layer_identity import Identities
from .layer_runner import Runner, is_paired, place_of_states
from .layer_stack import Stack
from .recording import Recording, find_stacks
from .schedule import run_costs, run_kinds


class Keeper(Protocol):
    """Where layers go as soon as they are packed, so that memory holds one at a time."""

    def has(self, name: str, identity: str) -> bool:
        """Return whether a layer is there already, from a run before."""

    def restore(self, name: str, layer: nn.Module, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer what they were packed to."""

    def keep(self, name: str, layer: nn.Module, identity: str) -> None:
        """Take what was packed of a layer out of memory, in the end."""

    def close(self, is_done: bool) -> None:
        """Take what is left, where all is done."""


def plan_parts(
    root: nn.Module,
    plan: Plan,
    first: Plan,
    recording: Recording | None,
    device: torch.device | str | None,
    keeper: Keeper | None = None,
    is_scaled: bool = True,
) -> Generator[Plan]:
    """Yield the plan as it is quantized: at once, or `first` and then one layer after the other.

    Args:
        root: the model.
        plan: all of it.
        first: with the statistics of what is in no layer.
        recording: what the layers are called with; None where no method needs data.
        device: where to run one layer after the other; by default where they are.
        keeper: takes finished layers.
        is_scaled: the plan has its global scales.
    """
    if recording is None and keeper is None:
        yield plan
        return
    if recording is None:
        for layer in plan.layers:
            if isinstance(layer.module, ExpertStack):
                add_stack(layer.module)
        stacks = find_stacks(root, plan.layers)
        inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
        first = plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)
    else:
        stacks = recording.stacks
    outside = {entry.name for entry in first.entries}
    if recording is not None:
        current().expect(run_costs(stacks, any(map(is_paired, plan.layers))))
    layers = _layer_parts(stacks, plan, device, keeper, recording is not None)
    is_done = False
    try:
        with nullcontext() if recording is None else recording.replayed(), closing(layers):
            part = plan.where(lambda entry: entry.name in outside)
            yield part if is_scaled else with_shared_scales(part, ranks())
            for part in layers:
                yield part
                del part
        is_done = True
    finally:
        if keeper is not None:
            keeper.close(is_done)


def _layer_parts(
    stacks: Sequence[Stack],
    plan: Plan,
    device: torch.device | str | None,
    keeper: Keeper | None,
    runs: bool,
) -> Generator[Plan]:
    """Yield the plan of each layer of the stacks in turn, with statistics and global scales.

    Quantize each part before asking for the next, whose inputs come from what is quantized. Where a
    method needs what the float model has, a layer is several parts: linear layers that read the
    same go before those that read what they lead to. Each layer is brought to `device` and back,
    and given to the keeper. `runs`: layers are called with what was recorded.
    """
    paired = runs and any(map(is_paired, plan.layers))
    steps = [
        _Step(stack, index, [each for each in plan.layers if each.module in modules])
        for stack in stacks
        for index, layer in enumerate(stack.layers)
        for modules in [set(layer.modules())]
    ]
    identities = Identities(runs)
    states_on: dict[Stack, torch.device] = {}
    places = Places(device, keeps=keeper is not None)
    progress = current()
    with closing(places):
        ahead = steps if keeper is not None else []
        for step in ahead[:2]:
            places.read(step.layer)
        for first in ahead[:1]:
            places.fetch(first.layer)
        for i, step in enumerate(steps):
            progress.begin(f"layer {i + 1}/{len(steps)}")
            with places.placed(step.layer, step.name) as place:
                for following in ahead[i + 1 : i + 2]:
                    places.fetch(following.layer)
                # The disk is not to wait for the copies of the one in between.
                for later in ahead[i + 2 : i + 3]:
                    places.read(later.layer)
                identity, is_kept = "", False
                if keeper is not None:
                    identity = identities.of(step.stack, step.index, step.own)
                    is_kept = keeper.has(step.name, identity)
                runner = None
                if runs:
                    if step.stack not in states_on:
                        states_on[step.stack] = place_of_states(step.stack, place, paired)
                    runner = Runner(step.stack, step.index, place, states_on[step.stack])
                groups = [step.own]
                # Before its weights are replaced.
                kinds, cost = run_kinds(step.layer)
                if runner is not None and paired:
                    groups = runner.pair(step.own)
                    progress.step(kinds["pair"], cost)
                if keeper is not None and is_kept:
                    keeper.restore(step.name, step.layer, step.own)
                    step.pass_by()
                    if runner is not None:
                        progress.step(kinds["observe"], cost, is_typical=False)
                        places.bring(step.layer, place)
                else:
                    for group in groups:
                        part = Plan(tuple(group)) if runner is None else runner.observe(group)
                        if runner is not None:
                            progress.step(kinds["observe"], cost / len(groups))
                        yield _ready(part, plan)
                        del part
                if runner is not None:
                    runner.advance(paired)
                    is_last = step.index + 1 == len(step.stack.layers)
                    progress.step(kinds["advance"], 0.0 if is_last else cost)
                if keeper is not None and not is_kept:
                    keeper.keep(step.name, step.layer, identity)


@dataclass(frozen=True, eq=False)
class _Step:
    """A layer of a stack, and what of the plan is in it."""

    stack: Stack
    index: int
    own: list[LayerPlan]

    @property
    def layer(self) -> nn.Module:
        return self.stack.layers[self.index]

    @property
    def name(self) -> str:
        return self.stack.layer_name(self.index)

    def pass_by(self) -> None:
        """Count the weights that a run before has searched."""
        progress = current()
        for first, *_ in Plan(tuple(self.own)).by_weight():
            cost = search_cost(first)
            progress.step(search_kind(first), cost, {"weights": 1}, is_typical=False)


def _ready(part: Plan, whole: Plan) -> Plan:
    """Return a part with its global scales, once it has the statistics that it needs."""
    require_statistics(part, late=whole)
    return with_shared_scales(part, ranks())
