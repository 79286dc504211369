"""Errors of calls out of order, and of calibration that is missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .._compat import require
from .._compat.accelerate import require_for as require_accelerate_for
from .._compat.transformers import require_for as require_transformers_for
from ..core.machine import require_device
from ..core.names import covering_globs, without_numbers
from ..distributed import ranks, require_initialized, sharded_parameter
from ..errors import CalibrationError, OptionError, StateError, as_option, as_rules, some
from ..nn.experts import QUANTIZED
from ..nn.kv_cache import KV_CACHE, get_cache_format
from ..record.config import LinearConfig, Rule, check_rules
from ..record.state import PreparedState, get_state
from .observers.reached import seen_tokens
from .plan import LayerPlan, Plan


def require_float(root: nn.Module, verb: str) -> PreparedState | None:
    """Return the state of a model that holds no packed weight.

    Raises StateError for a model that is converted, interrupted or sharded, or has a part that is,
    where `verb` says what was to be done; VersionError for libraries that are too old.
    """
    require("torch")
    require_transformers_for(root)
    if (name := sharded_parameter(root)) is not None:
        raise StateError(
            f"{name} is a DTensor: it is sharded over processes. {verb.capitalize()} the model "
            "before it is sharded (fully_shard, parallelize_module, tp_plan): every process has it "
            "whole then, and they divide the work."
        )
    state = get_state(root)
    require_accelerate_for(root)
    prepared = state if isinstance(state, PreparedState) else None
    converted = [name for name, m in root.named_modules() if isinstance(m, QUANTIZED)]
    if converted or state is not prepared:
        where = f", as {converted[0]!r} is," if converted and converted[0] else ""
        raise StateError(
            f"The model is already converted{where} so there is nothing to {verb}. Start from the "
            "float model again."
        )
    return prepared


def require_one_plan(plan: Plan, before: PreparedState | None) -> None:
    """Raise StateError unless all processes are to convert the same; `before` is of `prepare`."""
    group = ranks()
    group.arrive()
    prepared = None
    if before is not None:
        require_initialized()
        prepared = (before.needs, before.recording is not None)
    group.require_equal("The plan", (plan.outline(), prepared))


def require_place(device: torch.device | str | None, by_layers: bool) -> None:
    """Raise OptionError for a device that is not there, or not for layers that run in convert."""
    if device is None:
        return
    if not by_layers:
        raise OptionError(
            f"device is {str(device)!r}, but layers run in convert only after "
            f"prepare(model, sequential=True), or with {as_option('stream')}. Move the model "
            "instead."
        )
    require_device(str(device), "device=")


def require_layers(plan: Plan) -> None:
    """Raise StateError for a model without anything to quantize."""
    if not plan.layers:
        reasons = [f"{layer.label}: {layer.skip_reason}" for layer in plan.skipped[:5]]
        why = "; ".join(reasons) or "It has no linear layer at all."
        raise StateError(f"The model has no linear layer to quantize. {why}")


def require_unpaired(layers: Sequence[LayerPlan]) -> None:
    """Raise OptionError for a layer outside a recording that needs the float model's inputs."""
    for layer in layers:
        if "cross" in layer.config.needs:
            raise OptionError(
                f"{layer.label}: Gptq(target='cross') is for layers that are calibrated one after "
                f"the other. Give {as_option('sequential', True)}, and to layers outside of its "
                f"stacks another method: {as_rules(layer.name, options={'method': 'gptq'})}."
            )


def require_observers(
    state: PreparedState,
    config: LinearConfig,
    needs: set[str],
    rules: Sequence[Rule],
    sequential: bool,
) -> None:
    """Raise StateError unless a prepared model collects all that a second `prepare` asks for."""
    if rules and check_rules(rules) != state.rules:
        raise StateError(
            "The model is prepared with other rules. Give these to convert, where they go before "
            "those of prepare, or prepare a fresh copy of the model."
        )
    if not needs <= set(state.needs):
        rotated = f" with rotation={config.rotation}" if config.rotation else ""
        raise StateError(
            f"The model is prepared for method {state.config.method_name!r}, whose observers do "
            f"not collect what {config.method_name!r} needs{rotated}. Prepare a fresh copy of the "
            "model."
        )
    if sequential != (state.recording is not None):
        raise StateError(
            f"The model is prepared with sequential={not sequential}. Prepare a fresh copy of it."
        )


