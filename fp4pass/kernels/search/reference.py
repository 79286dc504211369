"""Block scale search in plain torch: naive, SSE-optimal and Hessian-optimal, in row tiles.

For a block x and a scale s the residual is r = x - RTN_s(x). The objectives are sum(r^2) and
r^T H r. A search evaluates one octave of scales first and then only those that a proved bound on
the best error so far does not exclude; the proofs are in docs/search.md.

Within a tile blocks are laid out as [n, J, R]: n elements of a block, J block columns, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.elements import scale_table
from ...core.formats import Format
from ...core.packing import empty_weight, pack_codes
from ..common.rounding import naive_scale, round_to_codes_, round_to_values_, scale_values
from .float_scales import search_float_scales
from .joint_reference import block_hessians, normalize, step_sizes

OBJECTIVES = ("naive", "sse", "hessian")

# Elements of a tile of weights and of one pass over candidates, by eval/bench/search.py: smaller
# ones spend their time in dispatch, larger ones leave the cache. They bound a search's memory.
_TILE = 1 << 19
_PASS = 1 << 19

# Relative slack on every bound: far above float32 rounding, far below the step between scales.
_SLACK = 1e-5


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


def search_ref(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with the block scales that minimize `objective`."""
    # The float64 error of each scale is within 1 + 1e-6 of the least over all scales of the format.
    # Equal errors go to the smaller scale; block columns whose Hessian is zero are searched by SSE.
    # hessian: [ceil(K / 32), 32, 32] or [K / block, block, block] for "hessian", else None.
    if not len(weight):
        return empty_weight(weight, fmt)
    if fmt.has_float_scale:
        return search_float_scales(weight, hessian, fmt, objective)
    columns = weight.shape[1]
    metric = None
    if objective == "hessian":
        assert hessian is not None
        metric = bounded_metric(hessian, columns, fmt.block)
    packed, scale = [], []
    for rows in weight.split(max(1, _TILE // columns)):
        tile = rows.to(torch.float32)
        blocks = tile.view(len(tile), -1, fmt.block).permute(2, 1, 0)
        # A copy even of one contiguous float32 row, since the blocks are divided in place.
        blocks = blocks.clone(memory_format=torch.contiguous_format)  # [n, J, R]
        if objective == "naive":
            byte = naive_scale(blocks.abs().amax(0), global_scale, fmt.element, fmt.scale)
        else:
            byte = _search_tile(blocks, global_scale, fmt, metric)
        quotient = blocks.div_(scale_values(byte, fmt.scale).mul_(global_scale))
        codes = round_to_codes_(quotient, fmt.element).permute(2, 1, 0).reshape(tile.shape)
        packed.append(pack_codes(codes, fmt.element.bits))
        scale.append(byte.t().to(torch.uint8))
    return torch.cat(packed), torch.cat(scale)


def search_stack_ref(
    weight: Tensor, global_scales: Sequence[float], fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize each weight of a stack [E, N, K] by its global scale; not by Hessians."""
    packed, scale = empty_weight(weight, fmt)
    for i, global_scale in enumerate(global_scales):
        packed[i], scale[i] = search_ref(weight[i], None, global_scale, fmt, objective)
    return packed, scale


def sse_scales(blocks: Tensor, global_scale: float, fmt: Format) -> Tensor:
    """Return the bytes int64 [J] of the scales of least squared error of finite blocks [J, n]."""
    columns = blocks.t().contiguous().unsqueeze(1)
    return _search_tile(columns, global_scale, fmt, None)[0]


def _search_tile(
    blocks: Tensor, global_scale: float, fmt: Format, metric: BoundedMetric | None
) -> Tensor:
    """Return the scale bytes int64 [J, R] of blocks float32 [n, J, R], a few at a time."""
    n, columns, rows = blocks.shape
    width = max(1, _PASS // (n * fmt.scale.octave))
    if metric is None:
        parts = blocks.flatten(1).unsqueeze(1).split(width, dim=2)
        found = [_best_scale(part, global_scale, fmt, None) for part in parts]
        return torch.cat(found, dim=1).view(columns, rows)
    step = max(1, width // rows)
    found = []
    for start in range(0, columns, step):
        own = metric.columns(start, start + step)
        parts = blocks[:, start : start + step].split(width, dim=2)
        found.append(torch.cat([_best_scale(part, global_scale, fmt, own) for part in parts], 1))
    return torch.cat(found)


def _best_scale(
    blocks: Tensor, global_scale: float, fmt: Format, metric: BoundedMetric | None
) -> Tensor:
    """Return the byte of the best scale for each of float32 blocks [n, J, R]: int64 [J, R]."""
    scale = fmt.scale
    x, unit = normalize(blocks, global_scale, fmt, 0)
    unit = unit[0]
    amax = x.abs().amax(0)
    ascending = scale_table(scale, x.device)[1 : scale.last + 1]

    # Above `top` half of every scale is a scale and no worse (Element.halving_reach).
    limit = amax * (2 / fmt.element.halving_reach * (1 + _SLACK)) / unit
    top = torch.bucketize(limit, ascending).clamp_(scale.halving_from - 1, scale.last)
    steps = torch.arange(1 - scale.octave, 1, device=x.device).view(-1, 1)
    window = (top.unsqueeze(1) + steps).clamp_(min=1)  # [J, octave, R], ascending
    error = _window_errors(x, window, unit, fmt, metric)
    least, at = error.min(1)

    if metric is None:
        # A scale below (amax - sqrt(E)) / max loses E by clipping amax alone.
        low, high = (amax - least.sqrt() * (1 + _SLACK)) / fmt.element.max, None
    else:
        low, high, delta = hessian_interval(x, least, fmt, metric)
    first = torch.bucketize(low * (1 - _SLACK) / unit, ascending) + 1
    below = (window[:, 0] - first).clamp_(min=0)
    if high is None:
        above = torch.zeros_like(below)
    else:
        last = torch.bucketize(high * (1 + _SLACK) / unit, ascending, right=True)
        above = (last - top).clamp_(min=0)

    index, byte = _pairs_outside(first, below, top, above)
    rest = _pair_errors(x, index, byte, unit, fmt, metric)
    if metric is None:
        index = torch.cat((torch.arange(top.numel(), device=x.device), index))
        byte = torch.cat((window.gather(1, at.unsqueeze(1)).flatten(), byte))
        return _least(torch.cat((least.flatten(), rest)), byte, index, top.shape)

    # Decide in float64 between all candidates that float32 errors cannot tell apart. The blocks
    # themselves: normalized, small elements are zero, and small scales 2^-100 (docs/search.md).
    least = least.flatten().scatter_reduce(0, index, rest, "amin").view(top.shape)
    bound = (least.sqrt() + delta).square() + metric.negative * x.square().sum(0)
    j, k, r = _within(error, delta.unsqueeze(1), bound.unsqueeze(1)).nonzero(as_tuple=True)
    near = _within(rest, delta.flatten()[index], bound.flatten()[index])
    byte = torch.cat((window[j, k, r], byte[near]))
    index, order = torch.cat((j * top.shape[1] + r, index[near])).sort()
    byte = byte[order]
    unit = torch.full_like(unit, global_scale)
    exact = _pair_errors(blocks, index, byte, unit, fmt, metric, exact=True)
    return torch.where(amax == 0, 1, _least(exact, byte, index, top.shape))


def _pairs_outside(
    first: Tensor, below: Tensor, top: Tensor, above: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the candidates outside the window as pairs of a block, ascending, and a byte: [P]."""
    # They are `below` bytes from `first` on and `above` bytes behind `top`, all [J, R].
    count = (below + above).flatten()
    blocks = torch.arange(count.numel(), device=count.device)
    index = blocks.repeat_interleave(count)
    offset = torch.arange(len(index), device=count.device) - (count.cumsum(0) - count)[index]
    past = offset - below.flatten()[index]
    byte = torch.where(past < 0, first.flatten()[index] + offset, top.flatten()[index] + 1 + past)
    return index, byte


def _within(error: Tensor, delta: Tensor, bound: Tensor) -> Tensor:
    """Return where the error may be as small as `bound`, its root being known to within delta."""
    return (error.sqrt() - delta).clamp_(min=0).square_() <= bound


def _residual(x: Tensor, byte: Tensor, unit: Tensor, fmt: Format, exact: bool = False) -> Tensor:
    """Return x - RTN(x) of blocks x [n, ...] at scale bytes that broadcast to them."""
    # In float32, of normalized blocks, or in float64 of any if `exact`; rounded once.
    scale = scale_values(byte, fmt.scale).mul_(unit) if exact else step_sizes(byte, unit, fmt)
    values = round_to_values_(x / scale, fmt.element)
    if exact:
        # An infinite scale rounds all to zero, and zero times infinity is not a number.
        finite = scale.double().clamp_(max=2.0**128)
        return torch.addcmul(x.double(), values.double(), finite, value=-1)
    return torch.addcmul(x, values, scale, value=-1, out=values)


def _tree_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over 2^k elements, rounded k times: blocks up to 32 stay within 1e-6."""
    while x.shape[dim] > 1:
        low, high = x.chunk(2, dim)
        x = low + high
    return x.squeeze(dim)


def _window_errors(
    x: Tensor, byte: Tensor, unit: Tensor, fmt: Format, metric: BoundedMetric | None
) -> Tensor:
    """Return float32 errors [J, W, R] of blocks x [n, J, R] at scale bytes [J, W, R]."""
    residual = _residual(x.unsqueeze(2), byte, unit.unsqueeze(1), fmt)  # [n, J, W, R]
    if metric is None:
        return _tree_sum(residual.square_(), 0)
    weighted = metric.factor @ residual.flatten(2).transpose(0, 1)  # [J, n, W * R]
    return _tree_sum(weighted.square_(), 1).view(byte.shape)


def _pair_errors(
    x: Tensor,
    index: Tensor,
    byte: Tensor,
    unit: Tensor,
    fmt: Format,
    metric: BoundedMetric | None,
    exact: bool = False,
) -> Tensor:
    """Return the errors [P] of the blocks `index` (ascending, into J * R) at scale bytes [P]."""
    # In float32, or in float64 with the Hessian itself if `exact`.
    n, columns, rows = x.shape
    flat, unit = x.flatten(1), unit.flatten()
    found = [x.new_empty(0, dtype=torch.float64 if exact else torch.float32)]
    for i, b in zip(index.split(_PASS // n), byte.split(_PASS // n), strict=True):
        block = flat.index_select(1, i)
        residual = _residual(block, b, unit.index_select(0, i), fmt, exact)
        if metric is None:
            found.append(_tree_sum(residual.square_(), 0))
            continue
        sizes = (i // rows).bincount(minlength=columns).tolist()
        matrices = metric.hessian if exact else metric.factor
        groups = zip(matrices, residual.split(sizes, dim=1), strict=True)
        weighted = torch.cat([matrix @ group for matrix, group in groups], dim=1)
        found.append(_tree_sum(weighted.mul_(residual if exact else weighted), 0))
    return torch.cat(found)


def _least(error: Tensor, byte: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Return the byte of least error among each block's pairs, of equal ones the smaller."""
    least = error.new_full((shape.numel(),), torch.inf).scatter_reduce_(0, index, error, "amin")
    tied = error == least[index]
    best = byte.new_full((shape.numel(),), 1 << 8)
    return best.scatter_reduce_(0, index[tied], byte[tied], "amin").view(shape)


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
    """Return the scales that can beat an error, before _SLACK: low, high and delta [J, R]."""
    # x: normalized [n, J, R]; least: [J, R], the error to beat; delta bounds the rounding of the
    # square root of an error. No |r_i| may exceed reach_i, neither by clipping nor by rounding to
    # zero, nor may all of x be clipped (docs/search.md).
    n = len(x)
    square = x.square().sum(0)
    delta = (n + 8) * 2.0**-24 * (metric.trace * square).sqrt()
    root = least.sqrt() + delta
    bound = root.square() + metric.ridge * square
    reach = (
        (bound * metric.inverse_diagonal.t().contiguous().unsqueeze(-1)).sqrt_().mul_(1 + _SLACK)
    )  # [n, J, R]
    magnitude = x.abs()
    clipped = (magnitude - reach).amax(0) / fmt.element.max
    weight = (metric.factor @ x.transpose(0, 1)).square_().sum(1).sqrt_() - delta
    # Such an error by F exceeds that by H by what is negative in H.
    most = (root.square() + metric.negative * square).sqrt()
    vanished = (weight - most) / ((n * metric.trace).sqrt() * fmt.element.max)
    kept = torch.where(magnitude > reach, magnitude, magnitude.amax(0) * 2)
    return torch.maximum(clipped, vanished), kept.amin(0) / fmt.element.dead_zone, delta
