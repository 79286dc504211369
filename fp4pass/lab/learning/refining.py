"""refine: learn codes, scales, norms and biases of a converted model, layer by layer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..._compat.accelerate import offloaded_tensors
from ..._compat.torch import is_compiled
from ...checkpoint.finished import ConvertedState
from ...core.progress import current, shown
from ...distributed import ranks, require_initialized
from ...engine.layer_device import LayerDevice
from ...engine.layer_stack import Stack, stacks_of
from ...engine.recording import Recording
from ...errors import CalibrationError, OptionError, StateError, expected
from ...nn.experts import QUANTIZED
from ...quantization.observers.batches import (
    call_arguments,
    device_of,
    require_batches,
    require_loaded,
)
from ...quantization.observers.visible_tokens import watching_tokens
from ...quantization.quantize import resolve_compute
from ...record.rows import Refined, Report, Row
from ...record.state import get_state, set_state, unwrap
from .batches import logits_kl
from .layers import original_weight
from .learned_layer import put, values_of
from .options import Refine
from .refine_layer import Learning, Pair

# One batch in this many is held out if none are given.
_HELD_OUT = 8


def refine(
    model: nn.Module,
    original: nn.Module,
    batches: Iterable[Any],
    options: Refine | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Learn better codes, scales, norms and biases for the layers of a converted model, in place.

    One layer of the model's stacks at a time learns to give what it gives in the float model, from
    what the refined layers before it give. Codes move by gradients that pass their rounding, inputs
    are quantized as they always are, and block scales are searched again. A layer that is no better
    on held-out batches afterwards stays as it was; and if the KL of the logits on these did not
    fall, the whole model does. `fp4pass.report(model).refined` says which. If the call is cut off,
    each layer is as it was or refined.

    Args:
        model: converted, by any method.
        original: the float model that it was converted from.
        batches: as for `calibrate`; each step learns from one, so several windows of text each.
        options: None for `Refine()`.
        held_out: batches that judge, best those that the conversion has not seen either. None for
            the last eighth of `batches`, from which nothing is learned then.
        device: where to work on one layer after the other; by default where the model is.
        progress: as for `convert`.

    Returns:
        The model, an ordinary converted one.

    Raises:
        StateError: the model is not converted, has no stack of layers, or is compiled; or the
            original is converted.
        CalibrationError: there are fewer than two batches, or layers are not called in order.
        OptionError: the models do not fit each other, accelerate offloads one of them, or there are
            several processes.

    Example:
        >>> original = copy.deepcopy(model)
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> options = fp4pass.Refine(steps=2)
        >>> model = fp4pass.refine(model, original, batches, options, progress=False)
        >>> len(fp4pass.report(model).refined.layers)
        2
    """
    options = Refine() if options is None else options
    if not isinstance(options, Refine):
        raise OptionError(expected("options", "fp4pass.Refine(...)", type(options).__name__))
    root, first = unwrap(model), unwrap(original)
    state = _require_models(root, first)
    stacks = _stacks(root, first)
    taught, judging = _split(batches, held_out)
    refined = Refined((), kept=False)
    weights = _weights(root, first, stacks)
    small = _small(root, stacks)
    start = values_of([root, *root.modules()], small)
    tokens = 0
    try:
        with shown("refine", progress), torch.inference_mode(False), torch.no_grad():
            pairs = _record((root, first), stacks, taught, judging)
            tokens = pairs[0].stack.tokens - sum(
                call.visible for call in pairs[0].stack.calls[pairs[0].taught :]
            )
            refined = dataclasses.replace(refined, kl_before=logits_kl(root, first, judging))
            work = [
                _learning(pair, index, weights, small, options)
                for pair in pairs
                for index in range(len(pair.stack.layers))
            ]
            place = device_of(root) if device is None else torch.device(device)
            with closing(LayerDevice(place, keeps=False)) as brought:
                for each in current().each(work, "layers"):
                    layer = each.run(brought)
                    refined = dataclasses.replace(
                        refined, layers=(*refined.layers, layer), kept=refined.kept or layer.kept
                    )
            refined = _judged(refined, root, first, judging)
            if not refined.kept:
                put(start)
    finally:
        # Layers are whole, whatever ends it.
        changed = {
            module
            for (module, name), tensor in start.items()
            if name in module._buffers and module._buffers[name] is not tensor
        }
        recipe = {**state.recipe, "refine": {**dataclasses.asdict(options), "tokens": tokens}}
        rows = _rows(root, state.report, changed)
        report = Report(rows, refined)
        set_state(root, dataclasses.replace(state, recipe=recipe, report=report, files=()))
    return model


