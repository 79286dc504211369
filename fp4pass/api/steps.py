"""prepare, calibrate, convert: the flow on one page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import calibration
from ..core.progress import shown
from ..distributed import ranks
from ..engine.engine import Conversion
from ..engine.recording import Recording, find_stacks, outside
from ..errors import StateError
from ..methods.base import MethodChoice
from ..nn.kv_cache import KV_CACHE, CacheName
from ..quantization import plan as planning
from ..quantization.observers.batches import fast_dtype, run_batches
from ..quantization.observers.kv_cache import observe_cache
from ..quantization.plan import plan_layers, planned_row
from ..quantization.replace import attach_observers, unprepared
from ..record import state as rec
from ..record.config import LinearOptions, Rules, SchemeOptions, check_rules
from ..record.rows import Report
from ..record.schemes import QualityName, Scheme
from .one_call import OneCall

if TYPE_CHECKING:
    from typing_extensions import Unpack


def prepare(
    model: nn.Module,
    method: MethodChoice | None = None,
    *,
    rules: Rules = (),
    sequential: bool = False,
    kv_cache: CacheName | None = None,
    **options: Unpack[SchemeOptions],
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
    root, rules = rec.unwrap(model), check_rules(rules, options.get("weight_only"))
    before = planning.require_float(root, "prepare")
    config = rec.config_of({"method": method, **options}, before)
    plan = plan_layers(root, config, rules or (before.rules if before else ()))
    planning.require_layers(plan)
    needs = {need for layer in plan.layers for need in layer.config.needs} | set(config.needs)
    if before is not None:
        planning.require_observers(before, needs, rules, sequential)
        recipe = dict(before.recipe)
        if kv_cache is not None:
            recipe[KV_CACHE] = planning.cache_of(before, kv_cache)
        rec.set_state(root, dataclasses.replace(before, config=config, recipe=recipe))
        return model
    recording, observed = None, plan
    if sequential:
        stacks = find_stacks(root, plan.layers)
        observed = outside(plan, stacks)
        recording = Recording(root, stacks, whole=bool(observed.layers))
    planning.require_unpaired(observed.layers)
    if kv_cache is not None:
        observe_cache(root, kv_cache)
    attach_observers(root, observed.layers, needs)
    facts = (config, rules, tuple(sorted(needs)), recording)
    report = Report(tuple(map(planned_row, plan.entries)))
    recipe = {} if kv_cache is None else {KV_CACHE: kv_cache}
    rec.set_state(root, rec.PreparedState(recipe, report, *facts))
    return model


def calibrate(
    model: nn.Module, data: Any, *, tokenizer: Any = None, progress: bool = True
) -> nn.Module:
    """Run `data` through a prepared model without gradients, and return it.

    Tokens that `attention_mask` and `decoder_attention_mask` hide enter no statistic. Layers whose
    inputs are not of the tokens of the mask count whole, and a warning says so.

    Args:
        model: prepared; in eval mode.
        data: batches, texts, chats, token windows, rows of a data set, a path, or the name of a
            data set, as for `fp4pass.calibration.batches`; None has the model sample texts of its
            own. Of batches, mappings are passed as keyword arguments, tuples and lists as
            positional ones, a tensor as the only one, token ids [tokens] as one row; each is moved
            to the device of the model first.
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
        >>> fp4pass.convert(model, "nvfp4")[0].input_global_scale.shape
        torch.Size([1])
    """
    state = rec.get_state(model)
    if not isinstance(state, rec.PreparedState):
        raise StateError("The model is not prepared. Call fp4pass.prepare(model) first.")
    batches = calibration.batches(data, tokenizer, model=model)
    rec.remember_tokenizer(model, tokenizer)
    with shown("calibrate", progress):
        run_batches(model, batches, state)
    return model


def convert(
    model: nn.Module,
    fmt: Scheme | None = None,
    method: MethodChoice | None = None,
    *,
    quality: QualityName | None = None,
    data: Any = None,
    tokenizer: Any = None,
    rules: Rules = (),
    kv_cache: CacheName | None = None,
    resume: str | os.PathLike[str] | None = None,
    stream: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Unpack[LinearOptions],
) -> nn.Module:
    """Quantize the linear layers of `model`, in place, and return it.

    Everything is checked before the first weight is replaced. If the call is cut off before that,
    the model is as it was; later, it is interrupted, and all calls here say to start again. The
    arguments of `prepare` are the defaults; methods that need no data ("naive", "sse") take a model
    that is not prepared. With `quality`, `data` or `tokenizer` the call also prepares and
    calibrates a model that is not.

    Args:
        model: any module, or the GraphModule of `fp4pass.trace` or torch.export.
        fmt: the scheme: "nvfp4" or "mxfp4" for weights and inputs, "nvfp4a16" or "mxfp4a16" for
            weights only; default: that of `prepare`, else "nvfp4a16".
        method: a name, or an options object such as `Gptq()`; default "hessian".
        quality: a recipe by its name, in place of `method`: "fast", "good", "best", or "tuned", for
            GPUs: "best" and then `distill`.
        data: what to calibrate on, as for `calibrate`. By default it is `calibration.mixture` where
            the method needs data, if `quality` or `tokenizer` is given.
        tokenizer: of the texts in `data`, or of the mixture.
        rules: (glob, None) skips layers, (glob, {option: value}) overrides options; the first
            match wins, then those given to `prepare`, then the built-in ones. Or what
            `fp4pass.allocate` returned.
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
    rules = check_rules(rules, options.get("weight_only"))
    given = {"fmt": fmt, "method": method, **options}
    places: dict[str, Any] = {"resume": resume, "stream": stream, "device": device}
    if not (quality is None and data is None and tokenizer is None):
        call = OneCall(model, quality, given, rules, kv_cache, device, stream)
        return _convert_whole(model, call, data, tokenizer, places, progress)
    conversion = Conversion(rec.unwrap(model), given, rules, kv_cache, **places)
    with shown("convert", progress):
        conversion.run()
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
    with ExitStack() as stack:
        stack.enter_context(shown("", progress))
        rec.remember_tokenizer(model, tokenizer)
        # One layer after the other is calibrated in the dtype that it is converted in.
        runs = call.needs_data or not (data is None and tokenizer is None)
        whole = [call.root] if call.tokens and runs and not call.sequential else []
        with fast_dtype(*whole):
            batches = call.batches(data, tokenizer)
        arguments = call.arguments
        if batches is not None:
            stack.enter_context(call.smoothed(batches))
        stack.enter_context(unprepared(call.root, always=False))
        original = None if batches is None else call.original(batches)
        if batches is not None:
            with fast_dtype(*whole):
                prepare(model, sequential=call.sequential, **arguments)
                calibrate(model, batches)
            # Those given to prepare hold.
            arguments = {"rules": call.rules_beside_text()}
        convert(model, **arguments, **places)
    call.record()
    if original is not None:
        with shown("", progress):
            # An iterator has been read.
            call.distill(original, batches if isinstance(data, Iterator) else data, tokenizer)
    return model
