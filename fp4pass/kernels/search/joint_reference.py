"""The scale and the codes of a block together, and GPTQ, which chooses them block after block.

A block x with a positive definite metric H becomes q, elements times a scale, with a small
r^T H r, r = x - q. Either way an element rounds q_i to nearest x_i + sum_j c_ij r_j: sequential
rounding takes the residuals before it, by the factor of H; coordinate descent takes all others, by
H itself. docs/codes.md has the proofs.

For GPTQ the Hessian H of all inputs is M D M^T, M upper triangular in blocks with ones on the
diagonal and D block diagonal. The loss of a row, (w - q) H (w - q)^T, is then the sum over blocks
of r^T D_b r with r = t - q_b and t = w_b + sum_{a < b} (w_a - q_a) M_ab: the target of block b
given the errors before it; D_b weighs its own, given that later blocks will compensate for it. That
is exact OBS in blocks. A sweep visits all blocks again, each with all others fixed.

Blocks are laid out as [J, n, R]: J block columns with a metric each, n elements, R rows; every
step over the elements is a contiguous pass. All rows and candidate scales advance together, and no
value is read back, so a CUDA graph can hold it all. GPTQ has [K, N] likewise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.elements import Scale, element_table, scale_table
from ...core.formats import Format
from ...core.packing import empty_weight, pack_codes, unpack_codes
from ...errors import CalibrationError, ShapeError, expected
from ..common.rounding import (
    float_exponent,
    power_of_two,
    round_to_codes_,
    round_to_values_,
    scale_values,
)
from ..statistics.naive import diagonal_blocks

# A second pass still lowers the loss by 0.2 %, a third by less than 0.01 %.
PASSES = 2

# Elements of all candidates in one pass. They bound the memory.
_PASS = 1 << 20


@dataclass(frozen=True)
class Metric:
    """The metrics H of J block columns, in float32, contiguous."""

    hessian: Tensor  # [J, n, n]
    sequential: Tensor  # [J, n, n], the c_ij of sequential rounding, i the row
    descent: Tensor  # [J, n, n], the c_ij of coordinate descent
    pivots: Tensor  # [J, n], weights of (r_i + sum_j c_ij r_j)^2 of sequential rounding in the loss

    def __getitem__(self, part: slice) -> Metric:
        """Return the metrics of some of the block columns."""
        return Metric(*(each[part] for each in vars(self).values()))


@dataclass(frozen=True)
class Solution:
    """Rows of a weight, quantized block after block, flat in parts of [K, R] or [J, R]."""

    part: int  # the rows of a part; the last part may have fewer
    unit: Tensor  # [N], what scales are multiplied by
    x: Tensor  # [K * N], the normalized weight
    q: Tensor  # [K * N], its quantized values
    residual: Tensor  # [K * N], x - q
    byte: Tensor  # int64 [J * N], the scales

    def parts_of(self, values: Tensor) -> list[Tensor]:
        """Return the parts [L, R] of flat values [L * N]."""
        rows = len(self.unit)
        lines = len(values) // rows
        return [part.view(lines, -1) for part in values.split(self.part * lines)]


@dataclass(frozen=True)
class Chooser:
    """The two choices of scales and codes: those of PyTorch below, or their Triton kernel."""

    choose: Callable[..., tuple[Tensor, Tensor, Tensor]]
    settle: Callable[..., None]


def make_metric(hessian: Tensor) -> Metric:
    """Return the metrics of positive definite Hessians float64 [J, n, n]."""
    # With H = G G^T the loss is the sum over j of (G_jj (r_j + sum_{i<j} r_i G_ij / G_jj))^2.
    factor = upper_factor(hessian)
    diagonal = factor.diagonal(dim1=1, dim2=2)
    sequential = (factor / diagonal.unsqueeze(1)).mT.tril(-1)
    descent = hessian / hessian.diagonal(dim1=1, dim2=2).unsqueeze(2)
    descent = descent - torch.diag_embed(descent.diagonal(dim1=1, dim2=2))
    parts = (hessian, sequential, descent, diagonal.square())
    return Metric(*(each.float().contiguous() for each in parts))


def candidate_scales(x: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """Return the candidate scales of normalized blocks [J, n, R]: int64 [J, C, R], ascending."""
    # They are the octave that holds the best one by squared error, half an octave below it and half
    # above (docs/codes.md). unit broadcasts to [J, R].
    scale = fmt.scale
    ascending = scale_table(scale, x.device)[1 : scale.last + 1]
    limit = x.abs().amax(1) * (2 / fmt.element.halving_reach) / unit
    top = torch.bucketize(limit, ascending).clamp_(1, scale.last)
    steps = torch.arange(*candidate_steps(scale), device=x.device).view(-1, 1)
    return (top.unsqueeze(1) + steps).clamp_(1, scale.last)


def candidate_steps(scale: Scale) -> tuple[int, int]:
    """Return the first candidate byte and the one past the last, from the end of the octave."""
    half = max(2, scale.octave // 2)
    return -scale.octave - half, half + 1


def choose_blocks(
    x: Tensor, metric: Metric, unit: Tensor, fmt: Format, joint: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize normalized blocks [J, n, R] to a small r^T H r: q, scales and losses [J, R]."""
    # unit: what scales are multiplied by, broadcasting to [J, R]. joint: not rounded to nearest.
    rows = x.shape[2]
    unit = unit.expand(len(x), rows)
    wide = max(1, _PASS // (2 * fmt.scale.octave * x[0].numel()))
    if len(x) > wide:
        every = (slice(start, start + wide) for start in range(0, len(x), wide))
        parts = [choose_blocks(x[i], metric[i], unit[i], fmt, joint) for i in every]
        q, found, loss = (torch.cat(each) for each in zip(*parts, strict=True))
        return q, found, loss
    candidates = candidate_scales(x, unit, fmt)
    count = candidates.shape[1]
    step = step_sizes(candidates, unit.unsqueeze(1), fmt).flatten(1)  # [J, C * R]
    repeated = x.unsqueeze(2).expand(-1, -1, count, -1).flatten(2)
    if joint:
        q, residual = torch.empty_like(repeated), torch.zeros_like(repeated)
        _round_one_by_one(repeated, q, residual, metric.sequential, step, fmt)
    else:
        q = round_to_values_(repeated / step.unsqueeze(1), fmt.element).mul_(step.unsqueeze(1))
        residual = repeated - q
    loss, at = losses(residual, metric.hessian).view(-1, count, rows).min(1, keepdim=True)
    q, residual, loss = _pick(q, at), _pick(residual, at), loss[:, 0]
    byte = candidates.gather(1, at)[:, 0]
    if joint:
        lower = q.clone()
        step = step_sizes(byte, unit, fmt)
        for _ in range(PASSES):
            _round_one_by_one(x, lower, residual, metric.descent, step, fmt)
        descended = losses(residual, metric.hessian)
        # Rounding errors may have raised a loss that was the least already.
        better = descended < loss
        q, loss = torch.where(better.unsqueeze(1), lower, q), torch.minimum(descended, loss)
    return q, byte, loss


def settle(
    target: Tensor, solution: Solution, block: int, metric: Metric, fmt: Format, revise: bool
) -> None:
    """Choose scales and codes of a block column for targets [n * N] in parts, in place."""
    # revise: whether blocks keep what they have unless the new choice costs less.
    here, one = slice(block * fmt.block, (block + 1) * fmt.block), slice(block, block + 1)
    values = (target, solution.unit, solution.x, solution.q, solution.residual, solution.byte)
    parts = map(solution.parts_of, values)
    for wanted, unit, x, old, residual, scales in zip(*parts, strict=True):
        q, byte, loss = choose_blocks(wanted[None], metric[one], unit, fmt, True)
        if revise:
            better = loss < losses(wanted - old[here], metric[one].hessian)
            q, byte = torch.where(better, q, old[here]), torch.where(better, byte, scales[one])
        old[here].copy_(q[0])
        scales[one].copy_(byte)
        torch.sub(x[here], old[here], out=residual[here])


REFERENCE = Chooser(choose_blocks, settle)


def _pick(values: Tensor, at: Tensor) -> Tensor:
    """Return candidate `at` [J, 1, R] of values [J, n, C * R] for each block: [J, n, R]."""
    n, rows = values.shape[1], at.shape[2]
    index = at.unsqueeze(1).expand(-1, n, -1, -1)
    return values.unflatten(2, (-1, rows)).gather(2, index)[:, :, 0]


def _round_one_by_one(
    x: Tensor, q: Tensor, residual: Tensor, coefficients: Tensor, step: Tensor, fmt: Format
) -> None:
    """Round x_i + sum_j c_ij r_j for each i in turn; overwrites q and residual = x - q."""
    for i in range(x.shape[1]):
        target = torch.baddbmm(x[:, i : i + 1], coefficients[:, i : i + 1], residual)[:, 0]
        torch.mul(round_to_values_(target.div_(step), fmt.element), step, out=q[:, i])
        torch.sub(x[:, i], q[:, i], out=residual[:, i])


def joint_ref(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    *,
    chooser: Chooser = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Improve a quantized weight [N, K] by choosing the scale and codes of a block together."""
    # No block has a larger r^T H r than before, in float64.
    rows, columns = weight.shape
    exact = block_hessians(hessian, columns, fmt.block)
    metric = make_metric(regular(exact)[0])
    codes, scale = unpack_codes(packed, fmt.element.bits), scale.clone()
    tile = max(1, _PASS // (fmt.block * 2 * fmt.scale.octave))
    wide = max(1, tile // rows)
    for start, stop in itertools.pairwise([*range(0, len(exact), wide), len(exact)]):
        inside = slice(start * fmt.block, stop * fmt.block)
        for row in range(0, rows, tile):
            here = slice(row, row + tile)
            x = as_blocks(weight[here, inside].to(torch.float32), fmt.block)
            blocks = x.double()
            x, unit = normalize(x, global_scale, fmt, 1)
            unit = unit[:, 0]
            old, old_byte = as_blocks(codes[here, inside], fmt.block), scale[here, start:stop].t()
            q, byte, _ = chooser.choose(x, metric[start:stop], unit, fmt, True)
            found = round_to_codes_(q / step_sizes(byte, unit, fmt).unsqueeze(1), fmt.element)
            # Of the blocks themselves: small scales are 2^-100 where they are normalized.
            before, after = (
                losses(blocks - dequantized(*each, global_scale, fmt), exact[start:stop])
                for each in ((old, old_byte), (found, byte))
            )
            better = after < before
            codes[here, inside] = from_blocks(torch.where(better.unsqueeze(1), found, old))
            scale[here, start:stop] = torch.where(better, byte, old_byte).t().to(torch.uint8)
    return pack_codes(codes, fmt.element.bits), scale


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

    # Both pairs are what residuals add to a target, float32 [K, K], and the metrics of blocks.

    order: Tensor  # int64 [J], the block columns
    columns: Tensor  # int64 [K], the columns in them
    rounding: tuple[Tensor, Metric]  # M^T without its diagonal blocks and D, for the first visit
    sweeping: tuple[Tensor, Metric]  # with all other blocks fixed; the same without sweeps


def damp(hessian: Tensor, damping: float, shrinkage: float = 0.0, block: int = 1) -> Tensor:
    """Return (1 - a) H + a (its diagonal blocks) + damping * mean * I, float64 [K, K]."""
    # a is the shrinkage, mean that of H's diagonal; the result is divided by that mean. Few texts
    # determine how columns of different blocks correlate, and chance correlations would decide,
    # through the inverse, which blocks compensate for an error.
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
    # Blocks that cost all rows most are visited first; sweeps: repeated visits of all. start, stop:
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
