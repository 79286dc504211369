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
from torch.nn import functional as F

from ...core.formats import Format
from ...core.packing import empty_weight, pack_codes
from ..common.rounding import band_of, bands, round_to_codes_, round_to_values_, spread
from ..statistics.naive import HESSIAN_BLOCK, diagonal_blocks
from .float_scales import in_blocks, search_float_scales
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
    """The damped Hessian of a layer, factored in the order in which blocks are visited."""

    order: Tensor  # int64 [J], the block columns
    columns: Tensor  # int64 [K], the columns in them
    rounding: Tensor  # float32 [K, K], M^T without its diagonal blocks, for the first visit
    effective: Metric  # D, for the first visit
    # float32 [K, K], what the residuals of all other columns add to a target in a sweep, and the
    # metrics of blocks with all others fixed; None without sweeps.
    sweeping: Tensor | None
    whole: Metric | None


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
    count = len(order)
    inside = torch.arange(block, device=order.device)
    columns = (order.unsqueeze(1) * block + inside).flatten()
    hessian = hessian[columns][:, columns]
    diagonal = diagonal_blocks(hessian, block)
    sweeping = whole = None
    if sweeps:
        inverse = torch.linalg.inv(diagonal)
        others = inverse @ hessian.view(count, block, -1)  # [J, n, K]
        sweeping = _without_diagonal_blocks(others.flatten(0, 1), block).float()
        whole = make_metric(diagonal)
    factor = upper_factor(hessian)
    del hessian
    diagonal = diagonal_blocks(factor, block)
    # M_ab = G_ab G_bb^-1, for G G^T = H and D_b = G_bb G_bb^T.
    rounding = torch.linalg.inv(diagonal).mT @ factor.mT.reshape(count, block, -1)
    rounding = _without_diagonal_blocks(rounding.flatten(0, 1), block).float()
    return Problem(order, columns, rounding, make_metric(diagonal @ diagonal.mT), sweeping, whole)


def _without_diagonal_blocks(matrix: Tensor, block: int) -> Tensor:
    """Set the diagonal blocks of a matrix [K, K] to zero, in place, and return it."""
    blocks = matrix.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    blocks.diagonal(dim1=0, dim2=2).zero_()
    return matrix


def gptq_ref(
    weight: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    damping: float,
    shrinkage: float,
    codes: str,
    scales: str,
    order: str,
    sweeps: int,
    start: int = 0,
    stop: int | None = None,
    *,
    chooser: Chooser = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] to a small tr (W - Q) H (W - Q)^T, H [K, K] damped and shrunk."""
    # codes: of joint_reference.CODES. scales: "inside" (chosen with a block's codes) or "static".
    # order: "loss" (what costs all rows most first) or "natural". sweeps: repeated visits of all
    # blocks. start, stop: the rows that are quantized; the same bits from a multiple of ROWS on.
    if fmt.has_float_scale:
        stop = len(weight) if stop is None else stop
        return gptq_float_scales(weight, hessian, fmt, damping, shrinkage, order, start, stop)
    damped = damp(hessian, damping, shrinkage, fmt.block)
    blocks = make_metric(diagonal_blocks(damped, fmt.block))
    alone = [each_alone(rows, global_scale, blocks, fmt, chooser) for rows in weight.split(ROWS)]
    visited = torch.arange(len(blocks.hessian), device=weight.device)
    if order == "loss":
        cost = torch.stack([loss for _, loss in alone]).sum(0)
        visited = cost.argsort(descending=True, stable=True)
    problem = make_problem(damped, visited, fmt.block, sweeps > 0)
    del damped
    together = rows_together(weight.shape[1])
    parts = range(start, len(weight) if stop is None else stop, together)
    packed, scale = empty_weight(weight[start:stop], fmt)
    for here in parts:
        rows = weight[here : min(here + together, parts.stop)]
        x, unit = normalize(rows.to(torch.float32), global_scale, fmt, 1)
        given = None
        if scales == "static":
            own = alone[here // ROWS : -(-(here + len(rows)) // ROWS)]
            given = torch.cat([byte for byte, _ in own], dim=1)[:, : len(rows)]
        q, byte = solve(x.t(), unit.t(), problem, fmt, codes, given, sweeps, chooser)
        step = step_sizes(byte, unit.t(), fmt).repeat_interleave(fmt.block, 0)
        found = round_to_codes_((q / step).t().contiguous(), fmt.element)
        out = slice(here - start, here - start + len(rows))
        packed[out], scale[out] = pack_codes(found, fmt.element.bits), byte.t().to(torch.uint8)
    return packed, scale


def gptq_float_scales(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    damping: float,
    shrinkage: float,
    order: str,
    start: int,
    stop: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round rows of a weight [N, K] column by column, with the float32 scales of its tiles.

    scale: [I, J], where they are known; else they are those of "hessian".
    """
    # order "loss": columns with the largest inputs first. Blocks of the Hessian are of 32 columns,
    # which zeros fill.
    rows, columns = weight.shape
    missing = -columns % HESSIAN_BLOCK
    if scale is None:
        scale = search_float_scales(weight, in_blocks(hessian), fmt, "hessian")[1]
    hessian = F.pad(hessian, (0, missing, 0, missing))
    damped = damp(hessian, damping, shrinkage, HESSIAN_BLOCK)[:columns, :columns]
    visited = torch.arange(columns, device=weight.device)
    if order == "loss":
        visited = damped.diagonal().argsort(descending=True, stable=True)
    factor = upper_factor(damped[visited][:, visited])
    feedback = (factor / factor.diagonal()).float()  # M, of the module's first lines
    codes = torch.empty((stop - start, columns), dtype=torch.uint8, device=weight.device)
    for part in bands(weight.shape, fmt, ROWS * columns):
        own = slice(max(part.start, start), min(part.stop, stop))
        if own.start < own.stop:
            steps = spread(band_of(scale, part, fmt), (part.stop - part.start, columns), fmt)
            steps = steps.expand(-1, columns) if fmt.rows else steps.expand(rows, columns)
            inside = slice(own.start - part.start, own.stop - part.start)
            x = weight[own].to(torch.float32)
            found = _round_columns(x[:, visited], steps[inside][:, visited], feedback, fmt)
            codes[own.start - start : own.stop - start, visited] = found
    return codes, band_of(scale, slice(start, stop), fmt)