def _require_models(root: nn.Module, first: nn.Module) -> ConvertedState:
    """Return the state of a converted model that can be refined towards a float one."""
    require_initialized()
    if ranks().size > 1:
        raise OptionError(
            "refine works in one process. Refine the model before it is given to several."
        )
    for each in (root, first):
        if isinstance(each, fx.GraphModule):
            raise StateError("refine: a graph has no layers. Refine the model, and trace it then.")
        if offloaded_tensors(each):
            raise OptionError(
                "accelerate offloads a part of the model. Load it without device_map, and give "
                "refine the device to work on."
            )
        require_loaded(each)
        if is_compiled(each):
            raise StateError("A part of the model is compiled. Refine it before it is compiled.")
    state = get_state(root)
    if not isinstance(state, ConvertedState):
        raise StateError("refine: the model is not converted. Call fp4pass.convert(model) first.")
    if any(isinstance(module, QUANTIZED) for module in first.modules()):
        raise StateError("original: expected the float model, got a converted one.")
    if root.training or first.training:
        warnings.warn(
            "A model is in training mode: dropout is on while it is refined. Call model.eval() "
            "first.",
            stacklevel=3,
        )
    return state


def _stacks(root: nn.Module, first: nn.Module) -> list[tuple[Stack, Stack]]:
    """Return the stacks with packed layers, each with the same one of the float model."""
    packed: set[nn.Module] = {module for module in root.modules() if isinstance(module, QUANTIZED)}
    stacks = list(stacks_of(root, packed))
    if not stacks:
        raise StateError(
            "refine: expected a list of at least two layers (nn.ModuleList) with packed layers, "
            f"got {type(root).__name__} without one."
        )
    modules = dict(first.named_modules())
    pairs = []
    for stack in stacks:
        twin = modules.get(stack.pattern.removesuffix("*").removesuffix("."))
        layers = list(twin.children()) if isinstance(twin, nn.ModuleList | nn.Sequential) else []
        if list(map(_outline, layers)) != list(map(_outline, stack.layers)):
            raise OptionError(
                f"original: its {stack.name} has other layers than the converted model. Give the "
                "model that was converted."
            )
        pairs.append((stack, Stack(stack.name, stack.pattern, layers)))
    return pairs


