"""Learn element values from data, and quantize blocks in them.

The values are the best of weighted k-means in one dimension, solved exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.elements import Element
from ..core.formats import Format, get_format
from ..errors import NonFiniteError, OptionError, ShapeError
from ..kernels.search.reference import search_ref
from ..quantization.functional import QuantizedBlocks, read_blocks, read_global_scale, require_float

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Indices = np.ndarray[Any, np.dtype[np.int64]]

# Elements from which the first codebooks are learned, and points of each codebook: more change the
# error of normal weights by less than 1e-4 of it.
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
    """Find the magnitudes that represent numbers with the least weighted squared error.

    The error is the sum of w (|x| - c)^2, where c is the nearest magnitude or 0, least over all
    partitions of the distinct |x|, in float64; the magnitudes are rounded to float32.

    Args:
        x: a finite floating-point tensor of any shape.
        weights: the weight w of each number, not negative, in the shape of x; None for equal ones.
        levels: how many magnitudes beside 0, from 1 to 127.
        points: of more distinct |x| than this, neighbors are grouped first, which raises the error
            by at most 16 max|x|^2 sum(w) / points^2 (docs/tensors.md).
        name: the name of the element.

    Returns:
        An element of 4, 6 or 8 bits, with fewer magnitudes if x has fewer.

    Raises:
        OptionError: an option is out of range, or no number differs from 0 and has a weight.
        DtypeError: a tensor is not floating point.
        ShapeError: the weights do not have the shape of x.
        NonFiniteError: a tensor holds NaN or infinity.

    Source: X. Wu, Optimal Quantization by Matrix Searching, Journal of Algorithms 12, 1991.

    Example:
        >>> fp4pass.parity.learn_codebook(torch.tensor([-1.0, 1.0, 3.0]), levels=2).magnitudes
        (0.0, 1.0, 3.0)
    """
    bits = _code_width(levels)
    if points <= levels:
        raise OptionError(
            f"learn_codebook: expected points to be more than levels={levels}, got {points}."
        )
    sums = _distinct(x, weights)
    if not len(sums.value):
        raise OptionError(
            "learn_codebook: expected numbers that differ from 0 and have a weight, got none."
        )
    starts = _groups(sums, points)
    edges = starts[_partition(sums.at(starts), levels)]
    found = np.unique(_descend(sums, edges).astype(np.float32))
    magnitudes = (0.0, *(float(value) for value in found if value > 0.0))
    if len(magnitudes) < 2:
        raise OptionError(
            "learn_codebook: expected numbers within float32, got smaller ones. Scale x before the "
            "call."
        )
    return Element(name, bits, magnitudes)


def _code_width(levels: int) -> int:
    """Return the bits of a code for `levels` magnitudes beside 0. Raises OptionError."""
    if not 1 <= levels <= 127:
        raise OptionError(f"levels: expected 1 to 127 magnitudes beside 0, got {levels}.")
    # The widths of codes that `pack_codes` knows.
    return next(bits for bits in (4, 6, 8) if levels < 1 << (bits - 1))


class _Sums(NamedTuple):
    """Ascending values [n], with prefix sums [n + 1] of their weights and moments, float64."""

    value: _Array
    weight: _Array
    first: _Array
    second: _Array

    def at(self, starts: _Indices) -> _Sums:
        """Return the sums at some of the starts [m + 1], with the values that begin there."""
        return _Sums(
            self.value[starts[:-1]], self.weight[starts], self.first[starts], self.second[starts]
        )


def _distinct(x: Tensor, weights: Tensor | None) -> _Sums:
    """Sum up the distinct |x| above 0 that have a weight."""
    require_float("learn_codebook", "x", x)
    magnitude = x.detach().flatten().double().abs().cpu().numpy()
    if weights is None:
        weight = np.ones_like(magnitude)
    else:
        require_float("learn_codebook", "weights", weights)
        if weights.shape != x.shape:
            raise ShapeError(
                f"learn_codebook: expected weights of shape {tuple(x.shape)}, that of x, got "
                f"{tuple(weights.shape)}."
            )
        weight = weights.detach().flatten().double().cpu().numpy()
    if not (np.isfinite(magnitude).all() and np.isfinite(weight).all()):
        raise NonFiniteError("learn_codebook: expected finite x and weights, got NaN or infinity.")
    if (weight < 0).any():
        raise OptionError("learn_codebook: expected weights of at least 0, got negative ones.")
    counted = (magnitude > 0) & (weight > 0)
    magnitude, weight = magnitude[counted], weight[counted]
    order = np.argsort(magnitude)
    magnitude, weight = magnitude[order], weight[order]
    starts = np.flatnonzero(np.diff(magnitude, prepend=-1.0))
    value = magnitude[starts]
    total = np.add.reduceat(weight, starts) if len(starts) else weight
    terms = (total * value**power for power in (0, 1, 2))
    return _Sums(value, *(np.concatenate(([0.0], np.cumsum(each))) for each in terms))


def _groups(sums: _Sums, points: int) -> _Indices:
    """Return the starts of groups of neighboring values, at most points + 1, and their end.

    Of more values than `points` a group is no wider than 2 / points of the largest value and, if it
    has several values, no heavier than 4 / points of all.
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
    """Return the starts of the `levels` best clusters above the cluster of 0, and their end."""
    # The error of the first j values when all of them are rounded to 0.
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
    """Return the least errors of the first j values with one more cluster, and its start.

    The best start never falls as j grows, as the error of a cluster is a Monge array (Wu 1991), so
    it is searched between those of two neighbors, which are known for every second, fourth, ... j.
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
    """Return the errors of the clusters [start, stop) about their means; 0 for empty ones."""
    weight = sums.weight[stop] - sums.weight[start]
    first = sums.first[stop] - sums.first[start]
    spread = sums.second[stop] - sums.second[start] - first**2 / np.where(weight > 0, weight, 1.0)
    return np.maximum(spread, 0.0)


def _descend(sums: _Sums, edges: _Indices) -> _Array:
    """Return the ascending means of clusters, once every value is in the nearest (Lloyd 1982).

    It leaves the best partition of values as it is, and improves the best partition of groups.
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


