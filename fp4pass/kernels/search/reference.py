"""Block scale search in plain torch: naive, SSE-optimal and Hessian-optimal, in row tiles.

For a block x and a scale s the residual is r = x - RTN_s(x). The objectives are sum(r^2) and
r^T H r. A search evaluates one octave of scales first and then those, and only those, that a
proved bound on the incumbent's error does not exclude; the proofs are in docs/search.md.

Within a tile blocks are laid out as [n, B], n the elements of a block and B the blocks, so that
every step is a contiguous pass. Blocks and scales are multiplied by the same power of two, which
changes no quotient and keeps squares in range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.formats import Format, scale_table
from ...core.quant_state import pack_codes
from ...errors import ShapeError
from ..common.rounding import (
    float_exponent,
    naive_scale,
    power_of_two,
    round_to_codes_,
    round_to_values_,
    scale_values,
)

OBJECTIVES = ("naive", "sse", "hessian")

# Elements of a tile of weights and of one pass over candidates, by eval/bench_search.py: smaller
# ones spend their time in dispatch, larger ones leave the cache. They bound a search's memory.
_TILE = 1 << 19
_PASS = 1 << 19

# Relative slack on every bound: far above float32 rounding, far below the step between scales.
_SLACK = 1e-5


def search_ref(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight with the block scales that minimize `objective`.

    weight: [N, K] float, finite, read as float32; hessian: [ceil(K / 32), 32, 32] float32 for
    "hessian", or [K / block, block, block], else None.
    Returns packed [N, P] uint8 and scale bits [N, K / block] uint8.
    Each scale's float64 error is within 1 + 1e-6 of the least over all scales of the format;
    equal errors go to the smaller scale, but columns whose Hessian is zero are searched by SSE.
    """
    rows, columns = weight.shape
    packed = weight.new_empty((rows, fmt.packed_columns(columns)), dtype=torch.uint8)
    scale = weight.new_empty((rows, columns // fmt.block), dtype=torch.uint8)
    metric = None
    if objective == "hessian":
        assert hessian is not None
        metric = _block_metric(hessian, columns, fmt.block)
    step = max(1, _TILE // columns)
    for start in range(0, rows, step):
        tile = weight[start : start + step].to(torch.float32)
        blocks = tile.view(len(tile), -1, fmt.block).permute(2, 1, 0)
        # Never the weight itself, which a contiguous float32 block of one row would be.
        blocks = blocks.clone(memory_format=torch.contiguous_format)  # [n, J, R]
        if objective == "naive":
            byte = naive_scale(blocks.abs().amax(0), global_scale, fmt.element, fmt.scale)
        else:
            byte = _search_tile(blocks, global_scale, fmt, metric)
        quotient = blocks.div_(scale_values(byte, fmt.scale).mul_(global_scale))
        codes = round_to_codes_(quotient, fmt.element).permute(2, 1, 0).reshape(tile.shape)
        packed[start : start + step] = pack_codes(codes, fmt.element.bits)
        scale[start : start + step] = byte.t()
    return packed, scale


def sse_scales(blocks: Tensor, global_scale: float, fmt: Format) -> Tensor:
    """The bytes int64 [J] of the scales of least squared error for finite float32 blocks [J, n]."""
    columns = blocks.t().contiguous().unsqueeze(1)
    return _search_tile(columns, global_scale, fmt, None)[0]


def _search_tile(
    blocks: Tensor, global_scale: float, fmt: Format, metric: _Metric | None
) -> Tensor:
    """The scale bytes int64 [J, R] of blocks float32 [n, J, R], a few at a time."""
    n, columns, rows = blocks.shape
    width = max(1, _PASS // (n * fmt.scale.octave))
    if metric is None:
        parts = blocks.flatten(1).unsqueeze(1).split(width, dim=2)
        found = [_best_scale(part, global_scale, fmt, None) for part in parts]
        return torch.cat(found, dim=1).view(columns, rows)
    step = max(1, width // rows)
    return torch.cat(
        [
            torch.cat(
                [
                    _best_scale(part, global_scale, fmt, metric.columns(start, start + step))
                    for part in blocks[:, start : start + step].split(width, dim=2)
                ],
                dim=1,
            )
            for start in range(0, columns, step)
        ]
    )


@dataclass(frozen=True)
class _Metric:
    """The Hessians H of J block columns, and what bounds r^T H r.

    hessian: float64 [J, n, n]; factor: float32 [J, n, n] with factor^T factor = H, up to rounding
    and to `negative`, how far the least eigenvalue lies below 0; inverse_diagonal: [n, J, 1], of
    (H + ridge I)^-1; trace: of H. The last four are float32, three of them [J, 1].
    """

    hessian: Tensor
    factor: Tensor
    inverse_diagonal: Tensor
    ridge: Tensor
    negative: Tensor
    trace: Tensor

    def columns(self, start: int, stop: int) -> _Metric:
        """The metric of some of the block columns."""
        part = slice(start, stop)
        return _Metric(
            self.hessian[part],
            self.factor[part],
            self.inverse_diagonal[:, part],
            self.ridge[part],
            self.negative[part],
            self.trace[part],
        )


def _block_metric(hessian: Tensor, columns: int, block: int) -> _Metric:
    """The metric of every block column: hessian [ceil(K / m), m, m] of whole blocks, J = K / block.

    A column whose Hessian is zero was never excited; any scale is optimal there, and the identity
    in its place makes that the SSE-optimal one.
    Raises ShapeError for a Hessian narrower than a block.
    """
    if hessian.shape[-1] % block:
        raise ShapeError(
            f"The block Hessian is of {hessian.shape[-1]} columns, which are no whole blocks of "
            f"{block}. Give that of each block, or choose a format with a smaller block."
        )
    full = hessian.to(torch.float64)
    diagonal = [full[:, i : i + block, i : i + block] for i in range(0, full.shape[1], block)]
    stacked = torch.stack(diagonal, dim=1).flatten(0, 1)[: columns // block]  # [J, n, n]
    stacked = (stacked + stacked.mT) / 2
    largest = stacked.abs().amax((1, 2), keepdim=True)
    dead = largest == 0
    stacked = torch.where(dead, torch.eye(block, dtype=torch.float64, device=full.device), stacked)
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
    return _Metric(
        stacked,
        factor.float(),
        inverse_diagonal.t().unsqueeze(-1).float(),
        ridge.float(),
        negative.float(),
        values.clamp(min=0).sum(-1, keepdim=True).float(),
    )


def _best_scale(x: Tensor, global_scale: float, fmt: Format, metric: _Metric | None) -> Tensor:
    """The byte of the best scale for each block of x float32 [n, J, R]: int64 [J, R]."""
    scale = fmt.scale
    x, unit = _normalize(x, global_scale, fmt)
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
        low, high, delta = _hessian_interval(x, least, fmt, metric)
    first = torch.bucketize(low * (1 - _SLACK) / unit, ascending) + 1
    below = (window[:, 0] - first).clamp_(min=0)
    if high is None:
        above = torch.zeros_like(below)
    else:
        last = torch.bucketize(high * (1 + _SLACK) / unit, ascending, right=True)
        above = (last - top).clamp_(min=0)

    # The candidates outside the window, as pairs of a block and a byte.
    count = (below + above).flatten()
    blocks = torch.arange(count.numel(), device=x.device)
    index = blocks.repeat_interleave(count)
    offset = torch.arange(len(index), device=x.device) - (count.cumsum(0) - count)[index]
    past = offset - below.flatten()[index]
    byte = torch.where(past < 0, first.flatten()[index] + offset, top.flatten()[index] + 1 + past)
    rest = _pair_errors(x, index, byte, unit, fmt, metric)
    if metric is None:
        index = torch.cat((blocks, index))
        byte = torch.cat((window.gather(1, at.unsqueeze(1)).flatten(), byte))
        return _least(torch.cat((least.flatten(), rest)), byte, index, top.shape)

    # Decide in float64 between all candidates that float32 errors cannot tell apart.
    least = least.flatten().scatter_reduce(0, index, rest, "amin").view(top.shape)
    bound = (least.sqrt() + delta).square() + metric.negative * x.square().sum(0)
    j, k, r = _within(error, delta.unsqueeze(1), bound.unsqueeze(1)).nonzero(as_tuple=True)
    near = _within(rest, delta.flatten()[index], bound.flatten()[index])
    byte = torch.cat((window[j, k, r], byte[near]))
    index, order = torch.cat((j * top.shape[1] + r, index[near])).sort()
    byte = byte[order]
    exact = _pair_errors(x, index, byte, unit, fmt, metric, exact=True)
    return torch.where(amax == 0, 1, _least(exact, byte, index, top.shape))


def _within(error: Tensor, delta: Tensor, bound: Tensor) -> Tensor:
    """Where the true error may be as small as `bound`, its root being known to within delta."""
    return (error.sqrt() - delta).clamp_(min=0).square_() <= bound


def _normalize(x: Tensor, global_scale: float, fmt: Format) -> tuple[Tensor, Tensor]:
    """Scale each block of x [n, J, R] by a power of two that brings its amax to [1, 2).

    Returns the blocks and `unit` [J, R], by which scales of the format are multiplied to match.
    Blocks 2^60 below the smallest scale are zero at every scale and stay smaller than 1.
    """
    low = -126
    if fmt.has_global_scale:
        low = max(low, math.frexp(global_scale * fmt.scale.min)[1] - 60)
    exponent = float_exponent(x.abs().amax(0)).clamp_(low, 126)
    shift = power_of_two(-exponent)
    return x * shift, shift * global_scale


def _residual(x: Tensor, byte: Tensor, unit: Tensor, fmt: Format, exact: bool = False) -> Tensor:
    """x - RTN(x) of normalized blocks x [n, ...] at scale bytes that broadcast against them.

    In float32, rounded once, or in float64 without rounding if `exact`.

    Beyond 2^100 all elements round to zero and below 2^-100 all saturate, as they would anyway;
    within, neither quotients nor products overflow.
    """
    scale = scale_values(byte, fmt.scale).mul_(unit).clamp_(2.0**-100, 2.0**100)
    values = round_to_values_(x / scale, fmt.element)
    if exact:
        return torch.addcmul(x.double(), values.double(), scale.double(), value=-1)
    return torch.addcmul(x, values, scale, value=-1, out=values)


def _tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension of 2^k, rounding k times: blocks up to 32 stay within 1e-6."""
    while x.shape[dim] > 1:
        low, high = x.chunk(2, dim)
        x = low + high
    return x.squeeze(dim)


def _window_errors(
    x: Tensor, byte: Tensor, unit: Tensor, fmt: Format, metric: _Metric | None
) -> Tensor:
    """Float32 errors [J, W, R] of blocks x [n, J, R] at scale bytes [J, W, R]."""
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
    metric: _Metric | None,
    exact: bool = False,
) -> Tensor:
    """Errors [P] of the blocks `index` (ascending, into J * R) at scale bytes [P].

    In float32, or in float64 with the Hessian itself if `exact`.
    """
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


def _hessian_interval(
    x: Tensor, least: Tensor, fmt: Format, metric: _Metric
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds on the scales that can beat error `least`, and delta, all float32 [J, R].

    r^T H r >= r_i^2 / ((H + e I)^-1)_ii - e |x|^2 for every i (Schur complement; |r| <= |x|), so
    no |r_i| may exceed reach_i: neither by clipping (a lower bound on s) nor by rounding to zero
    (an upper bound). Nor may all of x be clipped: with H = F^T F the quantized block weighs at
    most |F| sqrt(n) max s, the rest of |F x| is error. Where amax rounds to zero, larger scales
    change nothing. delta bounds the float32 rounding of the square root of an error.
    """
    n = len(x)
    square = x.square().sum(0)
    delta = (n + 8) * 2.0**-24 * (metric.trace * square).sqrt()
    root = least.sqrt() + delta
    bound = root.square() + metric.ridge * square
    reach = (bound * metric.inverse_diagonal).sqrt_().mul_(1 + _SLACK)  # [n, J, R]
    magnitude = x.abs()
    clipped = (magnitude - reach).amax(0) / fmt.element.max
    weight = (metric.factor @ x.transpose(0, 1)).square_().sum(1).sqrt_() - delta
    # Such an error by F exceeds that by H by what is negative in H.
    most = (root.square() + metric.negative * square).sqrt()
    vanished = (weight - most) / ((n * metric.trace).sqrt() * fmt.element.max)
    kept = torch.where(magnitude > reach, magnitude, magnitude.amax(0) * 2)
    return torch.maximum(clipped, vanished), kept.amin(0) / fmt.element.dead_zone, delta


def _least(error: Tensor, byte: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """For each block the byte of least error among the pairs, the smaller byte of equal ones."""
    least = error.new_full((shape.numel(),), torch.inf).scatter_reduce_(0, index, error, "amin")
    tied = error == least[index]
    best = byte.new_full((shape.numel(),), 1 << 8)
    return best.scatter_reduce_(0, index[tied], byte[tied], "amin").view(shape)
