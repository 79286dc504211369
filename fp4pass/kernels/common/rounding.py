"""Round float32 tensors to elements and scales: to nearest, ties to the even code.

Below, float32 scales of tiles of a weight, or of parts of rows, and their places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.elements import Element, Scale, element_table, scale_table
from ...core.formats import WHOLE, Format

_EXPONENT_MASK = 0x7F800000

# Elements that a reference works on at a time. Their float32 fit a core's second cache, and the
# allocator returns memory of this size that was used before, where larger tensors get fresh pages.
CHUNK = 1 << 17


def global_multiplier(global_scale: Tensor, fmt: Format) -> Tensor:
    """Return what multiplies for a stored global scale: itself, or its reciprocal."""
    return global_scale if fmt.multiplies else 1.0 / global_scale


def in_chunks(block: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows, blocks of `block` elements, of all tensors [J, ...], a few at a time."""
    return zip(*(each.split(max(1, CHUNK // block)) for each in tensors), strict=True)


def float_exponent(x: Tensor) -> Tensor:
    """Return floor(log2(x)) of positive float32 x from its bits: int32, -127 below 2^-126."""
    return (x.view(torch.int32) >> 23) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


@lru_cache(maxsize=64)
def thresholds(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the quotients above which the next of `values` is nearer, ties to the even index."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    exact = torch.tensor(middles, dtype=torch.float64)
    mids = exact.float()
    below = torch.nextafter(mids, torch.tensor(-math.inf))
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where((mids > exact) | (odd & (mids == exact)), below, mids).to(device)


def _binade_and_lift(y: Tensor, mantissa_bits: int, min_exponent: int) -> tuple[Tensor, int]:
    """Return the bits (int32) of the power of two below each y, and what to add to them."""
    # The sum is the float 1.5 * 2^23 * (the step between values in that binade). Adding that to
    # y and taking it away again rounds y to a multiple of the step, ties to even.
    binade = (y.view(torch.int32) & _EXPONENT_MASK).clamp_(min=(min_exponent + 127) << 23)
    return binade, (23 - mantissa_bits) << 23 | 0x400000


def _round_to_index_(y: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Return the index (int32) of the binary float nearest to y >= 0; overwrites y."""
    binade, lift = _binade_and_lift(y, mantissa_bits, min_exponent)
    anchor = binade + lift
    index = y.add_(anchor.view(torch.float32)).view(torch.int32).sub_(anchor)
    field = (binade >> 23).sub_(min_exponent + 127)
    return index.add_(field, alpha=1 << mantissa_bits)


def round_to_values_(y: Tensor, element: Element) -> Tensor:
    """Round finite float32 quotients, clamped, to the values of an element, in place."""
    y.clamp_(-element.max, element.max)
    if element.minifloat is None:
        values = element_table(element, y.device)
        return y.copy_(values[round_to_codes_(y.clone(), element).long()])
    binade, lift = _binade_and_lift(y, *element.minifloat)
    anchor = binade.add_(lift).view(torch.float32)
    return y.add_(anchor).sub_(anchor)


def round_to_codes_(y: Tensor, element: Element) -> Tensor:
    """Return the codes (uint8) of finite float32 y, zeros with their sign too; overwrites y."""
    if element.native is not None:
        return y.clamp_(-element.max, element.max).to(element.native).view(torch.uint8)
    sign = (y.view(torch.int32) >> 31).to(torch.uint8) & 1 << (element.bits - 1)
    y.abs_().clamp_(max=element.max)
    if element.minifloat is None:
        index = torch.bucketize(y, thresholds(element.magnitudes, y.device), out_int32=True)
    else:
        index = _round_to_index_(y, *element.minifloat)
    return sign.bitwise_or_(index.to(torch.uint8))


def round_to_scale(value: Tensor, scale: Scale) -> Tensor:
    """Return the bytes (int64) nearest to positive float32 values, ties to the even byte."""
    # 0 where zero is nearer than the smallest scale. Above the largest it saturates.
    if scale.subnormal:
        # Its values are those of a binary float, zero included.
        return _round_to_index_(
            value.clamp(max=scale.max), scale.mantissa_bits, 1 - scale.bias
        ).long()
    return torch.bucketize(value, thresholds((0.0, *scale.values), value.device))


def naive_scale(
    amax: Tensor, global_scale: Tensor | float, element: Element, scale: Scale
) -> Tensor:
    """Return the scale bytes (int64, from 1 on) that finite float32 amax of blocks suggest."""
    # Scales with mantissas are `amax / (element.max * global_scale)`, rounded to even; powers of
    # two have the exponent of amax less that of element.max (OCP MX v1.0, section 6.3).
    if scale.mantissa_bits:
        byte = round_to_scale(amax / (element.max * global_scale), scale)
    else:
        exponent = float_exponent(amax) - math.frexp(element.max)[1] + 1
        byte = (exponent + scale.bias).long()
    return byte.clamp_(1, scale.last)


def scale_values(byte: Tensor, scale: Scale) -> Tensor:
    """Return the float32 values of scale bytes of any integer dtype."""
    return scale_table(scale, byte.device).index_select(0, byte.flatten().int()).view(byte.shape)


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


def row_amax(x: Tensor, fmt: Format) -> Tensor:
    """Return the largest magnitudes [..., J] of the columns of rows [..., K] that share a scale."""
    block = x.shape[-1] if fmt.block == WHOLE else fmt.block
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block)).abs().amax(-1)


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
