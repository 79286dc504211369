"""Run GPTQ, with the scale and codes of a block chosen when it is reached.

The Hessian H of all inputs is M D M^T, M upper triangular in blocks with ones on the diagonal and
D block diagonal. The loss of a row, (w - q) H (w - q)^T, is then the sum over blocks of r^T D_b r
with r = t - q_b and t = w_b + sum_{a < b} (w_a - q_a) M_ab: t is the target of block b given the
errors of the blocks before it, and D_b weighs its own error, given that the blocks after it will
compensate for it. That is exact OBS in blocks (docs/codes.md). A sweep visits all blocks again,
each with all others fixed.

Everything is transposed: [K, N], so that a block of columns is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_weight, pack_codes
from ..common.rounding import round_to_codes_
from ..statistics.naive import diagonal_blocks
from .joint_reference import (
    REFERENCE,
    Chooser,
    Metric,
    Solution,
    as_blocks,
    make_metric,
    normalize,
    step_sizes,
    upper_factor,
)

# Rows at a time: they share nothing but the Hessian. Bits may depend on it, for products of other
# shapes add in another order.
ROWS = 1 << 12

# Elements that are quantized together, so that a step of all their rows is one launch.
_ELEMENTS = 1 << 25

# Float32 sums of many tokens are wrong by at most about this part of the trace.
_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Problem:
    """The damped Hessian of a layer, factored in the order in which blocks are visited.

    Both pairs are what the residuals of other columns add to a target, float32 [K, K], and the
    metrics of blocks.
    """

    order: Tensor  # int64 [J], the block columns
    columns: Tensor  # int64 [K], the columns in them
    rounding: tuple[Tensor, Metric]  # M^T without its diagonal blocks and D, for the first visit
    sweeping: tuple[Tensor, Metric]  # with all other blocks fixed; the same without sweeps


def damp(hessian: Tensor, damping: float, shrinkage: float = 0.0, block: int = 1) -> Tensor:
    """Return (1 - a) H + a (its diagonal blocks) + damping * mean * I, float64 [K, K].

    a is the shrinkage, mean that of H's diagonal; the result is divided by that mean. Few texts
    determine how columns of different blocks correlate, and chance correlations would decide,
    through the inverse, which blocks compensate for an error.
    """
    # Columns that no token excited have only the damping, and round to nearest.
    full = hessian.to(torch.float64)
    full = (full + full.mT) / 2
    mean = full.diagonal().mean()
    full /= torch.where(mean > 0, mean, 1.0)
    if shrinkage:
        kept = diagonal_blocks(full, block)
        full *= 1 - shrinkage
        places = full.unflatten(0, (-1, block)).unflatten(2, (-1, block))
        places.diagonal(dim1=0, dim2=2).copy_(kept.permute(1, 2, 0))
    full.diagonal().add_(max(damping, len(full) * _ROUNDING))
    return full


def make_problem(hessian: Tensor, order: Tensor, block: int, sweeps: bool) -> Problem:
    """Factor a damped Hessian [K, K] for block columns visited in the order [J]."""
    columns = (order.unsqueeze(1) * block + torch.arange(block, device=order.device)).flatten()
    hessian = hessian[columns][:, columns]
    diagonal, sweeping = diagonal_blocks(hessian, block), None
    if sweeps:
        others = torch.linalg.inv(diagonal) @ hessian.view(len(order), block, -1)  # [J, n, K]
        sweeping = _without_diagonal_blocks(others), make_metric(diagonal)
    factor = upper_factor(hessian)
    del hessian
    # M_ab = G_ab G_bb^-1, for G G^T = H and D_b = G_bb G_bb^T.
    diagonal = diagonal_blocks(factor, block)
    others = torch.linalg.inv(diagonal).mT @ factor.mT.reshape(len(order), block, -1)
    rounding = _without_diagonal_blocks(others), make_metric(diagonal @ diagonal.mT)
    return Problem(order, columns, rounding, sweeping or rounding)


def _without_diagonal_blocks(lines: Tensor) -> Tensor:
    """Return lines [J, n, K] of blocks as float32 [K, K], the diagonal ones zero."""
    blocks = lines.unflatten(2, (len(lines), -1))
    blocks.diagonal(dim1=0, dim2=2).zero_()
    return lines.flatten(0, 1).float()


def gptq_ref(
    weight: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    damping: float,
    shrinkage: float,
    sweeps: int,
    start: int = 0,
    stop: int | None = None,
    *,
    chooser: Chooser = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] to a small tr (W - Q) H (W - Q)^T, H [K, K] damped and shrunk."""
    # What costs all rows most is visited first; sweeps: repeated visits of all blocks. start, stop:
    # the rows that are quantized; the same bits from a multiple of ROWS on.
    damped = damp(hessian, damping, shrinkage, fmt.block)
    blocks = make_metric(diagonal_blocks(damped, fmt.block))
    tiles = weight.split(ROWS)
    cost = torch.stack([cost_alone(rows, global_scale, blocks, fmt, chooser) for rows in tiles])
    order = cost.sum(0).argsort(descending=True, stable=True)
    problem = make_problem(damped, order, fmt.block, sweeps > 0)
    del damped
    weight, together = weight[start:stop], rows_together(weight.shape[1])
    packed, scale = empty_weight(weight, fmt)
    for here in (slice(i, i + together) for i in range(0, len(weight), together)):
        x, unit = normalize(weight[here].to(torch.float32), global_scale, fmt, 1)
        q, byte = solve(x.t(), unit.t(), problem, fmt, sweeps, chooser)
        step = step_sizes(byte, unit.t(), fmt).repeat_interleave(fmt.block, 0)
        codes = round_to_codes_((q / step).t().contiguous(), fmt.element)
        packed[here], scale[here] = pack_codes(codes, fmt.element.bits), byte.t().to(torch.uint8)
    return packed, scale


