"""Float32 scales of tiles of a weight, or of parts of rows, and their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import WHOLE, Format
from .rounding import round_to_codes_

# The smallest scale, so that no quotient and no scale is subnormal. Zeros have it.
SMALLEST = 2.0**-126


def scale_of(amax: Tensor, fmt: Format) -> Tensor:
    """Return the float32 scales at which the largest element reaches each float32 amax."""
    # By a tensor: by a number torch multiplies with its reciprocal on a GPU, which rounds twice.
    return (amax / torch.full_like(amax, fmt.element.max)).clamp_(min=SMALLEST)


def spread(scale: Tensor, shape: tuple[int, ...], fmt: Format) -> Tensor:
    """Return scales, of rows or of tiles, that broadcast to the tensor [..., K] that has them."""
    if fmt.block != WHOLE:
        scale = scale.repeat_interleave(fmt.block, -1)[..., : shape[-1]]
    if fmt.rows > 1 and not are_of_rows(scale, shape):
        scale = scale.repeat_interleave(fmt.rows, -2)[..., : shape[-2], :]
    return scale


def are_of_rows(scale: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether each row of a tensor [..., K] has scales [..., J] of its own."""
    return scale.shape[:-1] == shape[:-1]


def tile_sums(x: Tensor, fmt: Format) -> Tensor:
    """Return the sums [..., J] of the columns of rows [..., K] that share a scale."""
    if fmt.block == WHOLE:
        return x.sum(-1, keepdim=True)
    return F.pad(x, (0, -x.shape[-1] % fmt.block)).unflatten(-1, (-1, fmt.block)).sum(-1)


def row_amax(x: Tensor, fmt: Format) -> Tensor:
    """Return the largest magnitudes [..., J] of the columns of rows [..., K] that share a scale."""
    if fmt.block == WHOLE:
        return x.abs().amax(-1, keepdim=True)
    padded = F.pad(x, (0, -x.shape[-1] % fmt.block))
    return padded.unflatten(-1, (-1, fmt.block)).abs().amax(-1)


def bands(shape: Sequence[int], fmt: Format, numbers: int) -> Iterator[slice]:
    """Yield slices of rows of [N, K] that cut no tile of some rows, of about so many numbers."""
    rows, columns = shape
    unit = max(fmt.rows, 1)
    step = max(1, numbers // (columns * unit)) * unit
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def band_of(scale: Tensor, rows: slice, fmt: Format) -> Tensor:
    """Return the scales [I, J] of tiles in such a slice of rows, of those of all."""
    if fmt.rows == WHOLE:
        return scale
    return scale[rows.start // fmt.rows : -(-rows.stop // fmt.rows)]


def quantize_rows_ref(x: Tensor, static: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [..., K] and float32 scales [..., J] of activations x [..., K]."""
    # static: the one scale [1] of all, or those of rows [..., 1], in place of those by amax. NaN or
    # infinity makes the scale of the numbers beside it NaN, which they decode to, and codes 0.
    wide = x.to(torch.float32)
    amax = row_amax(wide, fmt)
    finite = amax.isfinite()
    scale = scale_of(amax, fmt) if static is None else static.expand_as(amax)
    scale = torch.where(finite, scale, torch.nan)
    quotient = (wide / spread(scale, x.shape, fmt)).nan_to_num_(0.0, 0.0, 0.0)
    return round_to_codes_(quotient, fmt.element), scale