def codebook_quantize(
    weight: Tensor,
    fmt: str = "nvfp4",
    *,
    dim: int = -1,
    levels: int = 7,
    global_scale: float | Tensor | str = "auto",
    tolerance: float = 1e-4,
) -> QuantizedBlocks:
    """Quantize blocks with a learned codebook and the best scales for it.

    It starts with the elements of a format and their best scales, and alternates: the best
    codebook for the scales, the best scales for the codebook; of a large tensor at first for some
    of its blocks. No step raises the squared error, so it ends at most at that of the format.

    Args:
        weight: a finite floating-point tensor, read as float32.
        fmt: the format that gives the first elements and the block scales; its block size is that
            of `weight.shape[dim]`.
        dim: the dimension that is the block.
        levels: magnitudes beside 0, at least as many as the format has; 7 for 4 bits.
        global_scale: as in `fp4pass.functional.quantize_blocks`.
        tolerance: stop when a step lowers the error by less than this part of it.

    Returns:
        The quantized blocks, in a format whose `element` has the learned magnitudes.

    Raises:
        OptionError: an option is out of range.
        ShapeError: the weight does not fit the format.
        DtypeError: the weight is not floating point.
        NonFiniteError: the weight holds NaN or infinity.

    Example:
        >>> weight = torch.randn(8, 4, 16)
        >>> learned = fp4pass.parity.codebook_quantize(weight)
        >>> fixed = fp4pass.functional.quantize_blocks(weight)
        >>> (learned.dequantize() - weight).norm() <= (fixed.dequantize() - weight).norm()
        tensor(True)
    """
    caller = "codebook_quantize"
    _code_width(levels)
    if not 0.0 < tolerance < 1.0:
        raise OptionError(f"{caller}: expected tolerance between 0 and 1, got {tolerance}.")
    x, found, amax = read_blocks(caller, weight, dim, get_format(fmt))
    least = len(found.element.magnitudes) - 1
    if levels < least:
        raise OptionError(
            f"{caller}: expected at least {least} levels, as many as {fmt} has, got {levels}. "
            "Choose more, or a format with fewer magnitudes."
        )
    given = read_global_scale(caller, found, global_scale, amax)
    multiplier = torch.tensor(given, dtype=torch.float32).item()
    blocks = x.reshape(-1, found.block).float()  # [B, n]
    best = _search(blocks, found, multiplier)
    some = _sample(blocks)
    if len(some):
        first = _alternate(_search(some, found, multiplier), levels, tolerance)
        learned = _search(blocks, first.quantized.format, multiplier)
        best = _alternate(min(best, learned, key=lambda found: found.error), levels, tolerance)
    outer = x.shape[:-1]
    return dataclasses.replace(
        best.quantized,
        packed=best.quantized.packed.view(*outer, -1).movedim(-1, dim),
        scale=best.quantized.scale.view(outer),
        dim=dim,
    )


def _sample(blocks: Tensor) -> Tensor:
    """Return some of the blocks that are not zero, always the same ones."""
    counted = blocks.any(1).nonzero().flatten()
    order = torch.randperm(len(counted), generator=torch.Generator().manual_seed(0))
    return blocks[counted[order[: _SAMPLE // blocks.shape[1]].to(blocks.device)]]


class _Found(NamedTuple):
    """Blocks [B, n], the same quantized, and the squared error."""

    blocks: Tensor
    quantized: QuantizedBlocks
    error: float


def _alternate(best: _Found, levels: int, tolerance: float) -> _Found:
    """Improve codebook and scales in turn until a turn improves them too little."""
    while True:
        scales = best.quantized.steps().unsqueeze(1).double()
        weights = scales.square().expand(best.blocks.shape)
        element = learn_codebook(best.blocks / scales, weights, levels, points=_POINTS)
        fmt = dataclasses.replace(best.quantized.format, element=element)
        found = _search(best.blocks, fmt, best.quantized.global_scale)
        enough = found.error < best.error * (1 - tolerance)
        best = min(best, found, key=lambda each: each.error)
        if not enough:
            return best


def _search(blocks: Tensor, fmt: Format, global_scale: float) -> _Found:
    """Search the best scales of blocks for the elements of a format, registered or not."""
    packed, scale = search_ref(blocks, None, global_scale, fmt, "sse")
    quantized = QuantizedBlocks(packed, scale.flatten(), global_scale, fmt, -1)
    off = torch.addcmul(blocks, quantized.values(), quantized.steps().unsqueeze(1), value=-1)
    error = float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
    return _Found(blocks, quantized, error)
