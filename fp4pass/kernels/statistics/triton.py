"""Block Hessians of a layer's input in one pass.

A program takes some columns and a share of the tokens. Shares go to a scratch buffer and
are added in order, so that all runs give the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, PTX, bits_of, cdiv
from ..experts.naive import observe_experts_ref
from .naive import HESSIAN_BLOCK, visible_rows

# Columns of a program, whose product keeps its diagonal blocks; bytes of a column in a step.
_COLUMNS, _BYTES = 64, 256

# Rows of a step's tokens that lie in the same lanes, so that their maximum needs no exchange.
_FOLDED = 16

# Programs that fill a large GPU once, the fewest steps worth a program, and the most shares.
_PROGRAMS, _STEPS, _SHARES = 152, 4, 16

# Tokens of a launch: tensor cores truncate their sums, whose error grows with their number.
_LAUNCH_TOKENS = 1 << 16


def observe_triton(
    x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor, visible: Tensor | None = None
) -> None:
    """Add the tokens of `x` to the statistics of a layer's input, in place (naive.py)."""
    x = visible_rows(x, visible)
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
        HESSIANS=len(hessian) > 0, BLOCK=HESSIAN_BLOCK, COLUMNS=_COLUMNS, TOKENS=step,
        STAGES=stages, FOLDED=_FOLDED, num_warps=4, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "steps", "shares"])
def _observe_kernel(
    x, sums, hessian, finished, count, amax, tokens, columns, token_stride, column_stride, steps,
    shares, HESSIANS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
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
        # The bits of |x|, which order magnitudes below infinity below NaN.
        WIDTH: tl.constexpr = tile.dtype.primitive_bitwidth
        bits = tile.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True)
        bits &= 0x7FFF if WIDTH == 16 else 0x7FFFFFFF
        folded = tl.reshape(bits, (TOKENS // FOLDED, FOLDED, COLUMNS))
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
def float_bits(bits, DTYPE: tl.constexpr):
    """Return the float32 bits of a magnitude whose bits in DTYPE are given."""
    if DTYPE == tl.bfloat16:
        bits = bits << 16
    elif DTYPE == tl.float16:
        bits = bits_of(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    return bits