def _round_columns(x: Tensor, steps: Tensor, feedback: Tensor, fmt: Format) -> Tensor:
    """Return the codes [R, K] of columns that are rounded in order, with the errors of others."""
    x, steps = x.t().contiguous(), steps.t().contiguous()  # [K, R]
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    residual = torch.zeros_like(x)
    for first in range(0, len(x), HESSIAN_BLOCK):
        here = slice(first, min(first + HESSIAN_BLOCK, len(x)))
        target = torch.addmm(x[here], feedback[:first, here].t(), residual[:first])
        for i in range(here.start, here.stop):
            added = feedback[first:i, i] @ residual[first:i]
            quotient = (target[i - first] + added) / steps[i]
            values = round_to_values_(quotient, fmt.element)
            residual[i] = x[i] - values * steps[i]
            codes[i] = round_to_codes_(values, fmt.element)
    return codes.t()


def each_alone(
    rows: Tensor, global_scale: float, blocks: Metric, fmt: Format, chooser: Chooser = REFERENCE
) -> tuple[Tensor, Tensor]:
    """Return scales int64 [J, R] and the loss [J] of blocks of rows [R, K] rounded to nearest."""
    # All other blocks stay as they are.
    x, unit = normalize(rows.to(torch.float32), global_scale, fmt, 1)
    _, byte, loss = chooser.choose(as_blocks(x, fmt.block), blocks, unit.t(), fmt, "rtn")
    return byte, (loss.double() * (unit.t().double() / global_scale) ** -2).sum(1)


def rows_together(columns: int) -> int:
    """Return how many rows are quantized together, a multiple of ROWS."""
    return max(1, _ELEMENTS // (ROWS * columns)) * ROWS


def solve(
    x: Tensor,
    unit: Tensor,
    problem: Problem,
    fmt: Format,
    codes: str,
    given: Tensor | None,
    sweeps: int,
    chooser: Chooser = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Round normalized rows x [K, N] block after block, then again for each sweep: q and scales."""
    # unit: [1, N], what scales are multiplied by. given: int64 [J, N], the scales if they are
    # fixed. Returned are q float32 [K, N] and scales int64 [J, N], in the order of the weight.
    block, solution = fmt.block, _begin(x, unit, problem, given)
    xs = [part.split(block) for part in solution.parts_of(solution.x)]
    residuals = solution.parts_of(solution.residual)
    target = x.new_empty(block * x.shape[1])
    targets = solution.parts_of(target)
    visits = [(problem.rounding, problem.effective, False)]
    if sweeps:
        assert problem.sweeping is not None and problem.whole is not None
        visits += [(problem.sweeping, problem.whole, True)] * sweeps
    # A product reads all residuals so far, for 4096 x 14336 0.3 TB with a sweep: 0.1 s at 4 TB/s.
    # Updating 128 columns at once, as GPTQ does, would read less and need more launches.
    for coefficients, metrics, revise in visits:
        for b, line in enumerate(coefficients.split(block)):
            # On the first visit the blocks after it have no residual yet.
            seen = len(x) if revise else b * block
            line = line[:, :seen]
            for own, residual, out in zip(xs, residuals, targets, strict=True):
                torch.addmm(own[b], line, residual[:seen], out=out)
            chooser.settle(target, solution, b, metrics, fmt, codes, revise)
    q = _in_order(solution.q, problem.columns, solution)
    return q, _in_order(solution.byte, problem.order, solution)


def _begin(x: Tensor, unit: Tensor, problem: Problem, given: Tensor | None) -> Solution:
    """Return nothing settled yet for normalized rows x [K, N] (`solve`)."""
    rows = x.shape[1]
    byte = torch.empty(len(problem.order) * rows, dtype=torch.int64, device=x.device)
    fixed = None if given is None else torch.empty_like(byte)
    solution = Solution(
        ROWS, unit.flatten().contiguous(), x.new_empty(x.numel()), x.new_empty(x.numel()),
        x.new_zeros(x.numel()), byte, fixed,
    )  # fmt: skip
    for start, part in zip(range(0, rows, ROWS), solution.parts_of(solution.x), strict=True):
        part.copy_(x[:, start : start + ROWS][problem.columns])
    if given is not None:
        assert fixed is not None
        for start, part in zip(range(0, rows, ROWS), solution.parts_of(fixed), strict=True):
            part.copy_(given[:, start : start + ROWS][problem.order])
    return solution


def _in_order(values: Tensor, lines: Tensor, solution: Solution) -> Tensor:
    """Return values of parts as [L, N], their lines in the order of the weight."""
    back = lines.argsort()
    return torch.cat([part[back] for part in solution.parts_of(values)], dim=1)
