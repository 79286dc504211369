"""Reduce a small tensor over the GPUs of one host, in one launch that waits once.

Every 32 bits travel with the number of the call in one 64-bit store, so that who reads them knows
whether they have arrived: no flag is set behind the data, and none before it. A process writes to
the words of call n again in call n + 2. By then all others have begun call n + 1, for this one has
read what they sent in it, and so have ended call n on their streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import DTYPES, LAUNCH, cdiv, overlapping, wait
from .memory import WORDS, Memory

# Words of a row that one program holds.
_LONGEST = 1 << 13


def all_reduce_triton(x: Tensor, memory: Memory, maximum: bool) -> Tensor:
    """Return the sum or the maximum of x of all processes, of at most LARGEST bytes."""
    x = x.contiguous()
    out = torch.empty_like(x)
    # 32 bits are one float32 or two smaller numbers.
    words = x.nbytes // 4
    all_reduce_kernel[(max(1, cdiv(words, WORDS)),)](
        x.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        *(memory.addresses, memory.calls, words, memory.rank),
        *(memory.size, memory.capacity, DTYPES[x.dtype], maximum, WORDS),
        num_warps=4,
        **overlapping(x.device, False),
        **LAUNCH,
    )
    return out


def whole_units(x: Tensor) -> bool:
    """Return whether rows [..., K] are whole units of WORDS words, and a program can hold one."""
    words = x.shape[-1] * x.element_size() // 4
    return words % WORDS == 0 and words <= _LONGEST


def all_reduce_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: Memory
) -> tuple[Tensor, Tensor]:
    """Reduce, add and norm rows [..., K] (`all_reduce_norm_ref`), a program each."""
    x, residual, weight = (each.contiguous() for each in (x, residual, weight))
    total, normal = torch.empty_like(x), torch.empty_like(x)
    words = x.shape[-1] * x.element_size() // 4
    block = triton.next_power_of_2(words)
    all_reduce_norm_kernel[(x.nbytes // 4 // words,)](
        *(each.view(-1).view(torch.int32) for each in (x, residual, weight, total, normal)),
        *(memory.addresses, memory.calls, memory.rank, eps),
        *(memory.size, memory.capacity, DTYPES[x.dtype], words, block, WORDS),
        num_warps=max(4, min(16, block // 128)),
        **overlapping(x.device, False),
        **LAUNCH,
    )
    return total, normal


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
def _together(a, b, MAXIMUM: tl.constexpr):
    """Return the sum or the maximum, NaN if any is."""
    if MAXIMUM:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return a + b


@triton.jit
def _exchange(
    own, at, call, mask, addresses_ptr, rank,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Send words to all others, and return both halves of what all have sent, reduced, rounded."""
    place = (call & 1).to(tl.int64) * (SIZE * CAPACITY) + at
    word = (call.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for to in tl.static_range(SIZE):
        there = tl.load(addresses_ptr + to) + 8 * (place + rank * CAPACITY)
        _send(there, word, (mask & (to != rank)).to(tl.int32))
    here = tl.load(addresses_ptr + rank) + 8 * place
    low = tl.zeros(own.shape, tl.float32)
    high = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(SIZE):
        is_other = (mask & (source != rank)).to(tl.int32)
        sent = _receive(here + 8 * source * CAPACITY, call, is_other)
        bits = tl.where(source == rank, own, sent)
        first = _number(bits, DTYPE, 0)
        second = _number(bits, DTYPE, 1)
        low = first if source == 0 else _together(low, first, MAXIMUM)
        high = second if source == 0 else _together(high, second, MAXIMUM)
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit
def _joined(low, high, DTYPE: tl.constexpr):
    """Return the bits of words, given their halves; float32 numbers are the lower ones alone."""
    if DTYPE == tl.float32:
        return _bits(low, DTYPE, 0)
    else:
        return _bits(low, DTYPE, 0) | _bits(high, DTYPE, 1)


@triton.jit(do_not_specialize=["words", "rank"])
def all_reduce_kernel(
    x_ptr, out_ptr, addresses_ptr, calls_ptr, words, rank,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr, MAXIMUM: tl.constexpr,
    WORDS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Reduce WORDS words."""
    wait(OVERLAP, RELEASES)
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    mask = at < words
    call = tl.load(calls_ptr + program + at * 0) + 1
    own = tl.load(x_ptr + at, mask=mask, other=0)
    low, high = _exchange(
        own, at, call, mask, addresses_ptr, rank, SIZE, CAPACITY, DTYPE, MAXIMUM
    )  # fmt: skip
    tl.store(out_ptr + at, _joined(low, high, DTYPE), mask=mask)
    # Only once all threads have read it.
    tl.debug_barrier()
    tl.store(calls_ptr + program + at * 0, call)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normal_ptr, addresses_ptr, calls_ptr, rank, eps,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, DTYPE: tl.constexpr,
    ROW: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Reduce the ROW words of a row, add those of its residual, and normalize the sum."""
    wait(OVERLAP, RELEASES)
    lane = tl.arange(0, BLOCK)
    mask = lane < ROW
    at = tl.program_id(0) * ROW + lane
    # All processes count the units of WORDS words that they exchange, whatever kernel does.
    call = tl.load(calls_ptr + at // WORDS, mask=mask, other=0) + 1
    own = tl.load(x_ptr + at, mask=mask, other=0)
    residual = tl.load(residual_ptr + at, mask=mask, other=0)
    weight = tl.load(weight_ptr + lane, mask=mask, other=0)
    low, high = _exchange(own, at, call, mask, addresses_ptr, rank, SIZE, CAPACITY, DTYPE, False)
    low = (low + _number(residual, DTYPE, 0)).to(DTYPE).to(tl.float32)
    squares = low * low
    COLUMNS: tl.constexpr = ROW if DTYPE == tl.float32 else 2 * ROW
    if DTYPE != tl.float32:
        high = (high + _number(residual, DTYPE, 1)).to(DTYPE).to(tl.float32)
        squares = tl.fma(high, high, squares)
    tl.store(total_ptr + at, _joined(low, high, DTYPE), mask=mask)
    inverse = tl.math.rsqrt(tl.sum(tl.where(mask, squares, 0.0)) / COLUMNS + eps)
    low = (low * inverse).to(DTYPE).to(tl.float32) * _number(weight, DTYPE, 0)
    high = (high * inverse).to(DTYPE).to(tl.float32) * _number(weight, DTYPE, 1)
    tl.store(normal_ptr + at, _joined(low, high, DTYPE), mask=mask)
    tl.debug_barrier()
    tl.store(calls_ptr + at // WORDS, call, mask=mask)
