"""The scale and the codes of a block together: sequential rounding, then coordinate descent.

A block x with the positive definite metric H is to become q, elements times a scale, with little
r^T H r, r = x - q. Both ways to round an element i look at the residuals of others:
sequential rounding at those before it, by the factor of H; coordinate descent at all of them, by H.
Either way q_i is x_i + sum_j c_ij r_j, rounded to nearest. docs/quality.md has the proofs.

Blocks are laid out as [J, n, R]: J block columns with a metric each, n elements, R rows. All rows
and scales are worked on at once, and nothing waits for a value, as a CUDA graph wants it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.formats import Format, Scale, element_table, scale_table
from ...core.quant_state import pack_codes, unpack_codes
from ...errors import CalibrationError
from ..common.rounding import (
    float_exponent,
    power_of_two,
    round_to_codes_,
    round_to_values_,
    scale_values,
)

CODES = ("rtn", "babai", "joint")

# A second pass still lowers the loss by 0.2 %, a third by less than 0.01 %.
PASSES = 2

# Elements of all candidates worked on at a time. They bound the memory.
_PASS = 1 << 20

# Eigenvalues of a block Hessian count as at least this part of its largest.
_FLOOR = 1e-7


@dataclass(frozen=True)
class Metric:
    """The metrics H of J block columns, in float32, contiguous.

    hessian: [J, n, n]; sequential, descent: [J, n, n], the c_ij above, for i the row; pivots:
    [J, n], what (r_i + sum_j c_ij r_j)^2 of sequential rounding counts in the loss.
    """

    hessian: Tensor
    sequential: Tensor
    descent: Tensor
    pivots: Tensor

    def __getitem__(self, part: slice) -> Metric:
        """The metrics of some of the block columns."""
        return Metric(
            self.hessian[part], self.sequential[part], self.descent[part], self.pivots[part]
        )


@dataclass(frozen=True)
class Column:
    """A block column of a weight that is quantized step by step.

    x, q, residual: [n, R], what it was, is, and lacks; byte: int64 [1, R], its scales; given: those
    that it has to have, or None. All but x and given change in place.
    """

    x: Tensor
    q: Tensor
    residual: Tensor
    byte: Tensor
    given: Tensor | None


@dataclass(frozen=True)
class Chooser:
    """What chooses scales and codes: `choose_blocks` and `settle`, or kernels that do the same."""

    choose: Callable[..., tuple[Tensor, Tensor, Tensor]]
    settle: Callable[..., None]


def upper_factor(hessian: Tensor) -> Tensor:
    """G, upper triangular, with G G^T = H: both [..., K, K]. Raises CalibrationError."""
    factor, failed = torch.linalg.cholesky_ex(hessian.flip(-1, -2))
    if failed.any():
        raise CalibrationError(
            "The Hessian has negative eigenvalues, which sums of x x^T have not. Calibrate again, "
            "or raise the damping."
        )
    return factor.flip(-1, -2)


def make_metric(hessian: Tensor) -> Metric:
    """The metrics of positive definite float64 [J, n, n].

    With H = G G^T the loss is the sum over j of (G_jj (r_j + sum_{i<j} r_i G_ij / G_jj))^2.
    """
    factor = upper_factor(hessian)
    diagonal = factor.diagonal(dim1=1, dim2=2)
    sequential = (factor / diagonal.unsqueeze(1)).mT.tril(-1)
    descent = hessian / hessian.diagonal(dim1=1, dim2=2).unsqueeze(2)
    descent = descent - torch.diag_embed(descent.diagonal(dim1=1, dim2=2))
    parts = (hessian, sequential, descent, diagonal.square())
    return Metric(*(each.float().contiguous() for each in parts))


def normalize(x: Tensor, global_scale: float, fmt: Format, dim: int) -> tuple[Tensor, Tensor]:
    """Multiply x, float32, by powers of two that bring its amax along `dim` to [1, 2).

    Returns it and what scales of the format are to be multiplied by, [..., 1, ...]. Blocks 2^60
    below the smallest scale are zero at every scale and stay smaller than 1.
    """
    low = -126
    if fmt.has_global_scale:
        low = max(low, math.frexp(global_scale * fmt.scale.min)[1] - 60)
    shift = power_of_two(-float_exponent(x.abs().amax(dim, keepdim=True)).clamp_(low, 126))
    return x * shift, shift * global_scale


def candidate_scales(x: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """The scale bytes int64 [J, C, R] worth a look for normalized blocks x [J, n, R].

    The octave in which the best one for squared errors is, another half below, and half above. Of
    trained layers that is all that matters (docs/quality.md).
    """
    scale = fmt.scale
    ascending = scale_table(scale, x.device)[1 : scale.last + 1]
    limit = x.abs().amax(1) * (2 / fmt.element.halving_reach) / unit
    top = torch.bucketize(limit, ascending).clamp_(1, scale.last)
    steps = torch.arange(*candidate_steps(scale), device=x.device).view(-1, 1)
    return (top.unsqueeze(1) + steps).clamp_(1, scale.last)


def candidate_steps(scale: Scale) -> tuple[int, int]:
    """The first byte and the one behind the last, counted from the end of that octave."""
    half = max(2, scale.octave // 2)
    return -scale.octave - half, half + 1


def step_sizes(byte: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """What elements are multiplied by at scale bytes, in the units of normalized blocks.

    Beyond 2^100 all elements round to zero and below 2^-100 all saturate, as they would anyway.
    """
    return scale_values(byte, fmt.scale).mul_(unit).clamp_(2.0**-100, 2.0**100)


def dequantized(codes: Tensor, byte: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """The values float32 [J, n, R] of codes [J, n, R] at scale bytes [J, R], as blocks are."""
    table = element_table(fmt.element, codes.device)
    return table[codes.int()].mul_(step_sizes(byte, unit, fmt).unsqueeze(1))


def losses(residual: Tensor, hessian: Tensor) -> Tensor:
    """r^T H r, [J, R], of residuals [J, n, R] by metrics [J, n, n]."""
    return (hessian @ residual).mul_(residual).sum(1)


def choose_blocks(
    x: Tensor, metric: Metric, unit: Tensor, fmt: Format, codes: str, byte: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize normalized blocks x [J, n, R] to a small r^T H r.

    unit: float32, broadcasting to [J, R]; codes: of CODES; byte: int64 [J, R], the scales if they
    are given. Returns q [J, n, R], the scale bytes [J, R] and the losses [J, R].
    """
    unit = unit.expand(len(x), x.shape[2])
    wide = max(1, _PASS // (2 * fmt.scale.octave * x[0].numel()))
    parts = []
    for start in range(0, len(x), wide):
        here = slice(start, start + wide)
        given = None if byte is None else byte[here]
        parts.append(_choose_together(x[here], metric[here], unit[here], fmt, codes, given))
    if len(parts) == 1:
        return parts[0]
    q, bytes_, loss = (torch.cat(each) for each in zip(*parts, strict=True))
    return q, bytes_, loss


def _choose_together(
    x: Tensor, metric: Metric, unit: Tensor, fmt: Format, codes: str, byte: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`choose_blocks`, for unit [J, R]."""
    rows = x.shape[2]
    candidates = candidate_scales(x, unit, fmt) if byte is None else byte.unsqueeze(1)
    count = candidates.shape[1]
    step = step_sizes(candidates, unit.unsqueeze(1), fmt).flatten(1)  # [J, C * R]
    repeated = x.unsqueeze(2).expand(-1, -1, count, -1).flatten(2)
    if codes == "rtn":
        q = round_to_values_(repeated / step.unsqueeze(1), fmt.element).mul_(step.unsqueeze(1))
        residual = repeated - q
    else:
        q, residual = torch.empty_like(repeated), torch.zeros_like(repeated)
        _round_one_by_one(repeated, q, residual, metric.sequential, step, fmt)
    loss, at = losses(residual, metric.hessian).view(-1, count, rows).min(1, keepdim=True)
    q, residual, loss = _pick(q, at), _pick(residual, at), loss[:, 0]
    byte = candidates.gather(1, at)[:, 0]
    if codes == "joint":
        lower = q.clone()
        step = step_sizes(byte, unit, fmt)
        for _ in range(PASSES):
            _round_one_by_one(x, lower, residual, metric.descent, step, fmt)
        descended = losses(residual, metric.hessian)
        # Rounding may have raised what is the least already.
        better = descended < loss
        q, loss = torch.where(better.unsqueeze(1), lower, q), torch.minimum(descended, loss)
    return q, byte, loss


def settle(
    target: Tensor,
    column: Column,
    metric: Metric,
    unit: Tensor,
    fmt: Format,
    codes: str,
    revise: bool,
) -> None:
    """Choose scales and codes of one block column, in place.

    target: [n, R], what q should be; metric: its own; unit: [1, R]. Where `revise` is set, blocks
    that cost as little as they are stay so.
    """
    q, byte, loss = choose_blocks(target.unsqueeze(0), metric, unit, fmt, codes, column.given)
    if revise:
        better = loss < losses(target - column.q, metric.hessian)
        q, byte = torch.where(better, q, column.q), torch.where(better, byte, column.byte)
    column.q.copy_(q[0])
    column.byte.copy_(byte)
    torch.sub(column.x, column.q, out=column.residual)


REFERENCE = Chooser(choose_blocks, settle)


def _pick(values: Tensor, at: Tensor) -> Tensor:
    """One candidate, `at` [J, 1, R], of values [J, n, C * R] for each block: [J, n, R]."""
    n, rows = values.shape[1], at.shape[2]
    index = at.unsqueeze(1).expand(-1, n, -1, -1)
    return values.unflatten(2, (-1, rows)).gather(2, index)[:, :, 0]


def _round_one_by_one(
    x: Tensor, q: Tensor, residual: Tensor, coefficients: Tensor, step: Tensor, fmt: Format
) -> None:
    """Round x_i + sum_j c_ij r_j for each i in turn, in place of q and of residual = x - q."""
    for i in range(x.shape[1]):
        target = torch.baddbmm(x[:, i : i + 1], coefficients[:, i : i + 1], residual)[:, 0]
        torch.mul(round_to_values_(target.div_(step), fmt.element), step, out=q[:, i])
        torch.sub(x[:, i], q[:, i], out=residual[:, i])


def block_hessians(hessian: Tensor, columns: int, block: int) -> Tensor:
    """The Hessian of each block, float64 [K / block, block, block], of [ceil(K / 32), 32, 32]."""
    full = hessian.to(torch.float64)
    parts = [full[:, i : i + block, i : i + block] for i in range(0, full.shape[1], block)]
    stacked = torch.stack(parts, dim=1).flatten(0, 1)[: columns // block]
    return (stacked + stacked.mT) / 2


def regular(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Hessians [J, n, n] divided by their largest eigenvalue and made positive definite.

    Eigenvalues below 1e-7 of that, and so those that rounding left below zero, are raised to it; a
    Hessian that is zero becomes the identity. Returns them and what they were divided by, [J, 1].
    """
    values, vectors = torch.linalg.eigh(hessian)
    largest = values[:, -1:].clamp(min=0)
    values = torch.where(largest > 0, values / largest, 1.0).clamp_(min=_FLOOR)
    return (vectors * values.unsqueeze(1)) @ vectors.mT, largest


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
    """Improve a weight that is quantized already by choosing scale and codes of a block together.

    weight: [N, K] float; packed, scale: what it is now; hessian: [ceil(K / 32), 32, 32] float32.
    Returns them anew. No block has a larger r^T H r than before, in float64.
    """
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
            x, unit = normalize(x, global_scale, fmt, 1)
            unit = unit[:, 0]
            old, old_byte = as_blocks(codes[here, inside], fmt.block), scale[here, start:stop].t()
            q, byte, _ = chooser.choose(x, metric[start:stop], unit, fmt, "joint")
            before = dequantized(old, old_byte, unit, fmt)
            error = losses(x.double() - before.double(), exact[start:stop])
            better = losses(x.double() - q.double(), exact[start:stop]) < error
            found = round_to_codes_(q / step_sizes(byte, unit, fmt).unsqueeze(1), fmt.element)
            codes[here, inside] = from_blocks(torch.where(better.unsqueeze(1), found, old))
            scale[here, start:stop] = torch.where(better, byte, old_byte).t().to(torch.uint8)
    return pack_codes(codes, fmt.element.bits), scale


def as_blocks(x: Tensor, block: int) -> Tensor:
    """[R, J * n] as [J, n, R]."""
    return x.view(len(x), -1, block).permute(1, 2, 0).contiguous()


def from_blocks(x: Tensor) -> Tensor:
    """The inverse of `as_blocks`."""
    return x.permute(2, 0, 1).flatten(1)
