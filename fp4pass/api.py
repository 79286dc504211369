"""prepare, calibrate, convert: the flow on one page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from ._compat.torch import recompile_hooked
from .checkpoint.finish import finish
from .config import LinearConfig, Rule, check_rules, with_options
from .graph.inductor import install_passes
from .quantization.adapters import keep_apart
from .quantization.batches import run_batches
from .quantization.checks import (
    require_float,
    require_layers,
    require_observers,
    require_place,
    require_prepared,
    require_statistics,
    require_unpaired,
)
from .quantization.layer_inputs import record_layers
from .quantization.plan import plan_layers, with_folded_rotations, with_statistics
from .quantization.quantize import quantize_layers
from .quantization.recipe import recipe_of
from .quantization.replace import attach_observers, use_slow_paths
from .quantization.report import Report, planned_row
from .quantization.scales import with_shared_scales
from .quantization.search_cache import SearchCache
from .quantization.sequential import plan_parts
from .quantization.state import ModelState, set_state, unwrap
from .quantization.unreached import noting_unreached, seen_tokens, with_unreached


@with_options
def prepare(
    model: nn.Module,
    method: object = None,
    *,
    rules: Sequence[Rule] = (),
    sequential: bool = False,
    **options: Any,
) -> nn.Module:
    """Put observers in front of the linear layers of `model`, in place, and return it.

    Preparing again keeps the statistics and adds nothing.

    Args:
        model: any module, or the GraphModule of `fp4pass.trace` or torch.export.
        method: a name, or an options object such as `Gptq()`; default "hessian". It decides which
            statistics are collected.
        rules: as for `convert`.
        sequential: keep only what the first layers of the model's stacks are called with; `convert`
            then calibrates one layer at a time, on the outputs of those quantized before it.
        **options: fields of `LinearConfig`; `convert` takes all of these as its defaults.

    Raises:
        StateError: the model is converted, or prepared for something else, or has no linear layer.
        RuleError: a rule is malformed or matches nothing.
        OptionError: an option does not exist.
    """
    root = unwrap(model)
    before = require_float(root, "prepare")
    config = _config({"method": method, **options}, before)
    plan = plan_layers(root, config, check_rules(rules) or (before.rules if before else ()))
    require_layers(plan)
    needs = {need for layer in plan.layers for need in layer.config.needs} | set(config.needs)
    if before is not None:
        require_observers(before, config, needs, rules, sequential)
        set_state(root, dataclasses.replace(before, config=config))
        return model
    recording, observed = record_layers(root, plan) if sequential else (None, plan)
    require_unpaired(observed.layers)
    use_slow_paths(root)
    columns = {layer.module: layer.columns for layer in observed.layers}
    attach_observers(root, columns, tuple(sorted(needs)))
    install_passes()
    recompile_hooked(root)
    report = Report(tuple(map(planned_row, plan.entries)))
    facts = (config, check_rules(rules), tuple(sorted(needs)), recording)
    set_state(root, ModelState("prepared", {}, report, *facts))
    return model


def calibrate(model: nn.Module, batches: Iterable[Any], *, progress: bool = True) -> nn.Module:
    """Run `batches` through a prepared model without gradients, and return it.

    Args:
        model: prepared; in eval mode.
        batches: mappings are passed as keyword arguments, tuples and lists as positional ones, a
            tensor as the only one; each is moved to the device of the model first.
        progress: show a progress bar.

    Raises:
        StateError: the model is not prepared.
        CalibrationError: there are no batches.

    After an error in a batch, what was observed so far stays: prepare a fresh copy to leave out
    what layers have seen of that batch, or go on.
    """
    state = require_prepared(model)
    root = unwrap(model)
    recording = state.recording

    read = set(state.read)

    def run(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if recording is None:
            with noting_unreached(model, read):
                model(*args, **kwargs)
        else:
            recording.run(root, args, kwargs)

    def keep(seen: dict[str, Any]) -> None:
        recipe = {**state.recipe, "calibration": seen}
        now = require_prepared(model)
        set_state(root, dataclasses.replace(now, recipe=recipe, read=frozenset(read)))

    before = seen_tokens(root, recording)
    try:
        run_batches(model, batches, run, state.recipe.get("calibration", {}), keep, progress)
    finally:
        now = require_prepared(model)
        count = now.calibrated + seen_tokens(root, recording) - before
        set_state(root, dataclasses.replace(now, calibrated=count))
    return model


@with_options
def convert(
    model: nn.Module,
    fmt: str | None = None,
    method: object = None,
    *,
    rules: Sequence[Rule] = (),
    resume: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Module:
    """Quantize the linear layers of `model`, in place, and return it.

    Everything is checked before the first weight is replaced. If the call is cut off before that,
    the model is as it was; later, it is interrupted, and everything but `resume=` says to start
    again. What `prepare` was told is the default; methods that need no data ("naive", "sse") take a
    model that is not prepared.

    Args:
        model: any module, or the GraphModule of `fp4pass.trace` or torch.export.
        fmt: the format; default "nvfp4".
        method: a name, or an options object such as `Gptq()`; default "hessian".
        rules: (glob, None) skips layers, (glob, {option: value}) overrides options; the first
            match wins, then those given to `prepare`, then the built-in ones.
        resume: a folder that keeps every finished search, so that the same call after an
            interruption searches only the rest; delete it when the model is saved.
        device: after prepare(sequential=True), where to run one layer after the other; by default
            where they are.
        **options: fields of `LinearConfig`.

    Raises:
        CalibrationError: a layer needs data and has none.
        NonFiniteError: a weight or an input held NaN or infinity.
        StateError: the model is converted, or has no linear layer.
        RuleError: a rule is malformed or matches nothing.
        OptionError: an option does not exist.
    """
    root = unwrap(model)
    before = require_float(root, "convert")
    recording = None if before is None else before.recording
    require_place(device, recording)
    config = _config({"fmt": fmt, "method": method, **options}, before)
    rules = (*check_rules(rules), *(before.rules if before else ()))
    plan = plan_layers(root, config, rules)
    require_layers(plan)
    first = with_statistics(plan if recording is None else recording.outside(plan))
    if before is not None and any(layer.stats.tokens for layer in first.layers):
        first = with_unreached(first, before.read)
    require_unpaired(first.layers)
    require_statistics(first, before)
    own_tokens = 0 if before is None else seen_tokens(root, recording) - before.calibrated
    cache = None if resume is None else SearchCache(resume)
    plan = plan.update(first)
    require_layers(plan)
    plan = with_shared_scales(with_folded_rotations(plan, root))

    # Whatever can fail fails before the first weight is replaced.
    install_passes()
    rows = {}
    # Inference tensors could neither be saved for a gradient nor be written to later.
    parts = plan_parts(plan, first, recording, device)
    with torch.inference_mode(False), torch.no_grad(), closing(parts):
        for part in parts:
            rows.update({row.name: row for row in quantize_layers(root, part, cache)})
            # Its Hessians, before those of the next layer are collected.
            del part
    keep_apart(root)
    tokens = max(row.tokens for row in rows.values())
    recipe = recipe_of(config, rules, tokens, own_tokens, before)
    finish(root, recipe, [rows[entry.name] for entry in plan.entries])
    return model


def _config(given: dict[str, Any], before: ModelState | None) -> LinearConfig:
    """Return the config of options as far as they are given; `prepare` set the default."""
    given = {name: value for name, value in given.items() if value is not None}
    if before is None or before.config is None:
        return LinearConfig(**given)
    return before.config.override(given)
