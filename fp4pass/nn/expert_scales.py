"""Global scales of the experts of a stack: one for each, or for rows of each.

A stack [E, N, K] keeps its global scales as [E], or as [E, R] where the R parts of an expert's rows
(gate and up) have one each; those of inputs as [1] for all experts, or [E].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..record.config import LinearConfig
from .linear import StoredWeight, quantize_input


def parts_of(weight: StoredWeight) -> int:
    """Return R, the parts of an expert's rows that have a global scale each."""
    scale = weight.global_scale
    return 1 if scale is None or scale.ndim == 1 else int(scale.shape[1])


def cut_rows(weight: StoredWeight) -> StoredWeight:
    """Return a stack [E, N, K] as one of E * R matrices [N / R, K], with one global scale each."""
    parts = parts_of(weight)
    if parts == 1:
        return weight
    inputs = weight.input_global_scale
    if inputs is not None and len(inputs) > 1:
        inputs = inputs.repeat_interleave(parts)
    codes, bits = (_cut(each, parts) for each in (weight.packed, weight.scale))
    return StoredWeight(codes, bits, weight.global_scale.flatten(), inputs)


def cut_pairs(
    x: Tensor, ids: Tensor, bias: Tensor | None, parts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs, ids [T, k * R] and biases [E * R, N / R] for a stack from `cut_rows`."""
    if parts == 1:
        return x, ids, bias
    # Ids of no expert stay so.
    places = ids.unsqueeze(-1) * parts + torch.arange(parts, device=ids.device)
    x = x.repeat_interleave(parts, 1) if x.ndim == 3 else x
    return x, places.flatten(1), None if bias is None else _cut(bias, parts)


def dequantize_stack(weight: StoredWeight, config: LinearConfig, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes of a stack [E, N, K]."""
    packed, scale, global_scale, _ = cut_rows(weight)
    scales = [None] * len(packed) if global_scale is None else global_scale.split(1)
    matrices = zip(packed, scale, scales, strict=True)
    dense = torch.stack([ops.dequantize(*each, config.format.key, dtype) for each in matrices])
    return dense.view(*weight.packed.shape[:2], -1)


def quantize_pairs(
    x: Tensor, ids: Tensor, weight: StoredWeight, config: LinearConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes and scale bits of inputs [T, K] or [T, k, K], and their global scale.

    Where each expert has one [E], codes and bits are those of pairs [T, k, ...].
    """
    scales = weight.input_global_scale
    if scales is None or len(scales) == 1:
        return quantize_input(x, weight, config)
    rotated = ops.rotate(x, config.input_rotation) if config.input_rotation else x
    key, method = config.format.key, config.activation_scales
    return *ops.experts_quantize(rotated, ids, scales, key, method), scales


def _cut(tensor: Tensor, parts: int) -> Tensor:
    """Return [E * R, N / R, ...] of [E, N, ...]."""
    return tensor.unflatten(1, (parts, -1)).flatten(0, 1)
