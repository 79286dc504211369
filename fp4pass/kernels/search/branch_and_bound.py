"""Find and prove the best scale and codes of a block, by branch and bound over the closest vectors.

For a block x with the metric H = G G^T, G upper triangular, and residuals r = x - q,

    r^T H r = sum over i of (G_ii (r_i + sum_{j < i} r_j G_ji / G_ii))^2,

whose first k terms depend on the first k codes alone. The tree of codes is searched depth first,
the nearest values first (Schnorr and Euchner 1994), and a node is left as soon as its sum reaches
the best loss found. Above the codes the tree branches into scales, least bound first. The bounds
and their proofs are in docs/codes.md.

All blocks step through their own trees together, one node each, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.elements import scale_table
from ...core.formats import Format
from ...core.packing import pack_codes, unpack_codes
from ..common.rounding import round_to_codes_
from . import joint_reference

# Losses this close are equal: above the rounding of float64, below any difference that matters.
_TOLERANCE = 1e-9

# Elements of the table of children of a search, which bounds its memory.
_CHILDREN = 1 << 23

# Blocks of a weight that are searched together.
_BLOCKS = 1 << 18

# Steps between checks of which blocks are done.
_LOOK = 32


def prove(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Improve a quantized weight [N, K] until nothing is better, and bound what is not proved."""
    # hessian: [ceil(K / 32), 32, 32]; eigenvalues count as blocks.regular makes them. budget: nodes
    # to visit for each block. Returns codes, scale bits, and float64 [N, K / block] each the loss
    # r^T H r and a bound: no scale and codes lose less.
    metric, size = joint_reference.regular(
        joint_reference.block_hessians(hessian, weight.shape[1], fmt.block)
    )
    codes, scale = unpack_codes(packed, fmt.element.bits), scale.clone()
    loss = torch.empty(scale.shape, dtype=torch.float64, device=weight.device)
    bound = torch.empty_like(loss)
    for start in range(0, len(weight), max(1, _BLOCKS // len(metric))):
        here = slice(start, start + max(1, _BLOCKS // len(metric)))
        x = joint_reference.as_blocks(weight[here].to(torch.float32), fmt.block)
        old, byte = joint_reference.as_blocks(codes[here], fmt.block), scale[here].t().long()
        known = joint_reference.losses(
            x.double() - joint_reference.dequantized(old, byte, global_scale, fmt), metric
        )
        x, unit = joint_reference.normalize(x, global_scale, fmt, 1)
        unit = unit[:, 0]
        back = (global_scale / unit.double()).square()
        which = torch.arange(len(metric), device=x.device).unsqueeze(1).expand_as(byte)
        flat = (unit.flatten(), (known / back).flatten(), fmt, budget)
        found = closest_vectors(x.double().mT.flatten(0, 1), metric, which.flatten(), *flat)
        better = found.improved.view_as(byte)
        byte = torch.where(better, found.byte.view_as(byte), byte)
        values = found.values.view(*byte.shape, -1).mT
        # A zero keeps the sign of its element.
        values = torch.where(values == 0, torch.zeros_like(x).copysign(x), values.float())
        new = round_to_codes_(values.contiguous(), fmt.element)
        codes[here] = joint_reference.from_blocks(torch.where(better.unsqueeze(1), new, old))
        scale[here] = byte.t().to(torch.uint8)
        back = torch.where(size > 0, size, 1.0) * back
        loss[here] = (found.loss.view_as(byte) * back).t()
        bound[here] = (found.bound.view_as(byte) * back).t()
    return pack_codes(codes, fmt.element.bits), scale, loss, bound


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a search for B blocks."""

    improved: Tensor  # bool [B], whether something better than the given loss was found
    byte: Tensor  # int64 [B], the scale where it was
    values: Tensor  # float64 [B, n], the elements where it was
    loss: Tensor  # float64 [B], the least found
    bound: Tensor  # float64 [B], no scale and codes lose less; `loss` where that is proved


def closest_vectors(
    x: Tensor, hessian: Tensor, which: Tensor, unit: Tensor, loss: Tensor, fmt: Format, budget: int
) -> Found:
    """Search the scales and codes of blocks x [B, n] of magnitude 1 for a loss below `loss` [B]."""
    # hessian: float64 [J, n, n], positive definite; which: int64 [B], that of each block. unit:
    # [B], what scales are multiplied by. budget: nodes to visit for each block.
    metrics, grid, found = _Metrics.of(hessian), _values(fmt, x), []
    width = max(1, _CHILDREN // (hessian.shape[-1] * len(grid)))
    parts = (each.split(width) for each in (x, which, unit, loss))
    for rows, metric, units, known in zip(*parts, strict=True):
        state = _State(rows, metric, units, known, metrics, fmt)
        best, bound = known.clone(), torch.zeros_like(known)
        byte, values = torch.zeros_like(metric), torch.zeros_like(rows, dtype=torch.int64)
        for done in range(0, budget, _LOOK):
            for _ in range(min(_LOOK, budget - done)):
                state.advance()
            block = state.block
            lowest = torch.minimum(state.bound(), state.best)
            proved = lowest >= state.best * (1 - _TOLERANCE)
            best[block], byte[block], values[block] = state.best, state.byte, state.values
            bound[block] = torch.where(proved, state.best, lowest)
            if proved.all():
                break
            state.keep(~proved)
        chosen = torch.empty_like(rows).scatter_(1, metrics.order[metric], grid[values])
        found.append((byte > 0, byte, chosen, best, bound))
    return Found(*map(torch.cat, zip(*found, strict=True)))


@dataclass(frozen=True, eq=False)
class _Metrics:
    """J metrics, with their elements in the order of the search."""

    order: Tensor  # int64 [J, n]
    hessian: Tensor  # [J, n, n]
    coefficients: Tensor  # [J, n, n], G_ji / G_ii for i the row
    weights: Tensor  # [J, n], G_ii^2
    inverse_diagonal: Tensor  # [J, n], of H^-1

    @staticmethod
    def of(hessian: Tensor) -> _Metrics:
        """Factor Hessians [J, n, n] in the order of the search."""
        order = _search_order(hessian)
        index = order.unsqueeze(2).expand(-1, -1, hessian.shape[-1])
        ordered = hessian.gather(1, index).gather(2, index.mT)
        factor = joint_reference.upper_factor(ordered)
        diagonal = factor.diagonal(dim1=1, dim2=2)
        inverse = torch.linalg.inv(ordered).diagonal(dim1=1, dim2=2)
        coefficients = (factor / diagonal.unsqueeze(1)).mT.tril(-1)
        return _Metrics(order, ordered, coefficients, diagonal.square(), inverse)


def _search_order(hessian: Tensor) -> Tensor:
    """Return the order of the elements [J, n] in which the terms that decide most come first."""
    # Each is the one whose term weighs most among those left, with those after it free.
    inverse = torch.linalg.inv(hessian)
    left = torch.ones_like(inverse[:, 0], dtype=torch.bool)
    order = []
    for _ in range(hessian.shape[-1]):
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        first = torch.where(left, diagonal, torch.inf).argmin(1, keepdim=True)
        order.append(first)
        left = left.scatter(1, first, False)
        # The inverse of the rest of H once this element is fixed (a Schur complement).
        row = inverse.gather(1, first.unsqueeze(2).expand(-1, -1, inverse.shape[2]))
        inverse = inverse - row.mT * row / diagonal.gather(1, first).unsqueeze(2)
    return torch.cat(order, 1)


def _values(fmt: Format, like: Tensor) -> Tensor:
    """Return the values of an element, float64, ascending."""
    magnitudes = torch.tensor(fmt.element.magnitudes, dtype=torch.float64, device=like.device)
    return torch.cat((-magnitudes[1:].flip(0), magnitudes))


def _scale_bounds(
    x: Tensor, step: Tensor, metrics: _Metrics, which: Tensor, values: Tensor
) -> Tensor:
    """Return a lower bound float64 [B, S] on the loss of x [B, n] at step sizes [B, S]."""
    inverse_diagonal = metrics.inverse_diagonal[which]
    # By the metric element i alone has length sqrt(H_ii), and q at most the sum of those.
    own = metrics.hessian.diagonal(dim1=1, dim2=2).sqrt().sum(1)[which]
    length = ((metrics.hessian[which] @ x.unsqueeze(2))[:, :, 0] * x).sum(1).clamp(min=0).sqrt()
    most = values[-1] * step * own.unsqueeze(1)
    bound = (length.unsqueeze(1) - most).clamp(min=0).square()
    middles = (values[1:] + values[:-1]) / 2
    for i in range(x.shape[1]):
        quotient = x[:, i : i + 1] / step
        nearest = values[torch.bucketize(quotient, middles)]
        distance = x[:, i : i + 1] - nearest * step
        bound = torch.maximum(bound, distance.square() / inverse_diagonal[:, i : i + 1])
    return bound


class _State:
    """The blocks that are not done yet: every tensor in `rows` has a row for each."""

    def __init__(
        self, x: Tensor, which: Tensor, unit: Tensor, loss: Tensor, metrics: _Metrics, fmt: Format
    ) -> None:
        count, n = x.shape
        self.levels = torch.arange(n, device=x.device)
        self.grid = _values(fmt, x)
        order = metrics.order[which]
        table = scale_table(fmt.scale, x.device)[1 : fmt.scale.last + 1].double()
        step = unit.double().unsqueeze(1) * table
        self.rows: dict[str, Tensor] = {
            "block": torch.arange(count, device=x.device),
            "x": x.gather(1, order),
            "coefficients": metrics.coefficients[which],
            "weights": metrics.weights[which],
            "step": step,
            "best": loss.clone(),
            # Level -1 chooses a scale, level i the i-th element.
            "level": torch.full((count,), -1, device=x.device),
            "next": torch.zeros(count, dtype=torch.int64, device=x.device),
            "scale": torch.zeros(count, dtype=torch.int64, device=x.device),
            "residual": torch.zeros_like(x),
            "chosen": torch.zeros_like(x, dtype=torch.int64),
            "sum": torch.zeros_like(x),
            "children": x.new_full((count, n, len(self.grid)), torch.inf),
            "values": torch.zeros_like(x, dtype=torch.int64),
            "byte": torch.zeros(count, dtype=torch.int64, device=x.device),
        }
        bounds = _scale_bounds(self.rows["x"], step, metrics, which, self.grid)
        # Past the last scale there is nothing.
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=torch.inf)
        self.rows["bounds"], self.rows["scales"] = bounds.sort(1)

    def __getattr__(self, name: str) -> Tensor:
        return self.rows[name]

    def keep(self, which: Tensor) -> None:
        """Drop all other blocks."""
        self.rows = {name: row[which] for name, row in self.rows.items()}

    def bound(self) -> Tensor:
        """Return a lower bound [B] on the loss of everything not visited yet."""
        open_ = (self.sum.unsqueeze(2) + self.children).amin(2)
        below = self.levels <= self.level.unsqueeze(1)
        open_ = torch.where(below, open_, torch.inf).amin(1)
        return torch.minimum(open_, self.bounds.gather(1, self.next.unsqueeze(1))[:, 0])

    def advance(self) -> None:
        """Visit one node of every block."""
        at = torch.arange(len(self.level), device=self.level.device)
        top, level = self.level < 0, self.level.clamp(min=0)
        least, child = self.children[at, level].min(1)
        total = self.sum[at, level] + least
        bound = self.bounds.gather(1, self.next.unsqueeze(1))[:, 0]
        limit = self.best * (1 - _TOLERANCE)
        open_ = torch.where(top, bound, total) < limit

        # A scale that may be better, and the first element of it.
        begin = top & open_
        scale = self.scales.gather(1, self.next.unsqueeze(1))[:, 0]
        self.rows["scale"] = torch.where(begin, scale, self.scale)
        self.rows["next"] = self.next + begin
        size = self.step.gather(1, self.scale.clamp(max=self.step.shape[1] - 1).unsqueeze(1))[:, 0]

        # A child, which is not visited again.
        take = open_ & ~top
        residual = self.x[at, level] - self.grid[child] * size
        self.residual[at, level] = torch.where(take, residual, self.residual[at, level])
        self.chosen[at, level] = torch.where(take, child, self.chosen[at, level])
        self.children[at, level, child] = torch.where(take, torch.inf, least)
        last = self.levels[-1]
        leaf = take & (level == last)
        self.rows["best"] = torch.where(leaf, total, self.best)
        self.rows["byte"] = torch.where(leaf, self.scale + 1, self.byte)
        self.rows["values"] = torch.where(leaf.unsqueeze(1), self.chosen, self.values)

        # Its own children, which are those of the first element below a scale.
        down = begin | (take & ~leaf)
        deeper = torch.where(top, 0, level + 1).clamp(max=last)
        inside = self.levels < deeper.unsqueeze(1)
        known = (self.coefficients[at, deeper] * self.residual * inside).sum(1)
        target = self.x[at, deeper] + known
        distance = target.unsqueeze(1) - self.grid * size.unsqueeze(1)
        costs = self.weights[at, deeper].unsqueeze(1) * distance.square()
        self.sum[at, deeper] = torch.where(down, torch.where(top, 0.0, total), self.sum[at, deeper])
        self.children[at, deeper] = torch.where(down.unsqueeze(1), costs, self.children[at, deeper])
        back = ~open_ & ~top
        self.rows["level"] = torch.where(down, deeper, self.level - back.long())
