"""Block scale search in plain torch: naive, SSE-optimal and Hessian-optimal, in row tiles.

For a block x and a scale s the residual is r = x - RTN_s(x). The objectives are sum(r^2) and
r^T H r. A search evaluates one octave of scales first and then only those that a proved bound on
the best error so far does not exclude; the proofs are in docs/search.md.

Within a tile blocks are laid out as [n, J, R]: n elements of a block, J block columns, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.elements import scale_table
from ...core.formats import Format
from ...core.quant_state import empty_blocks, pack_codes
from ..common.rounding import naive_scale, round_to_codes_, round_to_values_, scale_values
from .blocks import normalize, step_sizes
from .bounds import SLACK, BoundedMetric, bounded_metric, hessian_interval

OBJECTIVES = ("naive", "sse", "hessian")

# Elements of a tile of weights and of one pass over candidates, by eval/bench_search.py: smaller
# ones spend their time in dispatch, larger ones leave the cache. They bound a search's memory.
_TILE = 1 << 19
_PASS = 1 << 19


def search_ref(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: Format, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with the block scales that minimize `objective`."""
    # The float64 error of each scale is within 1 + 1e-6 of the least over all scales of the format.
    # Equal errors go to the smaller scale; block columns whose Hessian is zero are searched by SSE.
    # hessian: [ceil(K / 32), 32, 32] or [K / block, block, block] for "hessian", else None.
    rows, columns = weight.shape
    packed, scale = empty_blocks(weight, fmt)
    metric = None
    if objective == "hessian":
        assert hessian is not None
        metric = bounded_metric(hessian, columns, fmt.block)
    step = max(1, _TILE // columns)
    for start in range(0, rows, step):
        tile = weight[start : start + step].to(torch.float32)
        blocks = tile.view(len(tile), -1, fmt.block).permute(2, 1, 0)
        # A copy even of one contiguous float32 row, since the blocks are divided in place.
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
    x: Tensor, global_scale: float, fmt: Format, metric: BoundedMetric | None
) -> Tensor:
    """Return the byte of the best scale for each block of x float32 [n, J, R]: int64 [J, R]."""
    scale = fmt.scale
    x, unit = normalize(x, global_scale, fmt, 0)
    unit = unit[0]
    amax = x.abs().amax(0)
    ascending = scale_table(scale, x.device)[1 : scale.last + 1]

    # Above `top` half of every scale is a scale and no worse (Element.halving_reach).
    limit = amax * (2 / fmt.element.halving_reach * (1 + SLACK)) / unit
    top = torch.bucketize(limit, ascending).clamp_(scale.halving_from - 1, scale.last)
    steps = torch.arange(1 - scale.octave, 1, device=x.device).view(-1, 1)
    window = (top.unsqueeze(1) + steps).clamp_(min=1)  # [J, octave, R], ascending
    error = _window_errors(x, window, unit, fmt, metric)
    least, at = error.min(1)

    if metric is None:
        # A scale below (amax - sqrt(E)) / max loses E by clipping amax alone.
        low, high = (amax - least.sqrt() * (1 + SLACK)) / fmt.element.max, None
    else:
        low, high, delta = hessian_interval(x, least, fmt, metric)
    first = torch.bucketize(low * (1 - SLACK) / unit, ascending) + 1
    below = (window[:, 0] - first).clamp_(min=0)
    if high is None:
        above = torch.zeros_like(below)
    else:
        last = torch.bucketize(high * (1 + SLACK) / unit, ascending, right=True)
        above = (last - top).clamp_(min=0)

    index, byte = _pairs_outside(first, below, top, above)
    rest = _pair_errors(x, index, byte, unit, fmt, metric)
    if metric is None:
        index = torch.cat((torch.arange(top.numel(), device=x.device), index))
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
    """Return x - RTN(x) of normalized blocks x [n, ...] at scale bytes that broadcast to them."""
    # In float32, rounded once, or in float64 without rounding if `exact`.
    scale = step_sizes(byte, unit, fmt)
    values = round_to_values_(x / scale, fmt.element)
    if exact:
        return torch.addcmul(x.double(), values.double(), scale.double(), value=-1)
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
