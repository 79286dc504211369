"""When a kernel may differ from its reference: where a last bit of the input decides a code."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.core.quant_state import unpack_codes
from fp4pass.kernels.quantize.reference import quantize_ref


def assert_agree(
    found: tuple[Tensor, Tensor], y: Tensor, error: Tensor, divisor: Tensor | None, fmt: Format
) -> None:
    """Found are the codes and scales of y [..., K], wherever an error in it changes neither.

    error: how far off a magnitude may be, added to one rounding of y's dtype.
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
    bounds = [quantize_ref(each, divisor, fmt) for each in (low, high)]
    steady = bounds[0][1] == bounds[1][1]
    assert torch.equal(found[1][steady], scale[steady])
    kept = steady.repeat_interleave(fmt.block, -1)
    lower, upper = (unpack_codes(each[0]) for each in bounds)
    kept &= lower == upper
    assert torch.equal(unpack_codes(found[0])[kept], unpack_codes(packed)[kept])
    # Of a few blocks all may be on an edge.
    assert kept.numel() < 500 or kept.float().mean() > 0.5
