"""Reduce a small tensor over the GPUs of one host, in one launch that waits once.

Every 32 bits travel with the number of the call in one 64-bit store, so that who reads them knows
whether they have arrived: no flag is set behind the data, and none before it. A process writes to
the words of call n again in call n + 2. By then all others have begun call n + 1, for this one has
read what they sent in it, and so have ended call n on their streams. The kernel waits for the one
before it, as all that are launched early do, so calls of one process do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat.torch import process_group
from ..common.tiles import DTYPES, cdiv, launch, wait
from ..norm.naive import SQUARES, sums_of_squares
from .naive import LARGEST, all_reduce_add_ref, all_reduce_ref

# Words of a program, one for each of its threads.
WORDS = 128


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of all processes of a group, as this one reaches it."""

    # int64 [2, size, LARGEST / 4], of this process: what each rank sent in even and in odd calls,
    # its 32 bits below the number of the call.
    words: Tensor
    addresses: Tensor  # int64 [size], of `words` of each process
    calls: Tensor  # int32 [LARGEST / 4 / WORDS], how often each program ran
    rank: int
    group: Any

    @staticmethod
    def of(words: Tensor, addresses: list[int], rank: int, group: Any = None) -> Memory:
        """Return the memory of a group, given the words [2 x size x LARGEST / 4] of each, zero."""
        there = torch.tensor(addresses, dtype=torch.int64, device=words.device)
        calls = torch.zeros(LARGEST // 4 // WORDS, dtype=torch.int32, device=words.device)
        return Memory(words, there, calls, rank, group)


# That of each group, by its name.
MEMORIES: dict[str, Memory] = {}


def count_of_words(size: int) -> int:
    """Return the number of words that a process of a group has."""
    return 2 * size * LARGEST // 4


def all_reduce_triton(x: Tensor, group: str, maximum: bool) -> Tensor:
    """Return the sum or the maximum of x of all processes (`all_reduce_ref`)."""
    memory = _memory_for(x, group)
    return all_reduce_ref(x, group, maximum) if memory is None else reduce(x, memory, maximum)[0]


def all_reduce_add_triton(x: Tensor, residual: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return residual + the sum of x of all processes (`all_reduce_add_ref`)."""
    memory = _memory_for(x, group)
    if memory is None or x.shape[-1] % SQUARES:
        return all_reduce_add_ref(x, residual, group, reduce=all_reduce_triton)
    return reduce(x, memory, False, residual)


def _memory_for(x: Tensor, group: str) -> Memory | None:
    """Return the memory through which a tensor goes, or None for the backend of its group."""
    memory = MEMORIES.get(group)
    # A group of that name may be gone.
    is_there = memory is not None and memory.group is process_group(group)
    is_served = x.nbytes % 4 == 0 and 0 < x.nbytes <= LARGEST and x.dtype in DTYPES
    return memory if is_there and is_served else None


def reduce(
    x: Tensor, memory: Memory, maximum: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x reduced, of at most LARGEST bytes; with a residual, the sum and its squares."""
    x = x.contiguous()
    out = torch.empty_like(x)
    squares = out if residual is None else sums_of_squares(out)
    # 32 bits are one float32 or two smaller numbers.
    words, size = x.nbytes // 4, len(memory.addresses)
    all_reduce_kernel[(max(1, cdiv(words, WORDS)),)](
        x.view(-1).view(torch.int32),
        None if residual is None else residual.contiguous().view(-1).view(torch.int32),
        out.view(-1).view(torch.int32), None if residual is None else squares,
        *(memory.addresses, memory.calls, words, memory.rank),
        *(size, memory.words.numel() // size // 2, DTYPES[x.dtype], maximum, WORDS),
        SQUARES * x.element_size() // 4, num_warps=4, **launch(x.device, True),
    )  # fmt: skip
    return out, squares


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
    """Send WORDS words to all others, and reduce what all have sent, in the order of ranks."""
    # With a residual, that is added, and the squares of every SQUARED words.
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