def cost_alone(
    rows: Tensor, global_scale: float, blocks: Metric, fmt: Format, chooser: Chooser = REFERENCE
) -> Tensor:
    """Return the losses [J] of the blocks of rows [R, K], each rounded to nearest by itself."""
    x, unit = normalize(rows.to(torch.float32), global_scale, fmt, 1)
    loss = chooser.choose(as_blocks(x, fmt.block), blocks, unit.t(), fmt, False)[2]
    return (loss.double() * (unit.t().double() / global_scale) ** -2).sum(1)


def rows_together(columns: int) -> int:
    """Return how many rows are quantized together, a multiple of ROWS."""
    return max(1, _ELEMENTS // (ROWS * columns)) * ROWS


def solve(
    x: Tensor, unit: Tensor, problem: Problem, fmt: Format, sweeps: int, chooser: Chooser
) -> tuple[Tensor, Tensor]:
    """Round normalized rows x [K, N] block after block, then again for each sweep: q and scales."""
    # unit: [1, N], what scales are multiplied by. Returned are q float32 [K, N] and scales int64
    # [J, N], in the order of the weight.
    block, solution = fmt.block, _begin(x, unit, problem)
    xs = [part.split(block) for part in solution.parts_of(solution.x)]
    residuals = solution.parts_of(solution.residual)
    target = x.new_empty(block * x.shape[1])
    targets = solution.parts_of(target)
    # A product reads all residuals so far, for 4096 x 14336 0.3 TB with a sweep: 0.1 s at 4 TB/s.
    # Updating 128 columns at once, as GPTQ does, would read less and need more launches.
    for visit in range(1 + sweeps):
        coefficients, metric = problem.sweeping if visit else problem.rounding
        for b, line in enumerate(coefficients.split(block)):
            # On the first visit the blocks after it have no residual yet.
            seen = len(x) if visit else b * block
            line = line[:, :seen]
            for own, residual, out in zip(xs, residuals, targets, strict=True):
                torch.addmm(own[b], line, residual[:seen], out=out)
            chooser.settle(target, solution, b, metric, fmt, visit > 0)
    q = _in_order(solution.q, problem.columns, solution)
    return q, _in_order(solution.byte, problem.order, solution)


def _begin(x: Tensor, unit: Tensor, problem: Problem) -> Solution:
    """Return nothing settled yet for normalized rows x [K, N] (`solve`)."""
    byte = torch.empty(len(problem.order) * x.shape[1], dtype=torch.int64, device=x.device)
    ordered, q, zeros = x.new_empty(x.numel()), x.new_empty(x.numel()), x.new_zeros(x.numel())
    solution = Solution(ROWS, unit.flatten().contiguous(), ordered, q, zeros, byte)
    for part, own in zip(solution.parts_of(ordered), x.split(ROWS, 1), strict=True):
        part.copy_(own[problem.columns])
    return solution


def _in_order(values: Tensor, lines: Tensor, solution: Solution) -> Tensor:
    """Return values of parts as [L, N], their lines in the order of the weight."""
    back = lines.argsort()
    return torch.cat([part[back] for part in solution.parts_of(values)], dim=1)
