"""Block Hessians of a layer's input, and the errors of a weight, each in one pass.

A program takes some columns and a share of the tokens or rows. Shares go to a scratch buffer and
are added in order, so that all runs give the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, PTX, bits_of, cdiv, code_value, float_of, scale_value
from ..experts.reference import observe_experts_ref
from .reference import HESSIAN_BLOCK

# Columns of a program, whose product keeps its diagonal blocks; bytes of a column in a step.
_COLUMNS, _BYTES = 64, 256

# Rows of a step's tokens that lie in the same lanes, so that their maximum needs no exchange.
_FOLDED = 16

# Programs that fill a large GPU once, the fewest steps worth a program, and the most shares.
_PROGRAMS, _STEPS, _SHARES = 152, 4, 16

# Tokens of a launch: tensor cores truncate their sums, whose error grows with their number.
_LAUNCH_TOKENS = 1 << 16

# Of the errors of a weight: rows of a step, and programs that fill a large GPU.
_ERRORS_ROWS, _ERRORS_PROGRAMS = 64, 2112


def observe_triton(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add the tokens of `x` to the statistics of a layer's input, in place (reference.py)."""
    x = x.float() if x.dtype == torch.float64 else x
    tokens = x.reshape(-1, x.shape[-1])
    for chunk in tokens.split(_LAUNCH_TOKENS):
        _observe(chunk, hessian, count, amax)


observe_experts_triton = partial(observe_experts_ref, observe=observe_triton)


def _observe(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Run `observe_triton` of x [T, K] in one launch."""
    tokens, columns = x.shape
    if not tokens:
        return
    groups = cdiv(columns, _COLUMNS)
    step = _BYTES // x.element_size()
    # Where columns alone fill the GPU, two programs on a multiprocessor are faster than one.
    programs, stages = (2 * _PROGRAMS, 3) if groups > _PROGRAMS * 3 // 4 else (_PROGRAMS, 4)
    steps = cdiv(tokens, step)
    steps = cdiv(steps, max(1, min(programs // groups, steps // _STEPS, _SHARES)))
    shares = cdiv(tokens, steps * step)
    alone = shares == 1 or not len(hessian)
    _observe_kernel[(groups, shares)](
        *(x, hessian if alone else hessian.new_empty((shares, *hessian.shape)), hessian),
        None if alone else count.new_zeros(groups, dtype=torch.int32),
        *(count, amax.view(torch.int32), tokens, columns, *x.stride(), steps, shares),
        HESSIANS=len(hessian) > 0,
        BLOCK=HESSIAN_BLOCK,
        COLUMNS=_COLUMNS,
        TOKENS=step,
        STAGES=stages,
        FOLDED=_FOLDED,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit(do_not_specialize=["tokens", "steps", "shares"])
def _observe_kernel(
    x,
    sums,
    hessian,
    finished,
    count,
    amax,
    tokens,
    columns,
    token_stride,
    column_stride,
    steps,
    shares,
    HESSIANS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Add a share of the tokens for COLUMNS columns."""
    # sums: [shares, J, BLOCK, BLOCK]; amax: its bits; finished: zeros [groups], None for one share.
    group, share = tl.program_id(0), tl.program_id(1)
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    at = x + column.to(tl.int64)[None, :] * column_stride
    total = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    largest = tl.zeros((FOLDED, COLUMNS), tl.int32)
    for step in tl.range(share * steps, share * steps + steps, num_stages=STAGES):
        token = step * TOKENS + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None] & (column < columns)[None, :]
        tile = tl.load(at + token.to(tl.int64)[:, None] * token_stride, mask=mask, other=0.0)
        if HESSIANS:
            factor = tile if PTX else tile.to(tl.float32)
            total = tl.dot(tl.trans(factor), factor, total, input_precision="tf32x3")
        folded = tl.reshape(magnitude_bits(tile), (TOKENS // FOLDED, FOLDED, COLUMNS))
        largest = tl.maximum(largest, tl.max(folded, axis=0).to(tl.int32))
    peak = tl.max(tl.max(largest, axis=1), axis=0)
    tl.atomic_max(amax, float_bits(peak, x.dtype.element_ty))
    if (group == 0) & (share == 0):
        tl.store(count, tl.load(count) + tokens)
    if HESSIANS:
        row = group * COLUMNS + tl.arange(0, COLUMNS)
        inside = row % BLOCK
        kept = (row // BLOCK)[:, None] == (row // BLOCK)[None, :]
        # The last block is stored whole, also where it has fewer columns.
        kept = kept & (row < tl.cdiv(columns, BLOCK) * BLOCK)[:, None]
        at = row.to(tl.int64)[:, None] * BLOCK + inside[None, :]
        if finished is None:
            tl.store(hessian + at, tl.load(hessian + at, mask=kept) + total, mask=kept)
        else:
            size = tl.cdiv(columns, BLOCK).to(tl.int64) * (BLOCK * BLOCK)
            tl.store(sums + share * size + at, total, mask=kept)
            # The last to finish adds all shares, in their order; the atomic orders the memory.
            tl.debug_barrier()
            if tl.atomic_add(finished + group, 1) == shares - 1:
                total = tl.load(sums + at, mask=kept, cache_modifier=".cg")
                for i in range(1, shares):
                    total += tl.load(sums + i * size + at, mask=kept, cache_modifier=".cg")
                tl.store(hessian + at, tl.load(hessian + at, mask=kept) + total, mask=kept)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|, which order magnitudes below infinity below NaN."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def float_bits(bits, DTYPE: tl.constexpr):
    """Return the float32 bits of a magnitude whose bits in DTYPE are given."""
    if DTYPE == tl.bfloat16:
        bits = bits << 16
    elif DTYPE == tl.float16:
        bits = bits_of(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    return bits


def errors_triton(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return the squared errors of a quantized weight: float64 [4] (reference.py)."""
    rows, columns = weight.shape
    weight = (weight.float() if weight.dtype == torch.float64 else weight).contiguous()
    groups = cdiv(columns, HESSIAN_BLOCK)
    steps = cdiv(rows, _ERRORS_ROWS)
    shares = max(1, min(steps, _ERRORS_PROGRAMS // groups))
    sums = weight.new_empty((groups * shares, 4), dtype=torch.float64)
    _errors_kernel[(groups, shares)](
        *(weight, packed.contiguous(), scale.contiguous(), global_scale),
        hessian if hessian is None else hessian.contiguous(),
        *(sums, rows, columns, cdiv(steps, shares)),
        ROWS=_ERRORS_ROWS,
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
