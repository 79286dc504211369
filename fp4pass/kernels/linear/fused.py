"""Choose where a launch of products computes what is around them too, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedWeight
from ..common.tiles import LAUNCH, cdiv, overlapping
from ..norm.naive import square_sums_ref, sums_of_squares
from ..norm.triton import rms_norm_triton
from .around_triton import Around, RowNorm, gate_kernel
from .decode_triton import InputRows
from .gluon_triton import step_of_warps
from .naive import linear_gated_ref
from .tiling import MOST_NORMED, MOST_OF_NORM, TERMS, config, shared_memory_of
from .triton import group_tiles, linear_group_triton, linear_triton, multiply_few

# Columns of a program that multiplies what is there: measured on an H200.
_BLOCK = 1024


def linear_gated_triton(
    x: Tensor,
    weights: Sequence[PackedWeight],
    activation: str,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return the activation of one product times another (`linear_gated_ref`)."""
    if x.dtype not in TERMS:
        return linear_gated_ref(x, weights, activation, fmt, compute)
    return _gated(x, weights, fmt, compute, Around(activation))


def linear_add_triton(
    x: Tensor, weight: PackedWeight, residual: Tensor, fmt: Format, compute: str = "input"
) -> tuple[Tensor, Tensor]:
    """Return residual + product and its sums of squares (`linear_add_ref`)."""
    n, k = weight.packed.shape[0], x.shape[-1]
    step = step_of_warps(x, x.dtype, x.numel() // k, k, fmt)
    if not step:
        total = residual + linear_triton(x, weight, fmt, compute)
        return total, square_sums_ref(total)
    tiles = config(1, n, k, 1, shared_memory_of(x.device), step=step)
    total = x.new_empty((*x.shape[:-1], n))
    squares = sums_of_squares(total)
    around = Around(residual=residual.contiguous(), squares=squares)
    multiply_few(InputRows.of_numbers(x), [weight], [total], fmt, tiles, around)
    return total, squares


def linear_normed_group_triton(
    x: Tensor,
    squares: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
) -> list[Tensor]:
    """Multiply the norm of x and several weights (`linear_normed_group_ref`)."""
    norm = RowNorm(squares, norm_weight.contiguous(), eps)
    tiles = group_tiles(x, x.dtype, weights, fmt) if norms_row(x, 0, fmt) else None
    if tiles is None:
        normed = rms_norm_triton(x, norm_weight, eps)
        return linear_group_triton(normed, weights, fmt, compute)
    out = [x.new_empty((*x.shape[:-1], each.packed.shape[0])) for each in weights]
    multiply_few(InputRows.of_numbers(x), weights, out, fmt, tiles, Around(norm=norm))
    return out


def linear_normed_gated_triton(
    x: Tensor,
    squares: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[PackedWeight],
    activation: str,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return the gate of the norm of x (`linear_normed_gated_ref`)."""
    if not norms_row(x, 0, fmt):
        x = rms_norm_triton(x, norm_weight, eps)
        return linear_gated_triton(x, weights, activation, fmt, compute)
    norm = RowNorm(squares, norm_weight.contiguous(), eps)
    return _gated(x, weights, fmt, compute, Around(activation, norm))


def multiplies_row(x: Tensor, fmt: Format) -> bool:
    """Return whether products of x are by the kernel for one row, with what is around them."""
    return bool(step_of_warps(x, x.dtype, x.numel() // x.shape[-1], x.shape[-1], fmt))


def norms_row(x: Tensor, weights: int, fmt: Format) -> bool:
    """Return whether the launch of products of x and so many weights computes a norm of it."""
    return x.shape[-1] <= MOST_NORMED and weights <= MOST_OF_NORM and multiplies_row(x, fmt)


def _gated(
    x: Tensor, weights: Sequence[PackedWeight], fmt: Format, compute: str, around: Around
) -> Tensor:
    halves = list(weights) if len(weights) == 2 else _halves(weights[0])
    # Programs read the codes and scales of both from one address each, which has to be aligned.
    read = (tensor for each in halves for tensor in each[:2])
    tiles = group_tiles(x, x.dtype, halves, fmt)
    if tiles is not None and all(each.data_ptr() % 16 == 0 for each in read):
        out = x.new_empty((*x.shape[:-1], halves[0].packed.shape[0]))
        # Launched early, the programs of the next product would not be spread evenly.
        tiles = replace(tiles, releases=tiles.in_gluon)
        multiply_few(InputRows.of_numbers(x), halves, [out], fmt, tiles, around)
        return out
    if around.norm is not None:
        x = rms_norm_triton(x, *around.norm[1:])
    products = linear_group_triton(x, weights, fmt, compute)
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return _multiply_gate(gate, up, str(around.activation))


def _halves(weight: PackedWeight) -> list[PackedWeight]:
    """Return the halves of the rows of a weight; a global scale is that of both."""

    def split(each: Any) -> Sequence[Any]:
        return (each, each) if each is None or each.numel() == 1 else each.chunk(2)

    return [PackedWeight(*half) for half in zip(*map(split, weight), strict=True)]


def _multiply_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the activation of a gate [..., N] times its factor, both in rows of N or 2 N."""
    out = gate.new_empty(gate.shape)
    n = gate.shape[-1]
    if rows := gate.numel() // max(n, 1):
        gate_kernel[(rows, cdiv(n, _BLOCK))](
            gate, up, out, n, gate.reshape(rows, n).stride(0), up.reshape(rows, n).stride(0),
            ACTIVATION=activation, BLOCK=_BLOCK, **LAUNCH, **overlapping(gate.device, False),
        )  # fmt: skip
    return out
