"""The parts of a plan, in the order in which they are quantized: all at once, or by layers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import nn
from tqdm import tqdm

from .._compat.accelerate import execution_device, hook_of
from ..distributed import ranks
from ..errors import OptionError
from .checks import require_statistics
from .layer_inputs import Recording, find_stacks
from .layer_stack import Stack
from .plan import LayerPlan, Plan
from .quantize import with_shared_scales
from .scan import SkippedLayer
from .sequential import Runner, is_paired

_CPU = torch.device("cpu")


class Keeper(Protocol):
    """Where layers go as soon as they are packed, so that memory holds one at a time."""

    def has(self, name: str) -> bool:
        """Return whether a layer is there already, from a run before."""

    def restore(self, name: str, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer what they were packed to."""

    def keep(self, name: str, layer: nn.Module) -> None:
        """Take what was packed of a layer out of memory."""

    def fetch(self, layer: nn.Module) -> None:
        """Begin to read the weights of the layer that is next."""


def plan_parts(
    root: nn.Module,
    plan: Plan,
    first: Plan,
    recording: Recording | None,
    device: torch.device | str | None,
    keeper: Keeper | None = None,
) -> Generator[Plan]:
    """Yield the plan as it is quantized: at once, or `first` and then one layer after the other.

    Args:
        root: the model.
        plan: all of it.
        first: with the statistics of what is in no layer.
        recording: what the layers are called with; None where no method needs data.
        device: where to run one layer after the other; by default where they are.
        keeper: takes finished layers; the plan has no global scales then.
    """
    if recording is None and keeper is None:
        yield plan
        return
    if recording is None:
        stacks = find_stacks(root, plan.layers)
        inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
        first = plan.where(lambda e: isinstance(e, SkippedLayer) or e.module not in inside)
    else:
        stacks = recording.stacks
    outside = {entry.name for entry in first.entries}
    layers = _layer_parts(stacks, plan, device, keeper, recording is not None)
    with nullcontext() if recording is None else recording.replayed(), closing(layers):
        part = plan.where(lambda entry: entry.name in outside)
        yield part if keeper is None else with_shared_scales(part, ranks())
        for part in layers:
            yield part
            del part


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
    places = [(stack, index) for stack in stacks for index in range(len(stack.layers))]
    behind = [stack.layers[index] for stack, index in places[1:]]
    bar = tqdm(places, desc="convert", unit="layer", leave=False, disable=None)
    for i, (stack, index) in enumerate(bar):
        layer, name = stack.layers[index], f"{stack.name}.{index}"
        modules = set(layer.modules())
        own = [each for each in plan.layers if each.module in modules]
        is_kept = keeper is not None and keeper.has(name)
        if keeper is not None and is_kept and not paired:
            keeper.restore(name, own)
        if is_kept and not runs:
            continue
        with _placed(stack, index, device) as place:
            if keeper is not None and i < len(behind):
                keeper.fetch(behind[i])
            runner = Runner(stack, index, place) if runs else None
            groups = runner.pair(own) if runner is not None and paired else [own]
            if not is_kept:
                for group in groups:
                    part = Plan(tuple(group)) if runner is None else runner.observe(group)
                    yield _ready(part, plan)
                    del part
            elif keeper is not None and paired:
                keeper.restore(name, own)
                layer.to(place)
            if runner is not None:
                runner.advance(paired)
        if keeper is not None and not is_kept:
            keeper.keep(name, layer)


def _ready(part: Plan, whole: Plan) -> Plan:
    """Return a part with its global scales, once it has the statistics that it needs."""
    require_statistics(part, late=whole)
    return with_shared_scales(part, ranks())


@contextmanager
def _placed(stack: Stack, index: int, device: torch.device | str | None) -> Iterator[torch.device]:
    """Bring a layer to the device that is yielded, and back, unless accelerate does."""
    layer = stack.layers[index]
    tensors = (*layer.parameters(), *layer.buffers())
    home = next((x.device for x in tensors if x.device.type != "meta"), _CPU)
    place = home if device is None else torch.device(device)
    if not any(hook_of(module) is not None for module in layer.modules()):
        layer.to(place)
        try:
            yield place
        finally:
            layer.to(home)
        return
    runs_on = execution_device(layer) or home
    if device is not None and runs_on != place:
        raise OptionError(
            f"device is {str(device)!r}, but accelerate runs {stack.name}.{index} on "
            f"{str(runs_on)!r}. Leave device out, or load the model without accelerate's hooks."
        )
    yield runs_on
