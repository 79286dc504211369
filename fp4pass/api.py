"""prepare, calibrate, convert: the flow on one page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from . import calibration
from ._compat.accelerate import offloaded_tensors
from .checkpoint.finish import finish
from .config import Rule, check_rules
from .core.progress import shown
from .distributed import ranks
from .errors import require_flags
from .graph.inductor import install_passes
from .kv_cache import KV_CACHE
from .one_call import OneCall
from .quantization import checks
from .quantization.adapters import forbid_adapter_merge
from .quantization.attention import with_called_projections
from .quantization.batches import run_batches
from .quantization.kv_cache import observe_cache, require_cache_statistics, settle_cache
from .quantization.layer_folder import open_layers
from .quantization.layer_inputs import record_layers
from .quantization.parts import plan_parts
from .quantization.plan import plan_layers, with_folded_rotations, with_statistics
from .quantization.quantize import quantize_layers, with_shared_scales
from .quantization.recipe import recipe_of
from .quantization.replace import attach_observers
from .quantization.report import Report, planned_row
from .quantization.search_cache import SearchCache
from .quantization.state import ModelState, config_of, remember_tokenizer, set_state, unwrap
from .quantization.tensor_cores import say_once, tensor_core_note
from .quantization.undo import unprepared_on_error
from .quantization.unmapped import unmapped_layers, warn_of_unmapped
from .quantization.unreached import seen_tokens, with_unreached
from .quantization.work import later_costs, search_costs
from .signatures import with_options


@with_options
@with_called_projections
def prepare(
    model: nn.Module,
    method: object = None,
    *,
    rules: Sequence[Rule] = (),
    sequential: bool = False,
    kv_cache: str | None = None,
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
        kv_cache: as for `convert`, which takes it as its default.
        **options: fields of `LinearConfig`; `convert` takes all of these as its defaults.

    Raises:
        StateError: the model is converted, or prepared for something else, or has no linear layer.
        RuleError: a rule is malformed or matches nothing.
        OptionError: an option does not exist.

    Example:
        >>> model = fp4pass.prepare(model, "gptq")
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> model = fp4pass.convert(model, "nvfp4")
    """
    # All processes come here before one of them can end in a batch: a group is there to notice it.
    ranks()
    root = unwrap(model)
    require_flags(sequential=sequential)
    before = checks.require_float(root, "prepare")
    config = config_of({"method": method, **options}, before)
    plan = plan_layers(root, config, check_rules(rules) or (before.rules if before else ()))
    checks.require_layers(plan)
    needs = {need for layer in plan.layers for need in layer.config.needs} | set(config.needs)
    if before is not None:
        checks.require_observers(before, config, needs, rules, sequential)
        checks.require_same_cache(before, kv_cache)
        set_state(root, dataclasses.replace(before, config=config))
        return model
    recording, observed = record_layers(root, plan) if sequential else (None, plan)
    checks.require_unpaired(observed.layers)
    if kv_cache is not None:
        observe_cache(root, kv_cache)
    attach_observers(root, observed.layers, needs)
    facts = (config, check_rules(rules), tuple(sorted(needs)), recording)
    report = Report(tuple(map(planned_row, plan.entries)))
    recipe = {} if kv_cache is None else {KV_CACHE: kv_cache}
    set_state(root, ModelState("prepared", recipe, report, *facts))
    return model


