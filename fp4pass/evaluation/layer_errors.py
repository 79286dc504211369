"""Output errors of single linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..core.progress import shown
from ..errors import StateError
from ..nn import experts
from ..nn.linear import QuantizedLinear
from ..quantization.observers.batches import call_arguments, fast_dtype, require_batches
from ..quantization.observers.observer import rows_of_experts
from ..quantization.observers.visible_tokens import visible_rows, watching_tokens
from ..record.state import unwrap


@torch.no_grad()
def output_errors(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    activations: bool = False,
    progress: bool = True,
) -> dict[str, float]:
    """Measure |y - y'| / |y| of every converted linear layer on the inputs it has in `reference`.

    y is W x. y' is the dequantized weight times x or, with `activations`, the output of the
    converted layer without its bias, so that its quantized inputs count. A stack of experts is one
    layer, whose inputs are those that each expert is chosen for.

    Args:
        model: a converted model.
        reference: the float model that was converted.
        batches: as for `calibrate`; best held out from the calibration. Tokens that
            `attention_mask` hides do not count.
        activations: whether the converted layers see x, and not only their weights.
        progress: as for `convert`.

    Returns:
        The error by the name of the layer, nan for a layer that no batch reached.

    Raises:
        StateError: the models are not a converted model and its original.

    Example:
        >>> packed = fp4pass.convert(copy.deepcopy(model), "nvfp4a16", "sse")
        >>> errors = fp4pass.evaluation.output_errors(packed, model, batches, progress=False)
        >>> 0 < errors["0"] < 0.15
        True
    """
    require_batches(batches)
    originals = dict(unwrap(reference).named_modules(remove_duplicate=False))
    sums: dict[str, list[float]] = {}
    with ExitStack() as hooks:
        for name, module in unwrap(model).named_modules():
            original = originals.get(name)
            if isinstance(module, experts.QuantizedExperts):
                stacks = {} if original is None else experts.stacks_of(original)
                measures: dict[str, Any] = {}
                for key, stack in experts.packed_stacks(module).items():
                    found = sums[f"{name}.{key}"] = [0.0, 0.0]
                    if key not in stacks or stacks[key].weight.shape != stack.weight.shape:
                        raise _no_original(f"{name}.{key}")
                    measures[key] = partial(_measure_stack, found, stack, activations)
                if original is not None:
                    hook = partial(_call_stacks, measures)
                    hooks.callback(
                        original.register_forward_pre_hook(hook, with_kwargs=True).remove
                    )
            elif isinstance(module, QuantizedLinear):
                weight = getattr(original, "weight", None)
                fits = isinstance(weight, Tensor) and weight.shape == module.weight.shape
                if original is None or not fits or isinstance(original, QuantizedLinear):
                    raise _no_original(name)
                sums[name] = [0.0, 0.0]
                measure = partial(_measure, sums[name], module, activations)
                hooks.callback(original.register_forward_hook(measure).remove)
        if not sums:
            raise StateError(
                "Expected a converted model, got one that has no converted linear layer. Call "
                "fp4pass.convert(model) first."
            )
        device = next(reference.parameters()).device
        bar = hooks.enter_context(shown("output errors", progress))
        with fast_dtype(model, reference), watching_tokens(unwrap(reference)):
            for batch in bar.each(batches, "batches"):
                args, kwargs = call_arguments(batch, device)
                reference(*args, **kwargs)
    return {
        name: math.sqrt(error / size) if size else (math.inf if error else math.nan)
        for name, (error, size) in sums.items()
    }


def _no_original(name: str) -> StateError:
    return StateError(
        f"{name or 'the model'}: expected a float linear layer of this name and shape in the "
        "reference, got none. Give the model as it was before convert, such as a copy.deepcopy of "
        "it."
    )


def _call_stacks(
    measures: Mapping[str, Any], owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call a function with each stack of float experts, its inputs and their experts."""
    hidden, ids, _ = experts.require_adapter(owner).routed(owner, args, kwargs)
    visible = rows_of_experts(owner, hidden)
    if visible is not None:
        hidden, ids = hidden[visible], ids[visible]
    stacks = experts.stacks_of(owner)
    for stage, x in experts.stage_inputs(owner, hidden, ids):
        for key in stage:
            if key in measures:
                measures[key](stacks[key], x, ids)


def _measure_stack(
    sums: list[float], module: experts.QuantizedExpertStack, activations: bool, *inputs: Any
) -> None:
    """Count the inputs x [T, K] or [T, k, K] of experts ids [T, k] of a float stack."""
    original, x, ids = inputs
    weights = [original.dense.float(), module.view.of(module.weight).to(x.device).float()]
    y, rounded = (ops.experts_dense(x.float(), ids, weight, None) for weight in weights)
    if activations:
        there = module.weight_packed.device
        rounded = module(x.to(there), ids.to(there)).to(y.device).float()
    _add(sums, rounded, y)


def _measure(sums: list[float], module: QuantizedLinear, activations: bool, *call: Any) -> None:
    """Count one call of a float linear layer: the layer, its arguments and its output."""
    original, args, _ = call
    visible, x = visible_rows(args[0]), args[0].flatten(0, -2)  # [T, K]
    x = x if visible is None else x[visible]
    weights = (each.t() if module.transposed else each for each in (original.weight, module.weight))
    y, rounded = (x.float() @ each.to(x.device).float().t() for each in weights)
    if activations:
        config, inputs = module.config, x
        # A layer with folded rotations reads and writes what its neighbours rotate.
        if config.folded:
            inputs = ops.rotate(x, config.rotation)
        rounded = module(inputs.to(module.weight_packed.device)).float()
        rounded = rounded if module.bias is None else rounded - module.bias.float()
        if config.output_rotation:
            rounded = ops.rotate(rounded, config.output_rotation)
    _add(sums, rounded.to(y.device), y)


def _add(sums: list[float], rounded: Tensor, y: Tensor) -> None:
    for i, each in enumerate((y - rounded, y)):
        sums[i] += each.square().sum(dtype=torch.float64).item()
