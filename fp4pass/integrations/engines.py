"""The products of linear layers that a serving engine has loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..core.formats import MXFP4, NVFP4

# Compute capabilities that the kernels have run on.
TESTED = (89, 90)

# Of parameters that multiply, or divide, the block scales: the format, by their names in engines.
_GLOBAL_SCALES = {"weight_scale_2": NVFP4.with_multiplier(), "weight_global_scale": NVFP4}


def global_scales(layer: nn.Module) -> tuple[str, Tensor | None]:
    """Return the key of a layer's format, and a copy of the global scale of each joined layer."""
    for name, fmt in _GLOBAL_SCALES.items():
        if hasattr(layer, name):
            return fmt.key, getattr(layer, name).detach().clone()
    return MXFP4.key, None


def keep_loaded(layer: nn.Module, packed: Tensor, scale: Tensor, scales: Tensor | None) -> None:
    """Give a layer its tensors as they were loaded, which `multiply` reads."""
    # In words, as kernels of engines have 4 bits: attention and output embeddings ask for the type.
    made = {"weight": packed.view(torch.int32), "weight_scale": scale.view(torch.uint8)}
    if scales is not None:
        made["weight_global_scale"] = scales[:1] if (scales == scales[0]).all() else scales
    for name in ("weight_packed", *_GLOBAL_SCALES, *made):
        if hasattr(layer, name):
            delattr(layer, name)
    for name, tensor in made.items():
        plain = nn.Parameter(tensor.detach().as_subclass(Tensor), requires_grad=False)
        layer.register_parameter(name, plain)


def multiply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, [..., N]."""
    weight = [layer.weight.view(torch.uint8), layer.weight_scale]
    number = getattr(layer, "weight_global_scale", None)
    if number is None or len(number) == 1:
        return ops.linear(x, *weight, number, bias, layer.fp4pass_key, "input")
    # One product for each of the layers that are joined.
    rows = layer.logical_widths
    biases = [None] * len(rows) if bias is None else bias.split(rows)
    parts = zip(*(each.split(rows) for each in weight), number.split(1), biases, strict=True)
    return torch.cat([ops.linear(x, *part, layer.fp4pass_key, "input") for part in parts], -1)