def calibrate(
    model: nn.Module, data: Any, *, tokenizer: Any = None, progress: bool = True
) -> nn.Module:
    """Run `data` through a prepared model without gradients, and return it.

    What `attention_mask` and `decoder_attention_mask` hide enters no statistic. Layers whose inputs
    are not of the tokens of the mask count whole, and a warning names them.

    Args:
        model: prepared; in eval mode.
        data: batches, texts, chats, token windows, rows of a data set, a path, or the name of a
            data set, as for `fp4pass.calibration.batches`; None has the model sample texts of its
            own. Of batches, mappings are passed as keyword arguments, tuples and lists as
            positional ones, a tensor as the only one; each is moved to the device of the model
            first.
        tokenizer: of transformers, or a processor, for data that is text; by default that of the
            folder that the model came from.
        progress: as for `convert`.

    Raises:
        StateError: the model is not prepared.
        CalibrationError: there are no batches, or the data holds nothing to learn from.
        OptionError: text needs a tokenizer and there is none, or `progress` is neither True nor
            False.

    After an error in a batch, what was observed so far stays: prepare a fresh copy to leave out
    what layers have seen of that batch, or go on.

    Example:
        >>> model = fp4pass.prepare(model)
        >>> model = fp4pass.calibrate(model, batches, progress=False)
        >>> fp4pass.convert(model)[0].input_global_scale.shape
        torch.Size([1])
    """
    require_flags(progress=progress)
    unwrap(model, data)
    state = checks.require_prepared(model)
    batches = calibration.batches(data, tokenizer, model=model)
    remember_tokenizer(model, tokenizer)
    with shown("calibrate", progress):
        run_batches(model, batches, state)
    return model