def _outline(layer: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return the common facts of a layer and of its original."""
    return sorted(
        (name, tuple(each.shape)) for name, each in layer.named_parameters() if each.ndim == 1
    )


def _split(
    batches: Iterable[Any], held_out: Iterable[Any] | None
) -> tuple[list[Any], Sequence[Any]]:
    """Return the batches to learn from, and those that judge."""
    require_batches(batches)
    taught = list(batches)
    if held_out is not None:
        require_batches(held_out)
        judging = list(held_out)
    else:
        count = max(1, len(taught) // _HELD_OUT)
        taught, judging = taught[:-count], taught[-count:]
    if not taught or not judging:
        raise CalibrationError(
            "refine: expected at least two batches, one to learn from and one that is held out, "
            f"got {len(taught) + len(judging)}. Cut the text into smaller batches."
        )
    return taught, judging


def _record(
    models: Sequence[nn.Module],
    stacks: Sequence[tuple[Stack, Stack]],
    taught: Sequence[Any],
    judging: Sequence[Any],
) -> list[Pair]:
    """Record the calls of the stacks of both models."""
    recordings = [
        Recording(model, side, whole=False)
        for model, side in zip(models, zip(*stacks, strict=True), strict=True)
    ]
    counts: list[int] = []
    with ExitStack() as ends:
        for model, recording in zip(models, recordings, strict=True):
            ends.callback(recording.remove)
            ends.enter_context(watching_tokens(model))
        for part in (taught, judging):
            for batch in part:
                for model, recording in zip(models, recordings, strict=True):
                    recording.run(model, *call_arguments(batch, device_of(model)))
            counts = counts or [len(stack.calls) for stack, _ in stacks]
    for (stack, twin), count in zip(stacks, counts, strict=True):
        if not 0 < count < len(stack.calls) or len(stack.calls) != len(twin.calls):
            raise CalibrationError(
                f"{stack.name}: expected calls of both models by batches to learn from and by held "
                f"out ones, got {count}, {len(stack.calls) - count} and {len(twin.calls)} of the "
                f"float model. Give batches that reach it, or skip these layers in convert."
            )
    return [Pair(*each, count) for each, count in zip(stacks, counts, strict=True)]


def _weights(
    root: nn.Module, first: nn.Module, stacks: Sequence[tuple[Stack, Stack]]
) -> dict[nn.Module, Tensor]:
    """Return the float weight of each packed layer that learns."""
    shared = _shared(root, stacks)
    inside = {m for stack, _ in stacks for layer in stack.layers for m in layer.modules()}
    return {
        module: original_weight(first, name, module)
        for name, module in root.named_modules()
        if isinstance(module, QUANTIZED)
        and module in inside
        and module.packed_weight.packed not in shared
    }


def _small(root: nn.Module, stacks: Sequence[tuple[Stack, Stack]]) -> dict[str, nn.Parameter]:
    """Return the norms and biases of layers, which no others have."""
    shared = _shared(root, stacks)
    inside = {p for stack, _ in stacks for layer in stack.layers for p in layer.parameters()}
    return {
        name: each
        for name, each in root.named_parameters()
        if each.ndim == 1 and each in inside and each not in shared and each.is_floating_point()
    }


def _shared(root: nn.Module, stacks: Sequence[tuple[Stack, Stack]]) -> set[Tensor]:
    """Return the tensors that two layers have, or a layer and the rest of the model."""
    owners: dict[Tensor, set[int]] = {}
    layers = [layer for stack, _ in stacks for layer in stack.layers]
    inside = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    for module in root.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners.setdefault(tensor, set()).add(inside.get(module, -1))
    return {tensor for tensor, found in owners.items() if len(found) > 1}


def _learning(
    pair: Pair,
    index: int,
    weights: Mapping[nn.Module, Tensor],
    small: Mapping[str, nn.Parameter],
    options: Refine,
) -> Learning:
    """Return the work on a layer."""
    layer, learned = pair.stack.layers[index], set(small.values())
    own = {module: weights[module] for module in layer.modules() if module in weights}
    named = {name: each for name, each in layer.named_parameters() if each in learned}
    return Learning(pair, index, own, named if options.norm_lr else {}, options)


def _judged(refined: Refined, root: nn.Module, first: nn.Module, judging: Sequence[Any]) -> Refined:
    """Return the result with the KL of the refined model, which decides on the whole."""
    if refined.kl_before is None:
        return refined
    after = logits_kl(root, first, judging) if refined.kept else refined.kl_before
    kept = after is not None and after < refined.kl_before
    return dataclasses.replace(refined, kl_after=after, kept=kept)


def _rows(root: nn.Module, report: Report, changed: set[nn.Module]) -> tuple[Row, ...]:
    """Return the rows of a report, without the errors of codes that layers no longer have."""
    rows = {row.name: row for row in report.rows}
    for name, module in root.named_modules(remove_duplicate=False):
        if module not in changed or not isinstance(module, QUANTIZED) or name not in rows:
            continue
        stored, kind = module.packed_weight, type(module)
        module.config, note = resolve_compute(module.config, [(stored.packed, stored.scale)], kind)
        none: Any = {"weight_error": None, "output_error": None, "proved": None, "gap": None}
        note = note or rows[name].note
        rows[name] = dataclasses.replace(rows[name], config=module.config, note=note, **none)
    return tuple(rows[row.name] for row in report.rows)
