"""Errors of a quantized weight in one pass: a program takes 32 columns and a share of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, bits_of, cdiv, code_value, float_of, scale_value
from .reference import HESSIAN_BLOCK

# Rows of a step, and programs that fill a large GPU.
_ROWS, _PROGRAMS = 64, 2112


def errors_triton(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return the squared errors of a quantized weight: float64 [4] (errors_reference.py)."""
    rows, columns = weight.shape
    weight = (weight.float() if weight.dtype == torch.float64 else weight).contiguous()
    groups = cdiv(columns, HESSIAN_BLOCK)
    steps = cdiv(rows, _ROWS)
    shares = max(1, min(steps, _PROGRAMS // groups))
    sums = weight.new_empty((groups * shares, 4), dtype=torch.float64)
    _errors_kernel[(groups, shares)](
        weight,
        packed.contiguous(),
        scale.contiguous(),
        global_scale,
        hessian if hessian is None else hessian.contiguous(),
        sums,
        rows,
        columns,
        cdiv(steps, shares),
        ROWS=_ROWS,
        WIDTH=HESSIAN_BLOCK,
        FMT=fmt,
        num_warps=4,
        **LAUNCH,
    )
    return sums.sum(0)


@triton.jit(do_not_specialize=["rows", "steps"])
def _errors_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    global_scale_ptr,
    hessian_ptr,
    sums_ptr,
    rows,
    columns,
    steps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FMT: tl.constexpr,
):
    """Store the errors of WIDTH columns and a share of the rows: float64 [groups * shares, 4]."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    BLOCK: tl.constexpr = FMT.block
    # Two codes to a byte, each a sign above the index of a magnitude.
    BITS: tl.constexpr = ELEMENT.bits
    INDEX: tl.constexpr = (1 << (BITS - 1)) - 1
    group = tl.program_id(0)
    share = tl.program_id(1)
    inside = tl.arange(0, WIDTH)
    column = group * WIDTH + inside
    difference = tl.zeros((ROWS,), tl.float64)
    size = tl.zeros((ROWS,), tl.float64)
    output = tl.zeros((ROWS,), tl.float64)
    energy = tl.zeros((ROWS,), tl.float64)
    if hessian_ptr is not None:
        corner = hessian_ptr + group.to(tl.int64) * (WIDTH * WIDTH)
        h = tl.load(corner + inside[:, None] * WIDTH + inside[None, :])
        # By a power of two to [0.5, 1), so that nothing overflows in float32.
        largest = tl.max(tl.max(tl.abs(h), axis=1), axis=0)
        exponent = tl.minimum((bits_of(largest) >> 23) - 126, 126)
        h = h * float_of((127 - exponent) << 23)
        grow = ((1023 + exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    for step in range(share * steps, share * steps + steps):
        row = step * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        dense = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        pair = tl.load(packed_ptr + at // 2, mask=mask, other=0).to(tl.int32)
        code = (pair >> ((column & 1) * BITS)[None, :]) & (2 * INDEX + 1)
        byte = tl.load(scale_ptr + at // BLOCK, mask=mask, other=1)
        scale = scale_value(byte, SCALE)
        if global_scale_ptr is not None:
            number = tl.load(global_scale_ptr) + tl.zeros_like(scale)
            if FMT.multiplies:
                scale = scale * number
            else:
                scale = tl.math.div_rn(scale, number)
        value = code_value(code & INDEX, ELEMENT) * scale
        rest = dense - tl.where(code > INDEX, -value, value)
        difference += tl.sum(rest.to(tl.float64) * rest.to(tl.float64), axis=1)
        size += tl.sum(dense.to(tl.float64) * dense.to(tl.float64), axis=1)
        if hessian_ptr is not None:
            weighted = tl.dot(rest, h, input_precision="tf32x3")
            output += tl.sum(weighted.to(tl.float64) * rest.to(tl.float64), axis=1) * grow
            weighted = tl.dot(dense, h, input_precision="tf32x3")
            energy += tl.sum(weighted.to(tl.float64) * dense.to(tl.float64), axis=1) * grow
    sums_ptr += (group * tl.num_programs(1) + share).to(tl.int64) * 4
    tl.store(sums_ptr, tl.sum(difference, axis=0))
    tl.store(sums_ptr + 1, tl.sum(size, axis=0))
    tl.store(sums_ptr + 2, tl.sum(output, axis=0))
    tl.store(sums_ptr + 3, tl.sum(energy, axis=0))
