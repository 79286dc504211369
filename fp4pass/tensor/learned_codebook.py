"""Element values learned from data: weighted 1-D k-means, solved exactly, and blocks in them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.formats import Element, Format, get_format
from ..errors import NonFiniteError, OptionError, ShapeError
from ..kernels.common.rounding import scale_values
from ..kernels.search.reference import search_ref
from .blocks import element_values, read_blocks, read_global_scale, require_float

_Array = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]

# Widths of codes that `pack_codes` knows.
_WIDTHS = (4, 6, 8)

# Elements of which the first turns are taken, and points of a codebook of one turn: more change
# the error of normal weights by less than 1e-4 of it.
_SAMPLE = 1 << 17
_POINTS = 1 << 13


def learn_codebook(
    x: Tensor,
    weights: Tensor | None = None,
    levels: int = 7,
    *,
    points: int = 1 << 16,
    name: str = "learned",
) -> Element:
    """The symmetric codebook of 0 and `levels` magnitudes with the least weighted squared error.

    The error is the sum of w (|x| - c)^2, c being the nearest of the magnitudes. Found by dynamic
    programming over all partitions of the distinct |x|, in float64; magnitudes are rounded to
    float32. Of more than `points` distinct |x|, neighbours are first taken together, which costs at
    most 16 max|x|^2 sum(w) / points^2 (docs/tensors.md).
    x: float, finite; weights: float, not negative, of the shape of x; levels: 1 to 127.
    Returns an Element of 4, 6 or 8 bits, with fewer magnitudes if x has fewer.
    Raises OptionError, DtypeError, ShapeError or NonFiniteError for what cannot be learned from.
    """
    bits = _width(levels)
    if points <= levels:
        raise OptionError(f"learn_codebook: points={points}; more than levels={levels} is wanted.")
    sums = _distinct(x, weights)
    if not len(sums.value):
        raise OptionError(
            "learn_codebook: x holds nothing but zeros, or has no weight elsewhere. Learn from "
            "values that differ from 0."
        )
    starts = _groups(sums, points)
    edges = starts[_partition(sums.at(starts), levels)]
    found = np.unique(_descend(sums, edges).astype(np.float32))
    magnitudes = (0.0, *(float(value) for value in found if value > 0.0))
    if len(magnitudes) < 2:
        raise OptionError("learn_codebook: x is too small for float32. Scale it before the call.")
    return Element(name, bits, magnitudes)


def _width(levels: int) -> int:
    """The bits of a code that stands for `levels` magnitudes beside 0."""
    fitting = [bits for bits in _WIDTHS if 1 <= levels < 1 << (bits - 1)]
    if not fitting:
        raise OptionError(f"A codebook of {levels} levels cannot be packed; 1 to 127 are wanted.")
    return fitting[0]


class _Sums(NamedTuple):
    """Ascending values [n], and what any run of them sums to, as prefixes float64 [n + 1]."""

    value: _Array
    weight: _Array
    first: _Array
    second: _Array

    def at(self, starts: _Indices) -> _Sums:
        """Only the prefixes at some of the places; values are those that begin there."""
        return _Sums(
            self.value[starts[:-1]], self.weight[starts], self.first[starts], self.second[starts]
        )


def _distinct(x: Tensor, weights: Tensor | None) -> _Sums:
    """The distinct |x| above 0 that have a weight, and their sums."""
    require_float("learn_codebook", "x", x)
    magnitude = x.detach().flatten().double().abs().cpu().numpy()
    if weights is None:
        weight = np.ones_like(magnitude)
    else:
        require_float("learn_codebook", "weights", weights)
        if weights.shape != x.shape:
            raise ShapeError(
                f"learn_codebook: weights have shape {tuple(weights.shape)} and x "
                f"{tuple(x.shape)}; the same is wanted."
            )
        weight = weights.detach().flatten().double().cpu().numpy()
    if not (np.isfinite(magnitude).all() and np.isfinite(weight).all()):
        raise NonFiniteError("learn_codebook: x or weights hold NaN or infinity.")
    if (weight < 0).any():
        raise OptionError("learn_codebook: weights must not be negative.")
    counted = (magnitude > 0) & (weight > 0)
    magnitude, weight = magnitude[counted], weight[counted]
    order = np.argsort(magnitude)
    magnitude, weight = magnitude[order], weight[order]
    starts = np.flatnonzero(np.diff(magnitude, prepend=-1.0))
    value = magnitude[starts]
    total = np.add.reduceat(weight, starts) if len(starts) else weight
    prefixes = (_prefix(total * value**power) for power in (0, 1, 2))
    return _Sums(value, *prefixes)


def _prefix(numbers: _Array) -> _Array:
    return np.concatenate(([0.0], np.cumsum(numbers)))


def _groups(sums: _Sums, points: int) -> _Indices:
    """Where groups of neighbouring values start, at most points + 1 of them, and their end.

    Every value is its own if there are no more than `points`. Else a group is no wider than
    2 / points of the largest value and, if it is of several, no heavier than 4 / points of all.
    """
    n = len(sums.value)
    if n <= points:
        return np.arange(n + 1)
    half = points // 2
    width = np.floor(sums.value / sums.value[-1] * half)
    middle = (sums.weight[1:] + sums.weight[:-1]) / 2
    mass = np.floor(middle / sums.weight[-1] * half)
    changed = (np.diff(width, prepend=-1.0) != 0) | (np.diff(mass, prepend=-1.0) != 0)
    return np.append(np.flatnonzero(changed), n)


def _partition(sums: _Sums, levels: int) -> _Indices:
    """The starts of the `levels` clusters of least error above that of zero, and their end."""
    # The error of the first j values if all of them become 0.
    error = sums.second
    choices = []
    for _ in range(levels):
        error, choice = _one_more_cluster(error, sums)
        choices.append(choice)
    edges = [len(sums.value)]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return np.array(edges[::-1])


def _one_more_cluster(error: _Array, sums: _Sums) -> tuple[_Array, _Indices]:
    """The least errors of the first j values with one more cluster, and where the cluster starts.

    error: those without it. The best start never falls as j grows, as the error of a cluster is a
    Monge array (Wu 1991); so a start is looked for between those of two neighbours, which are known
    for every second, fourth, ... j. All starts of one pass are at most n + their number.
    """
    n = len(sums.value)
    least, choice = np.zeros(n + 1), np.zeros(n + 1, dtype=np.int64)
    stride = 1 << n.bit_length()
    while stride := stride // 2:
        stop = np.arange(stride, n + 1, 2 * stride)
        low, above = choice[stop - stride], stop + stride
        high = np.minimum(stop, np.where(above <= n, choice[np.minimum(above, n)], n))
        count = high - low + 1
        place = np.cumsum(count) - count
        start = np.arange(count.sum()) - np.repeat(place - low, count)
        found = error[start] + _cluster_error(sums, start, np.repeat(stop, count))
        least[stop] = np.minimum.reduceat(found, place)
        best = found == np.repeat(least[stop], count)
        choice[stop] = np.minimum.reduceat(np.where(best, start, n), place)
    return least, choice


def _cluster_error(sums: _Sums, start: _Indices, stop: _Indices) -> _Array:
    """The errors of clusters of values start to stop, each at its mean; 0 for empty ones."""
    weight = sums.weight[stop] - sums.weight[start]
    first = sums.first[stop] - sums.first[start]
    spread = sums.second[stop] - sums.second[start] - first**2 / np.where(weight > 0, weight, 1.0)
    return np.maximum(spread, 0.0)


def _descend(sums: _Sums, edges: _Indices) -> _Array:
    """The means of clusters, ascending, once every value is in the nearest one (Lloyd 1982).

    Changes nothing in a best partition; one of groups it brings to the values themselves.
    """
    before = np.inf
    while True:
        edges = np.unique(edges)
        weight = np.diff(sums.weight[edges])
        means = np.diff(sums.first[edges]) / weight
        error = sums.second[edges[0]]
        error += np.diff(sums.second[edges]).sum() - (means**2 * weight).sum()
        if not error < before:
            return means
        before = error
        middles = (means + np.append(0.0, means[:-1])) / 2
        edges = np.append(np.searchsorted(sums.value, middles), len(sums.value))


class CodebookBlocks(NamedTuple):
    """Blocks in element values of their own.

    scales: float32, the shape of the weight without its block; quants: float32, signed values of
    `element`, or packed codes uint8; dequant: float32, the product of scales and values.
    """

    scales: Tensor
    quants: Tensor
    element: Element
    dequant: Tensor


def codebook_quantize(
    W: Tensor,
    dim: int = -1,
    *,
    levels: int = 7,
    fmt: str = "nvfp4",
    global_scale: float | Tensor | str | None = "auto",
    packed: bool = False,
    tolerance: float = 1e-4,
) -> CodebookBlocks:
    """Quantize blocks with a codebook that is learned from them, and its best scales.

    Starts with the elements of `fmt` and their best scales, then takes turns: the best codebook for
    the scales, the best scales for the codebook, at first on some of the blocks. No turn raises the
    squared error, so it ends no higher than that of `fmt`; the turns end when one lowers it by less
    than `tolerance` of itself.
    W: float, finite; W.shape[dim] is the block, one of those of `fmt`, whose block scales are
    used. levels: magnitudes beside 0, 7 for 4 bits, at least those of `fmt`. global_scale: as in
    fp4pass.functional, None for 1. packed: give bytes of codes in place of values.
    Raises ShapeError, DtypeError, NonFiniteError or OptionError for arguments that do not fit.
    """
    _width(levels)
    if not 0.0 < tolerance < 1.0:
        raise OptionError(f"codebook_quantize: tolerance={tolerance}; between 0 and 1 is wanted.")
    x, form = read_blocks("codebook_quantize", W, dim, get_format(fmt))
    least = len(form.element.magnitudes) - 1
    if levels < least:
        raise OptionError(
            f"codebook_quantize: levels={levels}; {fmt}, from which it starts, has {least}. Give "
            "as many or more, or a format with fewer."
        )
    given = 1.0 if global_scale is None else global_scale
    multiplier = read_global_scale("codebook_quantize", W, form, given)
    blocks = x.reshape(-1, form.block).float()  # [B, n]
    best = _Found.search(blocks, form, multiplier)
    some = _sample(blocks)
    if len(some):
        first = _take_turns(_Found.search(some, form, multiplier), levels, tolerance)
        found = _Found.search(blocks, first.format, multiplier)
        best = _take_turns(min(best, found, key=lambda f: f.error), levels, tolerance)
    quants = best.codes if packed else best.values
    return CodebookBlocks(
        best.scales.view(x.shape[:-1]),
        quants.view(*x.shape[:-1], -1).movedim(-1, dim),
        best.format.element,
        (best.values * best.scales.unsqueeze(1)).view(x.shape).movedim(-1, dim),
    )


def _sample(blocks: Tensor) -> Tensor:
    """Some of the blocks that are not zero, always the same: enough to learn a few levels from."""
    counted = blocks.any(1).nonzero().flatten()
    order = torch.randperm(len(counted), generator=torch.Generator().manual_seed(0))
    return blocks[counted[order[: _SAMPLE // blocks.shape[1]].to(blocks.device)]]


def _take_turns(best: _Found, levels: int, tolerance: float) -> _Found:
    """The codebook and the scales that follow from each other, from those found on."""
    while True:
        scales = best.scales.unsqueeze(1).double()
        weights = scales.square().expand(best.blocks.shape)
        element = learn_codebook(best.blocks / scales, weights, levels, points=_POINTS)
        form = dataclasses.replace(best.format, element=element)
        found = _Found.search(best.blocks, form, best.global_scale)
        enough = found.error < best.error * (1 - tolerance)
        best = min(best, found, key=lambda f: f.error)
        if not enough:
            return best


class _Found(NamedTuple):
    """Blocks [B, n] in a format: codes [B, P], values [B, n], scales [B] and the squared error."""

    blocks: Tensor
    format: Format
    global_scale: float
    codes: Tensor
    values: Tensor
    scales: Tensor
    error: float

    @staticmethod
    def search(blocks: Tensor, form: Format, global_scale: float) -> _Found:
        """The best scales for the elements of a format, registered or not."""
        codes, bits = search_ref(blocks, None, global_scale, form, "sse")
        values = element_values(codes, form.element)
        scales = scale_values(bits, form.scale).mul_(global_scale).flatten()
        off = torch.addcmul(blocks, values, scales.unsqueeze(1), value=-1)
        error = float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        return _Found(blocks, form, global_scale, codes, values, scales, error)
