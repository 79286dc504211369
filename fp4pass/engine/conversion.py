"""Check a conversion before its first weight, and complete the model after the last one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._compat.accelerate import offloaded_tensors
from ..checkpoint.copied_files import beyond_model
from ..checkpoint.finished import FinishedLayers, FinishedSearches
from ..checkpoint.model_layers import finish, split_note
from ..distributed import ranks
from ..graph.inductor import install_passes
from ..nn.kv_cache import KV_CACHE
from ..quantization import checks
from ..quantization.adapters import forbid_adapter_merge
from ..quantization.observers.kv_cache import require_cache_statistics, settle_cache
from ..quantization.observers.reached import seen_tokens
from ..quantization.plan import Plan, plan_layers, with_statistics, with_unreached
from ..quantization.recipe import recipe_of
from ..record.config import LinearConfig, Rule, check_rules
from ..record.rows import Row, say_once, tensor_core_note
from ..record.state import PreparedState, config_of, forget_state, smoothing_of
from .layer_stack import Stack, find_stacks, outside
from .recording import Recording, recording_of

# A folder, or the device of layers, as a caller names it.
Folder = str | os.PathLike[str] | None
Device = torch.device | str | None


@dataclass(frozen=True)
class Conversion:
    """Hold the checked decisions of a call of `convert`."""

    root: nn.Module
    config: LinearConfig  # of layers that no rule matches
    rules: tuple[Rule, ...]  # those given, then those of `prepare`
    kv_cache: str | None
    before: PreparedState | None  # what `prepare` left
    plan: Plan
    stacks: Sequence[Stack]  # the layers that go one after the other
    device: Device  # where these are quantized
    searches: FinishedSearches | None  # of `resume=`
    layers: FinishedLayers | None  # of `stream=`
    own_tokens: int  # those that other calls than those of `calibrate` ran

    @property
    def recording(self) -> Recording | None:
        """The recorded calls of layers; None where layers need not run."""
        return recording_of(self.before)

    @property
    def is_scaled(self) -> bool:
        """Whether all global scales are chosen at once."""
        # A weight on a disk is read once, where its layer is quantized.
        offloads = self.recording is not None and offloaded_tensors(self.root)
        return self.layers is None and not offloads

    @staticmethod
    def of(
        root: nn.Module,
        given: Mapping[str, Any],
        rules: Sequence[Rule],
        kv_cache: str | None,
        *,
        resume: Folder,
        stream: Folder,
        device: Device,
    ) -> Conversion:
        """Plan a call of `convert`; everything that can be wrong raises here."""
        before = checks.require_float(root, "convert")
        recording = recording_of(before)
        kv_cache = checks.cache_of(before, kv_cache)
        checks.require_place(device, recording, stream)
        config = config_of(given, before)
        rules = (*check_rules(rules), *(before.rules if before else ()))
        plan = plan_layers(root, config, rules)
        checks.require_layers(plan)
        checks.require_one_plan(plan, before)
        checks.require_batch(root, plan, before)
        if recording is not None:
            recording.require_calls()
            recording.warn_of_unfollowed(stacklevel=4)
        stacks = [] if recording is None else recording.stacks
        first = with_statistics(outside(plan, stacks))
        if before is not None and any(layer.stats.tokens for layer in first.layers):
            first = with_unreached(first, before.read.union(*ranks().gather(before.read)))
        checks.require_unpaired(first.layers)
        checks.require_statistics(first, before)
        if recording is not None:
            checks.require_statistics(with_unreached(recording.passed_by(plan), ()), before)
        own_tokens = 0 if before is None else seen_tokens(root, recording) - before.calibrated
        own_tokens = sum(ranks().gather(own_tokens))
        searches = None if resume is None else FinishedSearches(resume)
        plan = plan.update(first)
        checks.require_layers(plan)
        if kv_cache is not None and recording is None:
            require_cache_statistics(root, kv_cache)
        notes = [tensor_core_note(layer.config for layer in plan.layers), split_note(root, plan)]
        for note in notes if ranks().rank == 0 else ():
            if note:
                say_once(note)
        layers = None
        if stream is not None:
            layers = FinishedLayers(stream, root, (plan.outline(), recording is not None))
            stacks = find_stacks(root, plan.layers) if recording is None else stacks
        install_passes()
        decided = (root, config, rules, kv_cache, before, plan, stacks)
        return Conversion(*decided, device, searches, layers, own_tokens)

    def finish(self, rows: Mapping[str, Row]) -> None:
        """Complete the model, whose layers are packed; rows: of the entries of the plan."""
        forbid_adapter_merge(self.root)
        if self.kv_cache is not None:
            settle_cache(self.root, self.kv_cache)
        tokens = max(row.tokens for row in rows.values())
        recipe = recipe_of(self.config, self.rules, tokens, self.own_tokens, self.before)
        recipe |= smoothing_of(self.root)
        recipe |= {} if self.kv_cache is None else {KV_CACHE: self.kv_cache}
        carried, beyond = beyond_model(self.root)
        forget_state(self.root)
        finish(self.root, recipe, [*(rows[e.name] for e in self.plan.entries), *beyond], carried)
