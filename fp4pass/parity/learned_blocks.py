"""Quantize blocks in element values that are learned from them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.formats import Format, get_format
from ..errors import OptionError, require_type
from ..kernels.search.reference import search_ref
from ..tensor.blocks import QuantizedBlocks, read_blocks, read_global_scale
from .learned_codebook import code_width, learn_codebook

# Elements from which the first codebooks are learned, and points of each codebook: more change the
# error of normal weights by less than 1e-4 of it.
_SAMPLE = 1 << 17
_POINTS = 1 << 13


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
    code_width(levels)
    require_type(f"{caller}: tolerance", "a number between 0 and 1", tolerance, float, int)
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
