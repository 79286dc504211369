"""Normalized blocks [J, n, R] of a weight: their layout, their scales and their block Hessians.

J block columns, n elements, R rows: every step over the elements is a contiguous pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.elements import element_table
from ...core.formats import Format
from ...errors import CalibrationError, ShapeError, expected
from ..common.rounding import float_exponent, power_of_two, scale_values

# Eigenvalues of a block Hessian count as at least this part of its largest.
_FLOOR = 1e-7


def as_blocks(x: Tensor, block: int) -> Tensor:
    """Return [R, J * n] as [J, n, R], for n = block."""
    return x.view(len(x), -1, block).permute(1, 2, 0).contiguous()


def from_blocks(x: Tensor) -> Tensor:
    """Return [J, n, R] as [R, J * n]."""
    return x.permute(2, 0, 1).flatten(1)


def normalize(x: Tensor, global_scale: float, fmt: Format, dim: int) -> tuple[Tensor, Tensor]:
    """Return x times powers of two, shared along `dim`, that bring amax to [1, 2), and the unit."""
    # unit: what scales of the format are multiplied by; like x, with 1 along `dim`. Squares stay in
    # range. Blocks 2^60 below the smallest scale are zero at every scale and stay smaller than 1.
    low = -126
    if fmt.has_global_scale:
        low = max(low, math.frexp(global_scale * fmt.scale.min)[1] - 60)
    shift = power_of_two(-float_exponent(x.abs().amax(dim, keepdim=True)).clamp_(low, 126))
    return x * shift, shift * global_scale


def step_sizes(byte: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """Return what elements are multiplied by at scale bytes, in the units of normalized blocks."""
    # Beyond 2^100 all elements round to zero and below 2^-100 all saturate, as they would anyway
    # unless they are 2^98 smaller than amax; within, neither quotients nor products overflow.
    return scale_values(byte, fmt.scale).mul_(unit).clamp_(2.0**-100, 2.0**100)


def dequantized(codes: Tensor, byte: Tensor, global_scale: float, fmt: Format) -> Tensor:
    """Return the float64 values [J, n, R] of codes [J, n, R] at scale bytes [J, R]."""
    table = element_table(fmt.element, codes.device).double()
    scale = scale_values(byte, fmt.scale).mul_(global_scale).double()
    return table[codes.int()].mul_(scale.unsqueeze(1))


def losses(residual: Tensor, hessian: Tensor) -> Tensor:
    """Return r^T H r, [J, R], of residuals [J, n, R] and Hessians [J, n, n]."""
    return (hessian @ residual).mul_(residual).sum(1)


def block_hessians(hessian: Tensor, columns: int, block: int) -> Tensor:
    """Return the Hessian of each block, symmetric: float64 [columns / block, block, block]."""
    # hessian: [ceil(columns / m), m, m]. Raises ShapeError unless m is a multiple of `block`.
    if hessian.shape[-1] % block:
        raise ShapeError(
            expected("Block Hessian", f"whole blocks of {block}", f"{hessian.shape[-1]} columns")
            + " Give one Hessian for each block, or choose a format with a smaller block."
        )
    full = hessian.to(torch.float64)
    parts = [full[:, i : i + block, i : i + block] for i in range(0, full.shape[1], block)]
    stacked = torch.stack(parts, dim=1).flatten(0, 1)[: columns // block]
    return (stacked + stacked.mT) / 2


def regular(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return Hessians [J, n, n] made regular, over their largest eigenvalue, and that [J, 1]."""
    # Eigenvalues below 1e-7 of the largest, and so those that rounding left below zero, are raised
    # to that; a Hessian that is zero becomes the identity.
    values, vectors = torch.linalg.eigh(hessian)
    largest = values[:, -1:].clamp(min=0)
    values = torch.where(largest > 0, values / largest, 1.0).clamp_(min=_FLOOR)
    return (vectors * values.unsqueeze(1)) @ vectors.mT, largest


def upper_factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular G [..., K, K] with G G^T = H, else raise CalibrationError."""
    factor, failed = torch.linalg.cholesky_ex(hessian.flip(-1, -2))
    if failed.any():
        raise CalibrationError(
            "Hessian: expected a sum of x x^T, got negative eigenvalues. Calibrate again, or raise "
            "the damping."
        )
    return factor.flip(-1, -2)
