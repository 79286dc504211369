"""The Hessians of block columns, and bounds on the scales that can beat an error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.formats import Format
from .blocks import block_hessians

# Relative slack on every bound: far above float32 rounding, far below the step between scales.
SLACK = 1e-5


@dataclass(frozen=True)
class BoundedMetric:
    """The Hessians H of J block columns, and what bounds r^T H r."""

    hessian: Tensor  # float64 [J, n, n]
    factor: Tensor  # float32 [J, n, n], factor^T factor = H up to rounding and `negative`
    inverse_diagonal: Tensor  # float32 [J, n], of (H + ridge I)^-1
    ridge: Tensor  # float32 [J, 1]
    negative: Tensor  # float32 [J, 1], how far the least eigenvalue lies below 0
    trace: Tensor  # float32 [J, 1], of H

    def columns(self, start: int, stop: int) -> BoundedMetric:
        """Return the metric of some of the block columns."""
        return BoundedMetric(*(part[start:stop] for part in vars(self).values()))


def bounded_metric(hessian: Tensor, columns: int, block: int) -> BoundedMetric:
    """Return the metric of every block column of Hessians [ceil(columns / m), m, m]."""
    # A column whose Hessian is zero was never excited; any scale is optimal there, and the identity
    # in its place makes the SSE-optimal one the choice.
    stacked = block_hessians(hessian, columns, block)
    largest = stacked.abs().amax((1, 2), keepdim=True)
    dead = largest == 0
    identity = torch.eye(block, dtype=torch.float64, device=stacked.device)
    stacked = torch.where(dead, identity, stacked)
    largest = torch.where(dead, 1.0, largest)
    # By a power of two, which changes no comparison: the bounds are computed in float32.
    stacked *= torch.frexp(largest).mantissa / largest
    values, vectors = torch.linalg.eigh(stacked)
    negative = (-values[:, :1]).clamp_(min=0)  # [J, 1]
    # 1e-7 of the largest eigenvalue: well above float64 rounding of the inverse, and too small
    # to loosen the bound unless H is nearly singular.
    ridge = torch.maximum(1e-7 * values[:, -1:], 2 * negative)
    factor = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    inverse_diagonal = (vectors.square() / (values + ridge).unsqueeze(-2)).sum(-1)  # [J, n]
    return BoundedMetric(
        stacked,
        factor.float(),
        inverse_diagonal.float(),
        ridge.float(),
        negative.float(),
        values.clamp(min=0).sum(-1, keepdim=True).float(),
    )


def hessian_interval(
    x: Tensor, least: Tensor, fmt: Format, metric: BoundedMetric
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales that can beat an error, before SLACK: low, high and delta [J, R]."""
    # r^T H r >= r_i^2 / ((H + e I)^-1)_ii - e |x|^2 for every i (Schur complement; |r| <= |x|), so
    # no |r_i| may exceed reach_i: neither by clipping (a lower bound on s) nor by rounding to zero
    # (an upper bound). Nor may all of x be clipped: with H = F^T F the quantized block weighs at
    # most |F| sqrt(n) max s, the rest of |F x| is error. Where amax rounds to zero, larger scales
    # change nothing. x: normalized blocks, float32 [n, J, R]; least: [J, R], the error to beat;
    # delta bounds the rounding of the square root of an error.
    n = len(x)
    square = x.square().sum(0)
    delta = (n + 8) * 2.0**-24 * (metric.trace * square).sqrt()
    root = least.sqrt() + delta
    bound = root.square() + metric.ridge * square
    reach = (
        (bound * metric.inverse_diagonal.t().contiguous().unsqueeze(-1)).sqrt_().mul_(1 + SLACK)
    )  # [n, J, R]
    magnitude = x.abs()
    clipped = (magnitude - reach).amax(0) / fmt.element.max
    weight = (metric.factor @ x.transpose(0, 1)).square_().sum(1).sqrt_() - delta
    # Such an error by F exceeds that by H by what is negative in H.
    most = (root.square() + metric.negative * square).sqrt()
    vanished = (weight - most) / ((n * metric.trace).sqrt() * fmt.element.max)
    kept = torch.where(magnitude > reach, magnitude, magnitude.amax(0) * 2)
    return torch.maximum(clipped, vanished), kept.amin(0) / fmt.element.dead_zone, delta
