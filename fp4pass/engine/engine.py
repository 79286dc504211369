"""Quantize the layers of a model in order.

1. The layers outside of stacks are quantized at once, on what calibration observed of them.
2. Each layer of a stack, in turn, is brought to its device, calibrated on the outputs of the
   quantized layers before it, quantized, stored, and released.
3. `Conversion.finish` completes the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..core.fingerprint import digest_of
from ..core.progress import current
from ..distributed import ranks
from ..methods import resolve_method
from ..quantization.checks import require_statistics
from ..quantization.observers.reached import unmapped_layers, warn_of_unmapped
from ..quantization.plan import LayerPlan, Plan, with_folded_rotations
from ..quantization.quantize import quantize_layers, with_shared_scales
from ..record.rows import Row
from .conversion import Conversion
from .layer_device import LayerDevice
from .layer_runner import Runner, is_paired, place_of_states
from .layer_stack import Stack, outside


@dataclass(frozen=True, eq=False)
class Work:
    """A layer of a stack, and the layers of the plan that are in it."""

    stack: Stack
    index: int
    own: list[LayerPlan]

    @property
    def layer(self) -> nn.Module:
        """The module."""
        return self.stack.layers[self.index]

    @property
    def name(self) -> str:
        """The name that it has in the model."""
        return self.stack.layer_name(self.index)


class Engine:
    """Carry out a conversion.

    A model that is quantized at once has no stacks. With a store, finished layers go to it and come
    from it, and the next ones are read ahead. Ranks do the same steps together.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.root, self.plan, self.stacks = conversion.root, conversion.plan, conversion.stacks
        self.recording, self.is_scaled = conversion.recording, conversion.is_scaled
        self.searches, self.store = conversion.searches, conversion.layers
        self.device = LayerDevice(conversion.device, keeps=self.store is not None)
        self.rows: dict[str, Row] = {} if self.store is None else self.store.rows
        self._states_on: dict[Stack, torch.device] = {}
        # The digest of the layer before, on which the next one depends where layers run.
        self._before = ""

    def run(self) -> dict[str, Row]:
        """Quantize the model in place, and return the row of each entry of the plan."""
        current().expect(len(self.plan.by_weight()), "weights")
        self.plan = with_folded_rotations(self.plan, self.root)
        if self.is_scaled:
            self.plan = with_shared_scales(self.plan, ranks())
        self.is_paired = self.recording is not None and any(map(is_paired, self.plan.layers))
        works = _schedule(self.plan, self.stacks)
        ahead = [work.layer for work in works if self.store is not None]
        # Observers go before the first weight.
        unmapped = unmapped_layers(self.root)
        stored = nullcontext() if self.store is None else self.store
        replayed = nullcontext() if self.recording is None else self.recording.replayed()
        # Inference tensors could neither be saved for a gradient nor be written to later.
        with torch.inference_mode(False), torch.no_grad(), stored, replayed, closing(self.device):
            part = outside(self.plan, self.stacks)
            self._quantize(part if self.is_scaled else with_shared_scales(part, ranks()))
            self.device.start(ahead)
            for i, work in enumerate(works):
                current().begin(f"layer {i + 1}/{len(works)}")
                with self.device.placed(work.layer, work.name) as place:
                    self.device.look_ahead(ahead[i + 1 :])
                    self._run_layer(work, place)
        unmapped |= {} if self.recording is None else self.recording.unmapped
        warn_of_unmapped(unmapped, stacklevel=4)
        return self.rows

    def _run_layer(self, work: Work, place: torch.device) -> None:
        """Calibrate, quantize and store a layer, or take it from the store."""
        store, identity = self.store, self._identity(work)
        runner = None if self.recording is None else self._runner(work, place)
        # Linear layers that read one input go before those that read their results.
        groups = runner.pair(work.own) if runner is not None and self.is_paired else [work.own]
        is_kept = store is not None and store.has(work.name, identity)
        if store is not None and is_kept:
            store.restore(work.name, work.layer, work.own)
            current().step(len(Plan(tuple(work.own)).by_weight()))
            if runner is not None:
                self.device.bring(work.layer, place)
        for group in [] if is_kept else groups:
            # No name for it: its Hessians go before those of the next group are collected.
            self._quantize(
                self._ready(Plan(tuple(group)) if runner is None else runner.observe(group))
            )
        if runner is not None:
            runner.advance(self.is_paired)
        if store is not None and not is_kept:
            store.keep(work.name, work.layer, identity)

    def _runner(self, work: Work, place: torch.device) -> Runner:
        stack = work.stack
        if stack not in self._states_on:
            self._states_on[stack] = place_of_states(stack, place, self.is_paired)
        return Runner(stack, work.index, place, self._states_on[stack])

    def _ready(self, part: Plan) -> Plan:
        """Return a part with its global scales, once it has the statistics that it needs."""
        require_statistics(part, late=self.plan)
        return with_shared_scales(part, ranks())

    def _quantize(self, part: Plan) -> None:
        rows = quantize_layers(self.root, part, self.searches)
        self.rows.update({row.name: row for row in rows})

    def _identity(self, work: Work) -> str:
        """Return the digest of everything that decides a layer, "" without a store.

        Where layers run, a layer depends on those before it, on what its stack is called with, and
        on all that it computes with; else on its weights and their statistics.
        """
        if self.store is None:
            return ""
        name = f"{work.stack.name}.{work.index}"
        group = ranks()
        with group.together():
            found = self.store.identity(name, [name, self._before, *self._decides(work)])
        found = digest_of(group.gather(found))
        if self.recording is not None:
            self._before = found
        return found

    def _decides(self, work: Work) -> Iterator[object]:
        """Yield everything that decides a layer, but for the layers before it."""
        for members in Plan(tuple(work.own)).by_weight():
            yield [(each.name, each.shape, each.transposed) for each in members]
            config, stats = members[0].config, members[0].stats
            yield [config, resolve_method(config.method)[0], stats]
        if self.recording is None:
            for name, tensor in itertools.chain(
                work.layer.named_parameters(), work.layer.named_buffers()
            ):
                yield [name, tensor]
            return
        yield work.layer
        for call in work.stack.calls:
            if work.index == 0:
                yield call.hidden
            if work.index == 0 or len(call.arguments) > 1:
                yield call.of(work.index)
            if work.index in call.given:
                yield call.given[work.index]


def _schedule(plan: Plan, stacks: Sequence[Stack]) -> list[Work]:
    """Return the layers of stacks in their order, each with its part of the plan."""
    return [
        Work(stack, index, [each for each in plan.layers if each.module in modules])
        for stack in stacks
        for index, layer in enumerate(stack.layers)
        for modules in [set(layer.modules())]
    ]
