"""The products of a mixture's experts: a loop over those that were chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.formats import Format
from ..dequantize.reference import dequantize_ref
from ..linear.reference import linear_quantized_ref, linear_ref

# Where the rows of an expert are among [T, k], and what linear_ref takes of it before the format.
Expert = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]


def experts_linear_ref(
    x: Tensor,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return the rows of x times the packed weights [E, N, K] of their experts, [T, k, N]."""
    out = x.new_zeros((*ids.shape, packed.shape[1]))
    for pairs, weight in _chosen(ids, packed, scale, global_scale, bias):
        out[pairs] = linear_ref(_rows(x, pairs), *weight, fmt)
    return out


def experts_linear_quantized_ref(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return quantized rows times the packed weights of their experts, [T, k, N]."""
    # Of x only the dtype is read, and only the gradient computed (`linear_quantized_ref`).
    out = x.new_zeros((*ids.shape, packed.shape[1]))
    for pairs, weight in _chosen(ids, packed, scale, global_scale, bias):
        codes, scales = _rows(x_packed, pairs), _rows(x_scale, pairs)
        out[pairs] = linear_quantized_ref(x, codes, scales, x_global_scale, *weight, fmt)
    return out


def experts_linear_transposed_ref(
    grad: Tensor,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return rows [T, k, N] times the weights [N, K] of their experts, [T, k, K]: a gradient."""
    out = grad.new_zeros((*ids.shape, fmt.columns(packed.shape[-1])))
    for pairs, weight in _chosen(ids, packed, scale, global_scale, None):
        out[pairs] = grad[pairs] @ dequantize_ref(*weight[:3], fmt, grad.dtype)
    return out


def _chosen(
    ids: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None
) -> Iterator[Expert]:
    """Yield the experts that have rows."""
    for index in ids.unique().tolist():
        if not 0 <= index < len(packed):
            continue
        # By the place among the k first and then by token, as transformers gathers them: the order
        # of rows may tell how a product sums.
        place, token = torch.where((ids == index).t())
        weight = (
            packed[index],
            scale[index],
            None if global_scale is None else global_scale[index : index + 1],
            None if bias is None else bias[index],
        )
        yield (token, place), weight


def _rows(x: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the rows of pairs, of x [T, ...], one for all of a token, or [T, k, ...]."""
    token, place = pairs
    return x[token] if x.ndim == 2 else x[token, place]