def cache_of(before: PreparedState | None, kv_cache: str | None) -> str | None:
    """Return the format of the key-value cache; `before` is of `prepare`, which is the default.

    Raises OptionError for a name that is none, StateError for a cache that was not prepared for.
    """
    known = None if before is None else before.recipe.get(KV_CACHE)
    if kv_cache is None:
        return known
    get_cache_format(kv_cache)
    if known is None:
        raise StateError(
            f"{as_option('kv_cache', kv_cache)} needs calibration data, and the model is not "
            f"prepared for it. Call fp4pass.prepare(model, kv_cache={kv_cache!r}) and run some "
            "batches first."
        )
    return kv_cache


def require_batch(root: nn.Module, plan: Plan, before: PreparedState | None) -> None:
    """Raise CalibrationError for a prepared model that needs a batch and has seen none."""
    needs = {need for layer in plan.layers for need in layer.config.needs}
    if before is None or not needs or not needs <= set(before.needs):
        return
    batches = before.recipe.get("calibration", {}).get("batches", 0)
    if not any(ranks().gather(batches + seen_tokens(root, before.recording))):
        raise CalibrationError(
            "No batch was run: call fp4pass.calibrate(model, data), or run the model on some "
            "batches, before convert. Batches that ran through a copy of the model do not count."
        )


def require_statistics(
    plan: Plan, before: PreparedState | None = None, late: Plan | None = None
) -> None:
    """Raise CalibrationError for layers without the statistics that their method needs.

    `before` is of `prepare`; late: the whole plan, where layers before these are packed already.
    """
    lacking = [layer for layer in plan.layers if not all(map(layer.stats.has, layer.config.needs))]
    if not lacking:
        return
    config = lacking[0].config
    name = config.method_name
    rotation = f"rotation={config.rotation}" if config.rotation else ""
    call = f"fp4pass.prepare(model, {', '.join(filter(None, (repr(name), rotation)))})"
    if before is None and late is None:
        raise CalibrationError(
            f"Method {name!r} needs calibration data. Give {as_option('quality', 'good')} and "
            f"{as_option('tokenizer')}, which calibrate too; or call {call} and run some batches "
            f"through the model before convert; or choose {as_option('method', 'sse')}."
        )
    again = "" if late is None else (
        " Whatever came before it is packed already: start again from the float model, with "
        "resume= to keep what was searched."
    )  # fmt: skip
    labels = some([layer.label for layer in lacking], 5)
    collected = set() if before is None else set(before.needs)
    is_less = before is not None and any(set(each.config.needs) - collected for each in lacking)
    if is_less or any(layer.stats.tokens for layer in lacking):
        raise CalibrationError(
            f"{labels}: the model was prepared for a method or a rotation that does not collect "
            f"what {name!r} needs{' with ' * bool(rotation)}{rotation}. Prepare a fresh copy with "
            f"{call}.{again}"
        )
    skipped = {row.name: row.skip_reason for row in before.report.skipped} if before else {}
    for layer in lacking:
        if layer.name in skipped:
            raise CalibrationError(
                f"{layer.label}: prepare did not observe it ({skipped[layer.name]}). Prepare and "
                "calibrate it as it is now, in a fresh copy of the model, or skip it with "
                f"{as_rules(layer.name)}."
            )
    names = [layer.name for layer in lacking]
    others = {row.name for row in before.report.converted} if before else set()
    if late is not None:
        # Names that differ by numbers, in layers that have not run yet, are likely not reached.
        kinds = set(map(without_numbers, names))
        others = {each.name for each in late.layers if without_numbers(each.name) not in kinds}
    others |= {layer.name for layer in plan.layers}
    globs = covering_globs(names, others.difference(names))
    raise CalibrationError(
        f"{labels}: calibration never reached them. Run batches that use these layers, skip them "
        f"with {as_rules(*globs)}, or choose {as_option('unreached', 'skip')} or 'sse'. Where the "
        f"model reads a weight and never calls the layer, no batch reaches it.{again}"
    )
