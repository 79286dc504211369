"""Compare a packed model with the float model that it was made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..checkpoint.layouts import BUFFERS
from ..checkpoint.reader import CheckpointReader
from ..core.progress import track
from ..nn.experts import QUANTIZED, QuantizedExpertStack, weight_name
from ..nn.linear import QuantizedLinear
from ..record.rows import Report

# Of weight errors that were summed in another order, relative.
_ROUNDING = 1e-6


def relative_error(original: Tensor, other: Tensor) -> float:
    """Return |A - B| / |A|, 0 for equal tensors and infinity for a difference from zeros."""
    difference = original.float() - other.to(original.device).float()
    size = original.float().norm(dtype=torch.float64).item()
    error = difference.norm(dtype=torch.float64).item()
    return error / size if size else (math.inf if error else 0.0)


@torch.no_grad()
def compare(
    stored: CheckpointReader, model: nn.Module, reference: nn.Module, max_error: float
) -> tuple[dict[str, float], int, dict[str, str]]:
    """Compare every tensor of a packed model, loaded of a folder, with a float model's."""
    # Returns the errors of layers, the number of other tensors, and what is wrong by its name.
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    reported = {row.name: row.weight_error for row in rows if not row.skip_reason}
    originals = dict(reference.named_parameters(remove_duplicate=False))
    packed = {n: each for n, each in model.named_modules() if isinstance(each, QUANTIZED)}
    errors, wrong = dict[str, float](), dict[str, str]()
    for name, module in track(packed.items(), "compare", unit="layers"):
        weight, shape = originals.get(weight_name(name, module)), tuple(module.weight.shape)
        if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
            there = f"one of {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"
            wrong[name] = f"is a weight of {shape}, the reference has {there} there"
            continue
        error = errors[name] = _weight_error(weight, module)
        wanted = reported.get(name)
        if wanted is not None and not abs(error - wanted) <= _ROUNDING * wanted:
            wrong[name] = f"has a weight error of {error:.6f}, not {wanted:.6f}"
        elif not error <= max_error:
            wrong[name] = f"has a weight error of {error:.3f}, above {max_error}"
    layers = {*packed, *stored.layers}
    parts = {f"{layer}.{part}" for layer in layers for part in (*BUFFERS, "weight")} | layers
    ours, theirs = (
        {name: t.detach().cpu() for name, t in each.state_dict().items() if name not in parts}
        for each in (model, reference)
    )
    for name in sorted(ours.keys() ^ theirs.keys()):
        holder = "the checkpoint" if name in ours else "the reference"
        wrong.setdefault(name, f"is in {holder} only")
    both = sorted(ours.keys() & theirs.keys())
    for name in both:
        bits = [each.to(ours[name].dtype).contiguous() for each in (ours[name], theirs[name])]
        mine, other = (each.flatten().view(torch.uint8) for each in bits)
        if ours[name].shape != theirs[name].shape or not torch.equal(mine, other):
            wrong[name] = "is not the reference's tensor, bit by bit"
    return errors, len(both), wrong


def _weight_error(weight: Tensor, module: QuantizedLinear | QuantizedExpertStack) -> float:
    """Return the error of a packed weight, before it is rotated back and rounded to its dtype."""
    rows = module.from_parameter(weight)
    if not module.config.rotation:
        return relative_error(rows, module.from_parameter(module.weight))
    kept = torch.cat(list(map(module.config.stored, module.unstacked(rows))))
    return relative_error(kept, module.stored_weight(torch.float32).flatten(0, -2))
