"""Reduce a small tensor over the GPUs of one host, in one launch that waits once.

Every 32 bits travel with the number of the call in one 64-bit store, so that who reads them knows
whether they have arrived: no flag is set behind the data, and none before it. A process writes to
the words of call n again in call n + 2. By then all others have begun call n + 1, for this one has
read what they sent in it, and so have ended call n on their streams. The kernel waits for the one
before it, as all that are launched early do, so calls of one process do not overlap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import DTYPES, LAUNCH, cdiv, overlapping, wait
from ..norm.naive import SQUARES, sums_of_squares
from .naive import WORDS, Memory


def all_reduce_triton(x: Tensor, memory: Memory, maximum: bool) -> Tensor:
    """Return the sum or the maximum of x of all processes, of at most LARGEST bytes."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, out, None, memory, maximum)
    return out


def all_reduce_add_triton(x: Tensor, residual: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Return residual + the sum of x of all processes, and its sums of squares."""
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    squares = sums_of_squares(out)
    _launch(x, residual, out, squares, memory, False)
    return out, squares


def _launch(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    squares: Tensor | None,
    memory: Memory,
    maximum: bool,
) -> None:
    # 32 bits are one float32 or two smaller numbers.
    words = x.nbytes // 4
    all_reduce_kernel[(max(1, cdiv(words, WORDS)),)](
        x.view(-1).view(torch.int32),
        None if residual is None else residual.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32), squares,
        *(memory.addresses, memory.calls, words, memory.rank),
        *(memory.size, memory.words.numel() // memory.size // 2, DTYPES[x.dtype], maximum, WORDS),
        SQUARES * x.element_size() // 4, num_warps=4, **LAUNCH, **overlapping(x.device, True),
    )  # fmt: skip


@triton.jit
def _send(address, word, mask):
    """Store 64 bits in the memory of another GPU, in one piece."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.b32 p, $3, 0;
        @p st.relaxed.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [address, word, mask],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _receive(address, call, mask):
    """Wait for 64 bits that end in the number of a call, and return the 32 others."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b64 word;
        .reg .b32 number;
        mov.b32 $0, 0;
        setp.eq.b32 p, $3, 0;
        @p bra DONE;
        AGAIN:
        ld.relaxed.sys.global.b64 word, [$1];
        mov.b64 {$0, number}, word;
        setp.ne.b32 p, number, $2;
        @p bra AGAIN;
        DONE:
        }
        """,
        "=&r,l,r,r",
        [address, call, mask],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _number(bits, DTYPE: tl.constexpr, HALF: tl.constexpr):
    """Return the float32 of 32 bits, or of their lower or upper half."""
    if DTYPE == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    else:
        half = ((bits >> (16 * HALF)) & 0xFFFF).to(tl.int16)
        return half.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(number, DTYPE: tl.constexpr, HALF: tl.constexpr):
    """Return what `_number` was given, for a number that is rounded."""
    if DTYPE == tl.float32:
        return number.to(tl.int32, bitcast=True)
    else:
        half = number.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return half << (16 * HALF)


@triton.jit
def _sum_of_two(a, b, DTYPE: tl.constexpr):
    """Return the sum of two float32 that are rounded to a dtype each, rounded too."""
    return (a.to(DTYPE).to(tl.float32) + b).to(DTYPE).to(tl.float32)


@triton.jit
def _together(a, b, MAXIMUM: tl.constexpr):
    """Return the sum or the maximum, NaN if any is."""
    if MAXIMUM:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return a + b


@triton.jit(do_not_specialize=["words", "rank"])
def all_reduce_kernel(
    x_ptr, residual_ptr, out_ptr, squares_ptr, addresses_ptr, calls_ptr, words, rank,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr, MAXIMUM: tl.constexpr,
    WORDS: tl.constexpr, SQUARED: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Send WORDS words to all others, and reduce what all have sent, in the order of ranks.

    With a residual, that is added, and the squares of every SQUARED words.
    """
    program = tl.program_id(0)
    wait(OVERLAP, RELEASES)
    call = tl.load(calls_ptr + program) + 1
    at = program * WORDS + tl.arange(0, WORDS)
    mask = at < words
    own = tl.load(x_ptr + at, mask=mask, other=0)
    place = (call & 1).to(tl.int64) * (SIZE * CAPACITY) + at
    word = (call.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for to in tl.static_range(SIZE):
        there = tl.load(addresses_ptr + to) + 8 * (place + rank * CAPACITY)
        _send(there, word, (mask & (to != rank)).to(tl.int32))
    here = tl.load(addresses_ptr + rank) + 8 * place
    low = tl.zeros((WORDS,), tl.float32)
    high = tl.zeros((WORDS,), tl.float32)
    for source in tl.static_range(SIZE):
        sent = _receive(
            here + 8 * source * CAPACITY, call + at * 0, (mask & (source != rank)).to(tl.int32)
        )
        bits = tl.where(source == rank, own, sent)
        first = _number(bits, DTYPE, 0)
        second = _number(bits, DTYPE, 1)
        low = first if source == 0 else _together(low, first, MAXIMUM)
        high = second if source == 0 else _together(high, second, MAXIMUM)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + at, mask=mask, other=0)
        low = _sum_of_two(low, _number(added, DTYPE, 0), DTYPE)
        squares = low * low
        if DTYPE != tl.float32:
            high = _sum_of_two(high, _number(added, DTYPE, 1), DTYPE)
            squares += high * high
        sums = tl.sum(tl.reshape(squares, (WORDS // SQUARED, SQUARED)), axis=1)
        group = program * (WORDS // SQUARED) + tl.arange(0, WORDS // SQUARED)
        tl.store(squares_ptr + group, sums, mask=group * SQUARED < words)
    found = _bits(low, DTYPE, 0)
    if DTYPE != tl.float32:
        found = found | _bits(high, DTYPE, 1)
    tl.store(out_ptr + at, found, mask=mask)
    # Only once all threads have read it.
    tl.debug_barrier()
    tl.store(calls_ptr + program, call)
