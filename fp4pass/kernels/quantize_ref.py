"""Activations to packed codes and scale bits, round-to-nearest with naive scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import Format
from ..packing import pack_codes
from .rounding_ref import naive_scale, power_of_two, round_to_codes_, round_to_scale, scale_values


def quantize_ref(x: Tensor, global_divisor: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its last dimension.

    x: [..., K] float; global_divisor: [1] float32, 1 / global_scale, None for 1.
    Returns packed [..., K / 2] uint8 and scale bits [..., K / block] uint8. A block whose scale
    rounds to zero gets codes 0 and the smallest scale; powers of two round amax up from a
    mantissa of 1.75 on; a block with NaN or infinity gets the scale NaN, which it decodes to.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, fmt.block)).movedim(-1, 0)  # [n, ..., J]
    amax = blocks.abs().amax(0)
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 0)
    global_scale = 1.0 if global_divisor is None else 1.0 / global_divisor
    if fmt.scale.mantissa_bits:
        wanted = amax / (fmt.element.max * global_scale)
        vanishes = (round_to_scale(wanted, fmt.scale) == 0) | ~finite
        byte = naive_scale(amax, global_scale, fmt.element, fmt.scale)
    else:
        vanishes = ~finite
        rounded = (amax.view(torch.int32) + 0x200000).view(torch.float32)
        byte = naive_scale(rounded, global_scale, fmt.element, fmt.scale)
    quotient = blocks / (scale_values(byte, fmt.scale) * global_scale)
    codes = round_to_codes_(quotient.nan_to_num_(), fmt.element).masked_fill_(vanishes, 0)
    byte = torch.where(finite, byte, fmt.scale.nan).to(torch.uint8)
    packed = pack_codes(codes.movedim(0, -1).flatten(-2))
    # Of an x whose memory is laid out otherwise, results would be too.
    return packed.contiguous(), byte.contiguous()


def global_divisor_ref(x: Tensor, fmt: Format) -> Tensor:
    """1 / global_scale for the amax of the finite values of `x`: [1] float32, a power of two.

    x: [..., K] float. The same rule as Format.global_scale_for, on the tensor's own device.
    """
    x = x.to(torch.float32)
    finite = torch.where(x.isfinite(), x, 0)
    amax = finite.abs().amax().view(1) if x.numel() else finite.new_zeros(1)
    mantissa, exponent = torch.frexp(amax)
    full_mantissa, full_exponent = math.frexp(fmt.scale.max * fmt.element.max)
    k = (exponent - full_exponent + (mantissa > full_mantissa)).clamp_(-126, 126)
    return torch.where(amax == 0, 1.0, power_of_two(-k))
