"""refine: learn codes, norms and biases of a converted model, one layer after the other."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .._compat.accelerate import offloaded_tensors
from .._compat.torch import is_compiled
from ..distributed import ranks, require_initialized
from ..errors import CalibrationError, OptionError, StateError, expected, require_flags
from ..experts import QUANTIZED
from .batches import call_arguments, device_of, require_batches, require_loaded
from .checks import require_whole
from .layer_inputs import Recording, stacks_of
from .layer_stack import Stack
from .learning import Learning, Refine
from .report import RefinedLayer
from .state import ModelState, get_state, set_state, unwrap

# One of so many batches judges a layer where none are given for that.
_HELD_OUT = 8


Pair = tuple[Stack, Stack]


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
    """Learn better codes, norms and biases for the layers of a converted model, in place.

    One layer of the model's stacks at a time learns to give what it gives in the float model, from
    what the refined layers before it give. Codes move by gradients that pass their rounding, inputs
    are quantized as they always are, and block scales stay. A layer that is no better on held-out
    batches afterwards stays as it was; `fp4pass.report(model).refined` says which.

    Args:
        model: converted, by any method.
        original: the float model that it was converted from.
        batches: as for `calibrate`; each step learns from one, so several windows of text each.
        options: how; None for `Refine()`.
        held_out: batches that judge each layer, best those that the conversion has not seen
            either. None for the last eighth of `batches`, from which nothing is learned then.
        device: where to work on one layer after the other; by default where the model is.
        progress: show progress bars.

    Returns:
        The model, an ordinary converted one.

    Raises:
        StateError: the model is not converted, or has no stack of layers; the original is.
        CalibrationError: there are fewer than two batches, or layers are not called in order.
        OptionError: the models do not fit each other, or accelerate offloads one of them.
    """
    options = Refine() if options is None else options
    if not isinstance(options, Refine):
        raise OptionError(expected("options", "fp4pass.Refine(...)", type(options).__name__))
    require_flags(progress=progress)
    root, first = unwrap(model), unwrap(original)
    state = _require_models(root, first)
    pairs = _stacks(root, first)
    counts = _record((root, first), pairs, batches, held_out, progress)
    work = [
        Learning(*pair, index, counts[pair[0]], options)
        for pair in pairs
        for index in range(len(pair[0].layers))
    ]
    shared = _shared(root, pairs)
    place = device_of(root) if device is None else torch.device(device)
    refined: list[RefinedLayer] = []
    tokens = sum(call.hidden[..., 0].numel() for s, _ in pairs[:1] for call in s.calls[: counts[s]])
    bar = tqdm(work, desc="refine", unit="layer", leave=False, disable=None if progress else True)
    try:
        with torch.inference_mode(False), torch.no_grad():
            refined.extend(each.run(place, shared) for each in bar)
    finally:
        # Layers are whole, whatever ends it.
        recipe = {**state.recipe, "refine": {**dataclasses.asdict(options), "tokens": tokens}}
        report = dataclasses.replace(state.report, refined=tuple(refined))
        set_state(root, dataclasses.replace(state, recipe=recipe, report=report))
    return model


def _require_models(root: nn.Module, first: nn.Module) -> ModelState:
    """Return the state of a converted model that can be refined towards a float one."""
    require_initialized()
    if ranks().size > 1:
        raise OptionError(
            "refine works in one process. Refine the model before it is given to several."
        )
    for model, verb in ((root, "refine"), (first, "refine")):
        require_whole(model, verb)
        require_loaded(model)
        if offloaded_tensors(model):
            raise OptionError(
                "accelerate offloads a part of the model. Load it without device_map, and give "
                "refine the device to work on."
            )
        if is_compiled(model):
            raise StateError("A part of the model is compiled. Refine it before it is compiled.")
    state = get_state(root)
    if state is None or state.status != "converted":
        raise StateError("The model is not converted. Call fp4pass.convert(model) first.")
    if any(isinstance(module, QUANTIZED) for module in first.modules()):
        raise StateError("original: expected the float model, got a converted one.")
    if root.training or first.training:
        warnings.warn(
            "A model is in training mode: dropout is on while it is refined. Call model.eval() "
            "first.",
            stacklevel=3,
        )
    return state


def _stacks(root: nn.Module, first: nn.Module) -> list[Pair]:
    """Return the stacks with packed layers, and the same ones of the float model."""
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
        twin = modules.get(stack.name)
        layers = list(twin.children()) if isinstance(twin, nn.ModuleList | nn.Sequential) else []
        if list(map(_outline, layers)) != list(map(_outline, stack.layers)):
            raise OptionError(
                f"original: its {stack.name} has other layers than the converted model. Give the "
                "model that was converted."
            )
        pairs.append((stack, Stack(stack.name, stack.pattern, layers)))
    return pairs


def _outline(layer: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a layer has in common with what it was converted from."""
    return sorted(
        (name, tuple(each.shape)) for name, each in layer.named_parameters() if each.ndim == 1
    )


def _record(
    models: Sequence[nn.Module],
    pairs: Sequence[Pair],
    batches: Iterable[Any],
    held_out: Iterable[Any] | None,
    progress: bool,
) -> dict[Stack, int]:
    """Record what the stacks are called with; return of how many calls each is to learn."""
    require_batches(batches)
    if held_out is not None:
        require_batches(held_out)
    recordings = [Recording(side, whole=False) for side in zip(*pairs, strict=True)]
    counts: dict[Stack, int] = {}
    try:
        for part in (batches, held_out or ()):
            for batch in tqdm(
                part, desc="record", unit="batch", disable=None if progress else True
            ):
                for model, recording in zip(models, recordings, strict=True):
                    args, kwargs = call_arguments(batch, device_of(model))
                    with torch.no_grad():
                        recording.run(model, args, kwargs)
            counts = counts or {stack: len(stack.calls) for stack, _ in pairs}
    finally:
        for recording in recordings:
            recording.remove()
    for stack, twin in pairs:
        if held_out is None:
            counts[stack] -= max(1, counts[stack] // _HELD_OUT)
        if not 0 < counts[stack] < len(stack.calls) or len(stack.calls) != len(twin.calls):
            raise CalibrationError(
                f"{stack.name}: expected at least two batches, one to learn from and one that is "
                f"held out, got {len(stack.calls)}. Cut the text into smaller batches."
            )
    return counts


def _shared(root: nn.Module, pairs: Sequence[Pair]) -> frozenset[int]:
    """Return the identities of tensors that two layers have, or a layer and the rest."""
    owners: dict[int, set[int]] = {}
    layers = [layer for stack, _ in pairs for layer in stack.layers]
    inside = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    for module in root.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            owners.setdefault(id(tensor), set()).add(inside.get(module, -1))
    return frozenset(key for key, found in owners.items() if len(found) > 1)
