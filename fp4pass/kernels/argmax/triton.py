"""Choose the largest number of long rows on a GPU, each row cut into parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, bits_of, cdiv, overlapping, wait
from .naive import last_argmax_ref

# Numbers of a program, which its threads take at once.
_PART = 2048


def last_argmax_triton(x: Tensor) -> Tensor:
    """Choose the largest number of each row (`last_argmax_ref`)."""
    if x.dtype == torch.float64 or not x.numel() or x.shape[-1] >= 1 << 31:
        return last_argmax_ref(x)
    rows = x.reshape(-1, x.shape[-1])
    parts = cdiv(rows.shape[1], _PART)
    best = x.new_empty((len(rows), parts), dtype=torch.int64)
    out = x.new_empty(x.shape[:-1], dtype=torch.int64)
    early = overlapping(x.device, True)
    best_of_parts_kernel[(parts, len(rows))](
        rows, best, *rows.stride(), rows.shape[1], PART=_PART, num_warps=8, **early, **LAUNCH
    )
    best_of_all_kernel[(len(rows),)](
        best, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=4, **early, **LAUNCH
    )
    return out


@triton.jit(do_not_specialize=["size"])
def best_of_parts_kernel(
    x, best, row_stride, stride, size, PART: tl.constexpr, OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    """Write the largest number of a part, with its place, as one integer that orders both."""
    part, row = tl.program_id(0), tl.program_id(1)
    wait(OVERLAP, RELEASES)
    at = part * PART + tl.arange(0, PART)
    inside = at < size
    x += row.to(tl.int64) * row_stride
    value = tl.load(x + at.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
    # Both zeros are equal. The bits of negative numbers run downwards; NaN is above all.
    bits = bits_of(tl.where(value == 0, 0.0, value))
    bits ^= (bits >> 31) & 0x7FFFFFFF
    bits = tl.where(value == value, bits, 0x7FFFFFFF)
    # Below, the place, the first being the largest.
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    key = tl.where(inside, key, -0x7FFFFFFFFFFFFFFF)
    tl.store(best + row * tl.num_programs(0) + part, tl.max(key, 0))


@triton.jit(do_not_specialize=["parts"])
def best_of_all_kernel(
    best, out, parts, PARTS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr
):
    """Return the place of the largest number of a row's parts."""
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    wait(OVERLAP, RELEASES)
    key = tl.load(best + row * parts + part, mask=part < parts, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF))
