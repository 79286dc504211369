"""Carry out `convert`: check, quantize the layers of a model in order, complete the model.

1. Everything that can be wrong raises before the first weight.
2. The layers outside of stacks are quantized at once, on what calibration observed of them.
3. Each layer of a stack, in turn, is brought to its device, calibrated on the outputs of the
   quantized layers before it, quantized, stored, and released.
4. The model gets its recipe and its report.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from .._compat.accelerate import offloaded_tensors
from ..checkpoint.beside import beyond_model
from ..checkpoint.finished import FinishedLayers, FinishedSearches
from ..checkpoint.model_layers import finish, split_note
from ..core.fingerprint import digest_of
from ..core.progress import current
from ..distributed import ranks
from ..graph.inductor import install_passes
from ..methods import resolve_method
from ..nn.kv_cache import KV_CACHE
from ..quantization import plan as planning
from ..quantization.observers.kv_cache import require_cache_statistics, settle_cache
from ..quantization.quantize import quantize_layers, with_shared_scales
from ..quantization.recipe import recipe_of
from ..quantization.scan import forbid_adapter_merge
from ..record.config import Rule, check_rules
from ..record.rows import Row, say_once, tensor_core_note
from ..record.state import config_of, forget_state, smoothing_of
from .layer_device import LayerDevice
from .layer_runner import Runner, is_paired, place_of_states
from .recording import Stack, find_stacks, outside

# A folder, as a caller names it.
Folder = str | os.PathLike[str] | None


@dataclass(frozen=True, eq=False)
class Work:
    """A layer of a stack, the name that it has in the model, and the layers of the plan in it."""

    stack: Stack
    index: int
    layer: nn.Module
    name: str
    own: list[planning.LayerPlan]


class Conversion:
    """Carry out one call of `convert`."""

    # A model that is quantized at once has no stacks. With a store, finished layers go to it and
    # come from it, and the next ones are read ahead. Ranks do the same steps together.

    def __init__(
        self,
        root: nn.Module,
        given: Mapping[str, object],
        rules: Sequence[Rule],
        kv_cache: str | None,
        *,
        resume: Folder,
        stream: Folder,
        device: torch.device | str | None,
    ) -> None:
        """Plan the call; everything that can be wrong raises here."""
        self.root = root
        self.before = before = planning.require_float(root, "convert")
        self.recording = recording = None if before is None else before.recording
        self.kv_cache = planning.cache_of(before, kv_cache)
        planning.require_place(device, by_layers=recording is not None or stream is not None)
        self.config = config_of(given, before)
        self.rules = (*check_rules(rules), *(before.rules if before else ()))
        plan = planning.plan_layers(root, self.config, self.rules)
        planning.require_layers(plan)
        planning.require_one_plan(plan, before)
        if recording is not None:
            recording.require_calls()
            recording.log_given()
        self.stacks = [] if recording is None else recording.stacks
        first = planning.with_statistics(outside(plan, self.stacks))
        if before is not None and any(layer.stats.tokens for layer in first.layers):
            first = planning.with_unreached(first)
        planning.require_unpaired(first.layers)
        planning.require_statistics(first, plan, before)
        if recording is not None:
            planning.require_statistics(
                planning.with_unreached(recording.passed_by(plan)), plan, before
            )
        self.searches = None if resume is None else FinishedSearches(resume)
        self.plan = plan = plan.update(first)
        planning.require_layers(plan)
        if self.kv_cache is not None and recording is None:
            require_cache_statistics(root, self.kv_cache)
        notes = [tensor_core_note(layer.config for layer in plan.layers), split_note(root, plan)]
        for note in notes if ranks().rank == 0 else ():
            if note:
                say_once(note)
        self.store: FinishedLayers | None = None
        if stream is not None:
            self.store = FinishedLayers(stream, root, (plan.outline(), recording is not None))
            self.stacks = self.stacks or find_stacks(root, plan.layers)
        install_passes()
        # Whether all global scales are chosen at once: a weight on a disk is read once, where its
        # layer is quantized.
        offloads = recording is not None and offloaded_tensors(root)
        self.is_scaled = self.store is None and not offloads
        self.device = LayerDevice(device, keeps=self.store is not None)
        self.rows: dict[str, Row] = {} if self.store is None else self.store.rows
        self._states_on: dict[Stack, torch.device] = {}
        # The digest of the layer before, on which the next one depends where layers run.
        self._before = ""

    def run(self) -> None:
        """Quantize the model in place, and complete it."""
        current().expect(len(self.plan.by_weight()), "weights")
        self.plan = planning.with_folded_rotations(self.plan, self.root)
        if self.is_scaled:
            self.plan = with_shared_scales(self.plan, ranks())
        self.is_paired = self.recording is not None and any(map(is_paired, self.plan.layers))
        works = _schedule(self.plan, self.stacks)
        ahead = [work.layer for work in works if self.store is not None]
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
        self._finish()

    def _finish(self) -> None:
        forbid_adapter_merge(self.root)
        if self.kv_cache is not None:
            settle_cache(self.root, self.kv_cache)
        tokens = max(row.tokens for row in self.rows.values())
        recipe = recipe_of(self.config, self.rules, tokens, self.before)
        recipe |= smoothing_of(self.root)
        recipe |= {} if self.kv_cache is None else {KV_CACHE: self.kv_cache}
        carried, beyond = beyond_model(self.root)
        forget_state(self.root)
        rows = [*(self.rows[entry.name] for entry in self.plan.entries), *beyond]
        finish(self.root, recipe, rows, carried)

    def _run_layer(self, work: Work, place: torch.device) -> None:
        """Calibrate, quantize and store a layer, or take it from the store."""
        store, identity = self.store, self._identity(work)
        runner = None
        if self.recording is not None:
            if work.stack not in self._states_on:
                self._states_on[work.stack] = place_of_states(work.stack, place, self.is_paired)
            runner = Runner(work.stack, work.index, place, self._states_on[work.stack])
        # Linear layers that read one input go before those that read their results.
        groups = runner.pair(work.own) if runner is not None and self.is_paired else [work.own]
        is_kept = store is not None and store.has(work.name, identity)
        if store is not None and is_kept:
            store.restore(work.name, work.layer, work.own)
            current().step(len(planning.Plan(tuple(work.own)).by_weight()))
            if runner is not None:
                self.device.bring(work.layer, place)
        for group in [] if is_kept else groups:
            part = planning.Plan(tuple(group)) if runner is None else runner.observe(group)
            planning.require_statistics(part, self.plan, self.before, is_late=True)
            self._quantize(with_shared_scales(part, ranks()))
            # Its Hessians go before those of the next group are collected.
            del part
        if runner is not None:
            runner.advance(self.is_paired)
        if store is not None and not is_kept:
            store.keep(work.name, work.layer, identity)

    def _quantize(self, part: planning.Plan) -> None:
        rows = quantize_layers(self.root, part, self.searches)
        self.rows.update({row.name: row for row in rows})

    def _identity(self, work: Work) -> str:
        """Return the digest of everything that decides a layer, "" without a store."""
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
        for members in planning.Plan(tuple(work.own)).by_weight():
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


def _schedule(plan: planning.Plan, stacks: Sequence[Stack]) -> list[Work]:
    """Return the layers of stacks in their order, each with its part of the plan."""
    return [
        Work(stack, index, layer, stack.layer_name(index), own)
        for stack in stacks
        for index, layer in enumerate(stack.layers)
        for modules in [set(layer.modules())]
        for own in [[each for each in plan.layers if each.module in modules]]
    ]
