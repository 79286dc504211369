"""Quantize blocks of a flattened tensor to codes of a table and their absmax, and back, in Triton.

Codes are the reference's to the bit, because the same float32 quotients are compared with bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.common.tiles import LAUNCH, bits_of, cdiv, float_of, rounded
from .codebooks import Codebook, dequantize_codebook_ref, quantize_codebook_ref, table_of

# Elements of a program that quantizes, and of one that dequantizes.
_ELEMENTS, _DENSE = 4096, 4096
# The float32 bits of LEAST_ABSMAX, which is subnormal.
_LEAST = tl.constexpr(0x006CE3EE)


def quantize_codebook_triton(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its flattened elements: the bits of the reference."""
    flat, block = x.reshape(-1), codebook.block
    blocks = len(flat) // block
    if not blocks:
        return quantize_codebook_ref(x, codebook)
    size, count = codebook.sizes(len(flat))
    codes, absmax = (
        flat.new_empty(size, dtype=torch.uint8),
        flat.new_empty(count, dtype=torch.float32),
    )
    together = max(1, _ELEMENTS // block)
    tables = (table_of(codebook, name, x.device) for name in ("bounds", "order"))
    _quantize[(cdiv(blocks, together),)](
        *(flat, *tables, codes, absmax, blocks), BLOCK=block, TOGETHER=together, **LAUNCH
    )
    if count > blocks:
        last = quantize_codebook_ref(flat[blocks * block :], codebook)
        codes[blocks * block // 2 :], absmax[blocks:] = last
    return codes, absmax


def dequantize_codebook_triton(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return values[code] * absmax of its block: the bits of dequantize_codebook_ref."""
    if dtype == torch.float64:
        return dequantize_codebook_ref(packed, absmax, codebook, shape, dtype)
    out = packed.new_empty(tuple(shape), dtype=dtype)
    if count := out.numel():
        table = table_of(codebook, "values", packed.device)
        _dequantize[(cdiv(count, _DENSE),)](
            *(packed.contiguous(), absmax.contiguous(), table, out, len(packed), count),
            BLOCK=codebook.block,
            SIZE=_DENSE // 2,
            **LAUNCH,
        )
    return out


@triton.jit(do_not_specialize=["blocks"])
def _quantize(x, bounds, order, codes, absmax, blocks, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """Quantize TOGETHER blocks of BLOCK elements."""
    block = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = block < blocks
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=inside[:, None], other=0).to(tl.float32)
    # As bits: NaN is above all numbers.
    largest = tl.max(bits_of(values) & 0x7FFFFFFF, 1)
    tl.store(absmax + block, float_of(largest), mask=inside)
    inverse = tl.math.div_rn(1.0, float_of(tl.maximum(largest, _LEAST)))
    quotient = values * inverse[:, None]
    # The number of bounds below a quotient, by bisection.
    rank = tl.zeros(quotient.shape, tl.int32)
    for i in tl.static_range(4):
        bound = tl.load(bounds + rank + ((8 >> i) - 1))
        rank += tl.where(quotient > bound, 8 >> i, 0)
    code = tl.reshape(tl.load(order + rank), (TOGETHER, BLOCK // 2, 2))
    high, low = tl.split(code)
    pair = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    tl.store(codes + pair, high << 4 | low, mask=inside[:, None])


@triton.jit
def _dequantize(codes, absmax, table, out, size, count, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Dequantize SIZE bytes of codes."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    byte = start + tl.arange(0, SIZE)
    inside = byte < size
    pair = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    factor = tl.load(absmax + byte // (BLOCK // 2), mask=inside, other=0)
    high = tl.load(table + (pair >> 4)) * factor
    low = tl.load(table + (pair & 15)) * factor
    values = rounded(tl.reshape(tl.join(high, low), (2 * SIZE,)), out.dtype.element_ty)
    element = 2 * start + tl.arange(0, 2 * SIZE)
    tl.store(out + element, values, mask=element < count)