@with_options
@with_called_projections
def convert(
    model: nn.Module,
    fmt: str | None = None,
    method: object = None,
    *,
    quality: str | None = None,
    data: Any = None,
    tokenizer: Any = None,
    rules: Sequence[Rule] = (),
    kv_cache: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    stream: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> nn.Module:
    """Quantize the linear layers of `model`, in place, and return it.

    Everything is checked before the first weight is replaced. If the call is cut off before that,
    the model is as it was; later, it is interrupted, and everything but `resume=` says to start
    again. What `prepare` was told is the default; methods that need no data ("naive", "sse") take a
    model that is not prepared. With `quality`, `data` or `tokenizer` the call also prepares and
    calibrates a model that is not, and logs first how long all of it will take.

    Args:
        model: any module, or the GraphModule of `fp4pass.trace` or torch.export.
        fmt: the scheme: "nvfp4" or "mxfp4" for weights and inputs, "nvfp4a16" or "mxfp4a16" for
            weights only; default "nvfp4". In a rule, and where `prepare` was told `weight_only`,
            the name of a format changes the format alone.
        method: a name, or an options object such as `Gptq()`; default "hessian".
        quality: a recipe by its name, in place of `method`: "fast", "good" or "best".
        data: what to calibrate on, as for `calibrate`. By default the model writes its own text
            where the method needs data, if `quality` or `tokenizer` is given.
        tokenizer: of the texts in `data`, or of those that the model writes.
        rules: (glob, None) skips layers, (glob, {option: value}) overrides options; the first
            match wins, then those given to `prepare`, then the built-in ones.
        kv_cache: how `generate` keeps keys and values: "fp8", E4M3 with a scale for each head;
            "fp8_tensor", with one for each layer, which more engines read; "nvfp4"; None as they
            are. `prepare` has to be told, too, for the scales come from calibration.
        resume: a folder that keeps every finished search, so that the same call after an
            interruption searches only the rest; delete it when the model is saved.
        stream: for models larger than memory: a folder to which each layer goes as soon as it is
            packed, and from which the model maps it. The same call after an interruption goes on
            behind the last one. Delete it when the model is saved.
        device: after prepare(sequential=True) or with stream=, where to work on one layer after the
            other; by default where they are. With `quality` or `data`, layers are calibrated so.
        progress: show a progress bar on a terminal, or a line a minute elsewhere; nothing of what
            takes less than 2 seconds.
        **options: fields of `LinearConfig`.

    Raises:
        CalibrationError: a layer needs data and has none.
        NonFiniteError: a weight or an input held NaN or infinity.
        StateError: the model is converted, or has no linear layer.
        RuleError: a rule is malformed or matches nothing.
        OptionError: an option does not exist, or is decided by `quality`.

    Example:
        >>> rules = [("2", None)]
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse", rules=rules)
        >>> type(model[0]).__name__, type(model[2]).__name__
        ('QuantizedLinear', 'Linear')
    """
    require_flags(progress=progress)
    if not (quality is None and data is None and tokenizer is None):
        given = {"fmt": fmt, "method": method, **options}
        by_layers = not (device is None and stream is None)
        call = OneCall.of(model, quality, given, rules, kv_cache, by_layers, device)
        places = {"resume": resume, "stream": stream, "device": device}
        return _convert_whole(model, call, data, tokenizer, places, progress)
    root = unwrap(model)
    before = checks.require_float(root, "convert")
    recording = None if before is None else before.recording
    kv_cache = checks.cache_of(before, kv_cache)
    checks.require_place(device, recording, stream)
    config = config_of({"fmt": fmt, "method": method, **options}, before)
    rules = (*check_rules(rules), *(before.rules if before else ()))
    plan = plan_layers(root, config, rules)
    checks.require_layers(plan)
    checks.require_one_plan(plan, before)
    checks.require_batch(root, plan, before)
    first = with_statistics(plan if recording is None else recording.outside(plan))
    if before is not None and any(layer.stats.tokens for layer in first.layers):
        first = with_unreached(first, before.read.union(*ranks().gather(before.read)))
    checks.require_unpaired(first.layers)
    checks.require_statistics(first, before)
    if recording is not None:
        checks.require_statistics(with_unreached(recording.passed_by(plan), ()), before)
    own_tokens = 0 if before is None else seen_tokens(root, recording) - before.calibrated
    own_tokens = sum(ranks().gather(own_tokens))
    cache = None if resume is None else SearchCache(resume)
    plan = plan.update(first)
    checks.require_layers(plan)
    if kv_cache is not None and recording is None:
        require_cache_statistics(root, kv_cache)
    if (note := tensor_core_note(layer.config for layer in plan.layers)) and ranks().rank == 0:
        say_once(note)
    with shown("convert", progress) as bar:
        bar.expect(search_costs(plan), {"weights": len(plan.by_weight())})
        keeper = None if stream is None else open_layers(stream, root, plan, before)
        plan = with_folded_rotations(plan, root)
        # What is on a disk is brought once, where its layer is quantized.
        is_scaled = keeper is None and (recording is None or not offloaded_tensors(root))
        if is_scaled:
            plan = with_shared_scales(plan, ranks())
            bar.step(("scales",), 0.0)

        # Whatever can fail fails before the first weight is replaced.
        install_passes()
        rows = {} if keeper is None else keeper.rows
        # Inference tensors could neither be saved for a gradient nor be written to later.
        unmapped = unmapped_layers(root)
        parts = plan_parts(root, plan, first, recording, device, keeper, is_scaled)
        with torch.inference_mode(False), torch.no_grad(), closing(parts):
            for part in parts:
                rows.update({row.name: row for row in quantize_layers(root, part, cache)})
                # Its Hessians, before those of the next layer are collected.
                del part
        unmapped |= {} if recording is None else recording.unmapped
        warn_of_unmapped(unmapped, stacklevel=4)
        forbid_adapter_merge(root)
        if kv_cache is not None:
            settle_cache(root, kv_cache)
        tokens = max(row.tokens for row in rows.values())
        recipe = recipe_of(config, rules, tokens, own_tokens, before)
        recipe |= {} if kv_cache is None else {KV_CACHE: kv_cache}
        files = () if keeper is None else tuple(keeper.files)
        finish(root, recipe, [rows[entry.name] for entry in plan.entries], files)
    return model


def _convert_whole(
    model: nn.Module,
    call: OneCall,
    data: Any,
    tokenizer: Any,
    places: Mapping[str, Any],
    progress: bool,
) -> nn.Module:
    """Prepare, calibrate and convert a model; it is not prepared where that ends early."""
    with unprepared_on_error(call.root), shown("", progress) as bar:
        bar.foresee(later_costs(call.plan))
        remember_tokenizer(model, tokenizer)
        batches = call.batches(data, tokenizer)
        arguments = call.arguments
        if batches is not None:
            prepare(model, sequential=call.sequential, **arguments)
            calibrate(model, batches)
            # Those given to prepare hold.
            arguments = {"rules": call.rules_beside_text()}
        convert(model, **arguments, **places)
    call.record()
    return model
