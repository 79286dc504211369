"""merge: take LoRA adapters into packed weights, and say what it costs."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ... import calibration
from ..._compat.accelerate import offloaded_tensors
from ..._compat.torch import is_compiled
from ...calibration.processor import Processor
from ...checkpoint.finish import finish
from ...checkpoint.finished import ConvertedState
from ...core.progress import current, shown
from ...distributed import is_sharded, ranks, require_initialized
from ...errors import CalibrationError, OptionError, StateError
from ...methods import Stats
from ...nn.linear import GLOBAL, PACKED, SCALE, QuantizedLinear
from ...quantization.adapters import around_packed, base_of, parents, unload
from ...quantization.observers.batches import call_arguments, device_of, fast_dtype, require_loaded
from ...quantization.observers.observer import collect, observers_of
from ...quantization.observers.visible_tokens import count_tokens
from ...quantization.quantize import pack_layer
from ...quantization.replace import (
    attach_observers,
    quantizes_input,
    remove_observers,
    share_inputs,
)
from ...quantization.scan import LinearLayer
from ...record.config import LinearConfig
from ...record.rows import Row
from ...record.state import forget_state, get_state, remember_tokenizer, unwrap
from .layers import (
    Scales,
    Target,
    chooser,
    find_targets,
    kept_change,
    own_name,
    rescaled_buffers,
    shared_scales,
)
from .measure import Version, divergences, evaluating, split, to_measure
from .record import Merged

_log = logging.getLogger(__name__)

# Tokens that a model writes: for statistics, as `convert` has them, and for the KL alone.
_TOKENS, _JUDGING = 1 << 15, 1 << 13

# The part of a change that has to be left where nobody has chosen a method or measured the loss.
_ENOUGH = 0.8

# Layers that tell how much is left, before all are quantized.
_TRIED = 4

# Windows of a batch of these.
_BATCH = 8


def merge(
    model: nn.Module,
    method: object = None,
    *,
    data: Any = None,
    held_out: Any = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> Merged:
    """Merge the active LoRA adapters of a converted model into its packed weights, in place.

    The weight of each packed layer that they change becomes W + scale B A, computed in float32, and
    is quantized again in the scheme of the layer; the inputs that its method looks at are those of
    base + adapter. All other layers keep their bytes, unless they share a global scale that no
    longer reaches: it is multiplied by a power of two for all of them then. Adapters of dense
    layers are merged as PEFT does. Global scales of quantized inputs stay those of the base.

    Args:
        model: a converted or loaded model with adapters of PEFT: a `PeftModel`, or one of
            transformers that has loaded or added some.
        method: how the sum is quantized: "sse", which needs no data, "hessian", "gptq", or options
            such as `Gptq()`. By default "gptq" with `data` or `tokenizer`; without both "sse", and
            an error if more than a fifth of the change would be rounded away.
        data: what to collect statistics on, as for `calibrate`, an eighth of which is held out for
            the KL. Without it base + adapter writes its own text where the method needs some, or
            where `tokenizer` is given.
        held_out: as data, for the KL alone; all of `data` is for statistics then.
        tokenizer: of texts; by default that of the folder that the model came from.
        progress: as for `convert`.

    Returns:
        The record, with the merged model, an ordinary converted one, as `model`. It is also logged,
        and in the list "merged" of fp4pass.json.

    Raises:
        StateError: the model is not converted, has no adapter that can be merged, or would lose it.
        CalibrationError: data does not reach a layer whose method needs it.
        OptionError: there is no such method, or it needs text and there is no tokenizer.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        >>> tuned = get_peft_model(fp4pass.convert(model, "nvfp4a16", "sse"), config)
        >>> merged = fp4pass.merge(tuned, "sse")
        >>> merged.layers, type(merged.model[0]).__name__
        ({'0': 'sse'}, 'QuantizedLinear')
    """
    outer = unwrap(model)
    root = base_of(outer)
    state = _require_converted(outer, root)
    known = data is not None or tokenizer is not None
    targets = find_targets(root, chooser(method, known))
    needs = {need for target in targets for need in target.config.needs}
    remember_tokenizer(root, tokenizer)
    with shown("merge", progress), torch.inference_mode(False), torch.no_grad():
        with evaluating(outer), fast_dtype(root):
            own, apart = _batches(root, data, held_out, tokenizer, bool(needs))
            stats = _statistics(root, targets, own if needs else [], needs)
            scales = shared_scales(root, targets)
        if method is None and not apart:
            # All layers of a large model take minutes.
            tried = random.Random(0).sample(targets, min(len(targets), _TRIED))
            _require_enough(_kept(tried, _version(tried, scales, {}, "sse")[0]))
        version, rows = _version(targets, scales, stats)
        kept = _kept(targets, version)
        if method is None and not apart:
            _require_enough(kept)
        versions = [version, Version(arounds=version.arounds)]
        if apart:
            # Rounding to nearest, in the same scales.
            versions.append(_version(targets, scales, {}, "naive")[0])
        with evaluating(outer), fast_dtype(root):
            kl, tokens = divergences(root, versions, apart) if apart else (None, 0)
        record = Merged(
            model=root,
            adapters=tuple(sorted({name for target in targets for name in target.adapters})),
            layers={each.name: version.configs[each.layer].method_name for each in targets},
            kept=kept,
            rescaled={own_name(_path(root, each)): f for each, f in scales.rescaled.items()},
            tokens=max((each.tokens for each in stats.values()), default=0),
            held_out_tokens=tokens if kl else 0,
            **_losses(kl),
        )
        version.put()
        _finish(outer, root, state, record, rows)
    _log.info("%s", record)
    return record


def _require_converted(outer: nn.Module, root: nn.Module) -> ConvertedState:
    """Return the record of a converted model that can be merged into."""
    require_initialized()
    if ranks().size > 1:
        raise OptionError("merge works in one process. Merge before the model is given to several.")
    if any(isinstance(each, fx.GraphModule) for each in root.modules()):
        raise StateError("merge: a graph takes no adapter in. Merge the model, and trace it then.")
    state = get_state(outer) or get_state(root)
    if not isinstance(state, ConvertedState):
        raise StateError(
            "merge: the model is not converted as a whole. Call fp4pass.convert(model) first, "
            "give the model that it was called with, or merge into the float model with PEFT's "
            "own merge_and_unload."
        )
    if is_compiled(outer) or is_compiled(root):
        raise StateError("merge: the model is compiled. Merge before it is compiled.")
    if offloaded_tensors(root):
        raise StateError(
            "merge: accelerate offloads a part of the model. Load it with a device_map that "
            "offloads nothing."
        )
    require_loaded(root)
    for name, module in root.named_modules():
        if isinstance(module, QuantizedLinear):
            packed: Any = getattr(module, PACKED)
            if packed.is_meta or module.is_split or is_sharded(packed):
                raise StateError(
                    f"{own_name(name)}: expected a whole packed weight in memory, got one that is "
                    "split or on the meta device. Load the model in one process, and merge there."
                )
    return state


def _batches(
    root: nn.Module, data: Any, held_out: Any, tokenizer: Any, needs: bool
) -> tuple[list[Any], list[Any]]:
    """Return batches to collect statistics on, and those to measure on."""
    own: list[Any] = []
    if data is not None:
        own = list(calibration.batches(data, tokenizer, model=root))
    elif needs or (tokenizer is not None and held_out is None):
        reader = Processor(tokenizer, root).processor
        written = calibration.sample(root, reader, tokens=_TOKENS if needs else _JUDGING)
        own = list(written.split(_BATCH))
    if held_out is not None:
        return own, to_measure(list(calibration.batches(held_out, tokenizer, model=root)))
    # Text that is written for the KL alone is all held out.
    return split(own) if needs or data is not None else ([], to_measure(own))


def _statistics(
    root: nn.Module, targets: Sequence[Target], batches: Sequence[Any], needs: Collection[str]
) -> dict[QuantizedLinear, Stats]:
    """Return the statistics of the inputs of layers in base + adapter."""
    if not needs:
        return {}
    observed = [
        LinearLayer(each.name, each.layer, id(each.layer), each.shape)
        for each in targets
        if each.config.needs
    ]
    try:
        attach_observers(root, observed, needs)
        for batch in current().each(batches, "batches"):
            args, kwargs = call_arguments(batch, device_of(root))
            count_tokens(root, args, kwargs)
            root(*args, **kwargs)
        found = {
            target.layer: collect(observers_of([target.layer]), target.name) for target in targets
        }
    finally:
        remove_observers(root)
        sharing = [module for module in root.modules() if quantizes_input(module)]
        share_inputs(root, sharing, parents(root))
    return found


def _version(
    targets: Sequence[Target],
    scales: Scales,
    stats: Mapping[QuantizedLinear, Stats],
    method: str = "",
) -> tuple[Version, dict[str, Row]]:
    """Return the merged layers, and the row of each by its name.

    method: in place of that of each layer.
    """
    buffers: dict[QuantizedLinear, dict[str, Tensor | None]] = {}
    configs: dict[QuantizedLinear, LinearConfig] = {}
    rows: dict[str, Row] = {}
    for target in targets if method else current().each(targets, "weights"):
        own = stats.get(target.layer, Stats())
        config = target.config.override({"method": method}) if method else _reached(target, own)
        packed = pack_layer(target.planned(scales.of[target.layer], own, config))
        buffers[target.layer] = {name: packed.tensors[name] for name in (PACKED, SCALE, GLOBAL)}
        configs[target.layer] = packed.config
        rows[target.name] = packed.rows[0]
    for layer, factor in scales.rescaled.items():
        buffers[layer] = dict(rescaled_buffers(layer, factor))
    biases = {target.layer: target.bias for target in targets}
    changed = {layer: bias for layer, bias in biases.items() if bias is not None}
    return Version([target.around for target in targets], buffers, configs, changed), rows


def _kept(targets: Sequence[Target], version: Version) -> float:
    """Return the part of the change of all weights that is left after rounding."""
    found = [kept_change(target, version.buffers[target.layer]) for target in targets]
    moved, whole = map(sum, zip(*found, strict=True))
    return moved / whole if whole else 1.0


def _require_enough(kept: float) -> None:
    """Raise StateError where less than `_ENOUGH` of a change is left."""
    if kept < _ENOUGH:
        raise StateError(
            f"merge: without data {100 * (1 - kept):.0f} % of what the adapter changes would be "
            "rounded away, for it moves weights by less than half a step of their codes. Call "
            "fp4pass.merge(model, 'gptq', data=..., tokenizer=...), which rounds with the inputs "
            "in mind; method='sse' merges all the same."
        )


def _reached(target: Target, stats: Stats) -> LinearConfig:
    """Return the config of a layer, whose method has the statistics that it needs."""
    config = target.config
    if all(map(stats.has, config.needs)):
        return config
    if config.unreached == "sse":
        return config.override({"method": "sse"})
    raise CalibrationError(
        f"{target.name}: no batch reached it, and the method {config.method_name!r} needs its "
        "inputs. Give data that reaches it, or method='sse'."
    )


def _losses(kl: Sequence[float] | None) -> dict[str, float]:
    """Return the fields of a record for the KL of merged, left out, and naively merged."""
    if kl is None:
        return {}
    after, without, naive = kl
    return {"kl_before": 0.0, "kl_after": after, "kl_naive": naive, "kl_without": without}


def _path(root: nn.Module, layer: nn.Module) -> str:
    return next(path for path, module in root.named_modules() if module is layer)


def _finish(
    outer: nn.Module,
    root: nn.Module,
    state: ConvertedState,
    record: Merged,
    rows: Mapping[str, Row],
) -> None:
    """Take the adapters out, and make the model an ordinary converted one with a record."""
    kept = [row for row in state.report.rows if row.skip_reason != "an adapter"]
    named = [dataclasses.replace(row, name=own_name(row.name)) for row in kept]
    found = [rows.get(row.name, row) for row in named]
    for i, row in enumerate(found):
        if row.name in record.rescaled:
            factor = f"its global scale was raised by {record.rescaled[row.name]:g} in a merge"
            found[i] = dataclasses.replace(row, note="; ".join(filter(None, (row.note, factor))))
    unload(outer, around_packed(root).values())
    forget_state(outer)
    merged = [*state.recipe.get("merged", ()), record.to_dict()]
    recipe = {**state.recipe, "merged": merged}
    finish(root, recipe, found, carried=state.carried, refined=state.report.refined)
