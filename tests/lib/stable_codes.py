"""Compare a kernel that quantizes an intermediate result with its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.common.rounding import global_multiplier, round_to_codes_, scale_values
from fp4pass.kernels.quantize.naive import quantize_ref


def assert_agree(
    found: tuple[Tensor, Tensor], y: Tensor, error: Tensor, divisor: Tensor | None, fmt: Format
) -> None:
    """Expect the codes and scales of y [..., K], up to an error in y.

    Every scale and every code must lie between those of the least and of the largest magnitude
    that y may have; where these are the same, which must hold for half of the codes at least, that
    is equality.

    Args:
        found: packed codes and scale bits.
        y: floating point, what was quantized, up to `error`.
        error: how far off a magnitude may be, in addition to one rounding of y's dtype.
        divisor: the stored global scale, or None.
        fmt: the format.
    """
    wide = y.double()
    ulp = torch.finfo(y.dtype).eps if y.dtype != torch.float32 else 0
    error = error.double() + wide.abs() * ulp
    sign = torch.where(y.signbit(), -1.0, 1.0).double()
    low = (sign * (wide.abs() - error).clamp(min=0)).to(y.dtype)
    high = (sign * (wide.abs() + error)).to(y.dtype)
    packed, scale = quantize_ref(y, divisor, fmt)
    assert found[0].shape == packed.shape and found[1].shape == scale.shape
    assert found[0].dtype == found[1].dtype == torch.uint8
    if not y.numel():
        return
    least, most = (quantize_ref(each, divisor, fmt)[1] for each in (low, high))
    assert ((least <= found[1]) & (found[1] <= most)).all()
    step = scale_values(found[1], fmt.scale)
    if divisor is not None:
        step = step * global_multiplier(divisor, fmt)
    step = step.repeat_interleave(fmt.block, -1)
    lower, upper = (round_to_codes_(each.float() / step, fmt.element) for each in (low, high))
    # A block whose scale rounds to zero gets the smallest scale and codes 0.
    smallest = (found[1] == 1).repeat_interleave(fmt.block, -1)
    lower = torch.where(smallest, lower & 8, lower)
    codes = unpack_codes(found[0])
    assert (((lower & 7) <= (codes & 7)) & ((codes & 7) <= (upper & 7))).all()
    exact = lower == upper
    assert torch.equal(codes[exact], lower[exact])
    share = exact.double().mean().item()
    assert share >= 0.5, f"only {share:.0%} of {exact.numel()} codes could be compared"
