"""Output errors of single linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import ops
from ..errors import StateError, require_type
from ..linear import QuantizedLinear
from ..quantization.batches import call_arguments, require_batches
from ..quantization.state import unwrap
from .computing import fast_dtype


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
    converted layer without its bias, so that its quantized inputs count.

    Args:
        model: a converted model.
        reference: the float model that was converted.
        batches: as for `calibrate`; best held out from the calibration.
        activations: whether the converted layers see x, and not only their weights.
        progress: whether to show a progress bar.

    Returns:
        The error by the name of the layer, nan for a layer that no batch reached.

    Raises:
        StateError: the models are not a converted model and its original.
    """
    require_batches(batches)
    require_type("activations", "True or False", activations, bool)
    originals = dict(unwrap(reference).named_modules(remove_duplicate=False))
    sums: dict[str, list[float]] = {}
    handles = []
    for name, module in unwrap(model).named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        original = originals.get(name)
        weight = getattr(original, "weight", None)
        fits = isinstance(weight, Tensor) and weight.shape == module.weight.shape
        if original is None or not fits or isinstance(original, QuantizedLinear):
            raise StateError(
                f"{name or 'the model'}: expected a float linear layer of this name and shape in "
                "the reference, got none. Give the model as it was before convert, such as a "
                "copy.deepcopy of it."
            )
        sums[name] = [0.0, 0.0]
        measure = partial(_measure, sums[name], module, activations)
        handles.append(original.register_forward_hook(measure))
    if not handles:
        raise StateError(
            "Expected a converted model, got one that has no converted linear layer. Call "
            "fp4pass.convert(model) first."
        )
    device = next(reference.parameters()).device
    try:
        with fast_dtype(model, reference):
            for batch in tqdm(batches, desc="output errors", unit="batch", disable=not progress):
                args, kwargs = call_arguments(batch, device)
                reference(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: math.sqrt(error / size) if size else (math.inf if error else math.nan)
        for name, (error, size) in sums.items()
    }


def _measure(
    sums: list[float],
    module: QuantizedLinear,
    activations: bool,
    original: Any,
    args: Sequence[Tensor],
    output: Tensor,
) -> None:
    """Add |y - y'|^2 and |y|^2 of one call of a linear layer to `sums`."""
    x = args[0].flatten(0, -2)  # [T, K]
    weight = _matrix(original.weight, module)  # [N, K]
    y = x.float() @ weight.t()
    if activations:
        difference = y - _output(module, x).to(y.device)
    else:
        difference = x.float() @ (weight - _matrix(module.weight.to(weight.device), module)).t()
    sums[0] += difference.square().sum(dtype=torch.float64).item()
    sums[1] += y.square().sum(dtype=torch.float64).item()


def _matrix(weight: Tensor, module: QuantizedLinear) -> Tensor:
    """A weight of the layer as float32 [N, K]."""
    return (weight.t() if module.transposed else weight).float()


def _output(module: QuantizedLinear, x: Tensor) -> Tensor:
    """The output [T, N] of a converted layer without bias, for inputs [T, K] of the original."""
    config = module.config
    # A layer with folded rotations reads and writes what its neighbours rotate.
    if config.folded:
        x = ops.rotate(x, config.rotation)
    y = module(x.to(module.weight_packed.device)).float()
    if module.bias is not None:
        y = y - module.bias.float()
    return ops.rotate(y, config.output_rotation) if config.output_rotation else y
