"""Make the operands of products: decode codes in registers, and sort x to follow their columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import (
    DTYPES,
    LAUNCH,
    PTX,
    as_words,
    bits_of,
    cdiv,
    clear,
    decode_scale,
    float_of,
    overlapping,
    power,
    rounded,
    scale_value,
    unpack_word,
    wait,
)
from ..dequantize.triton import packed_words, signed_value
from .ptx_triton import LARGE, decode_assembly, offset, step_assembly
from .tiling import TERMS

# Words to a thread block of `_arrange`.
_BLOCK = 512


class InputRows(NamedTuple):
    """Rows of x as words of numbers of a dtype, or of codes, which have no dtype and scales."""

    words: Tensor
    dtype: torch.dtype | None
    scale: Tensor | None = None
    global_scale: Tensor | None = None

    @staticmethod
    def of_numbers(x: Tensor) -> InputRows:
        """Return rows of numbers."""
        return InputRows(as_words(x), x.dtype)

    @staticmethod
    def of_codes(packed: Tensor, scale: Tensor, global_scale: Tensor | None) -> InputRows:
        """Return rows of packed codes."""
        return InputRows(packed_words(packed), None, scale.contiguous(), global_scale)

    @property
    def terms(self) -> int:
        """Bfloat16 numbers that hold one of x."""
        return 1 if self.dtype is None else TERMS[self.dtype]


def arranged(
    x: InputRows, m: int, k: int, group: int, fmt: Format, releases: bool,
    zeros: Tensor | None = None, tile: int = 1,
) -> Tensor:  # fmt: skip
    """Return x in bfloat16 terms, its columns sorted to follow decoded codes: [terms, m, K]."""
    # group: words whose columns are sorted by their place in a word; zeros fill the last group.
    # releases: as `overlapping` takes it. zeros: int32, set to 0 in the same launch.
    # tile: of one term, room is left for whole tiles of so many rows.
    words = cdiv(k // 8, group) * group
    padded = cdiv(m, tile) * tile
    out = x.words.new_empty((x.terms, padded, 8 * words), dtype=torch.bfloat16)
    _arrange[(cdiv(m * words, _BLOCK),)](
        x.words, x.scale, out, zeros, m * words, 0 if zeros is None else len(zeros),
        K=k, FMT=fmt, DTYPE=None if x.dtype is None else DTYPES[x.dtype], TERMS=x.terms,
        GROUP=group, BLOCK=_BLOCK, **overlapping(out.device, releases), **LAUNCH,
    )  # fmt: skip
    return out


# The dtype of products. The interpreter has no arithmetic on bfloat16; float32 holds the same.
OPERAND = tl.constexpr(tl.bfloat16 if PTX else tl.float32)

# In `decode`: eight times four bfloat16, four words, four bytes; or four pairs, a word, its byte.
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 16 + ["r"] * 5))
_PAIR_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r")


@triton.jit
def step_of(byte, FMT: tl.constexpr, SMALL: tl.constexpr):
    """Return what `decode` multiplies codes by, for scale bytes: int32, or float32 without PTX."""
    SCALE: tl.constexpr = FMT.scale
    if PTX:
        step = tl.inline_asm_elementwise(
            step_assembly(FMT, SMALL),
            "=r,r",
            [byte.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        step = scale_value(byte, SCALE) * power(offset(FMT))
        if SMALL:
            step = tl.where(byte < LARGE, step, float("nan"))
    return step


@triton.jit
def decode(
    word, byte, FMT: tl.constexpr, PAIRS: tl.constexpr, SMALL: tl.constexpr,
    STEPS: tl.constexpr = False,
):  # fmt: skip
    """Return the eight codes in int32 words times scales in bytes times 2^offset, all exact."""
    # The codes in a register: one of two words, or, as PAIRS, the codes i and i + 4 of a word.
    # SMALL: the bytes are less than LARGE. STEPS: what `step_of` returned for the bytes is given,
    # of PAIRS.
    ELEMENT: tl.constexpr = FMT.element
    if PTX and PAIRS:
        pairs = tl.inline_asm_elementwise(
            decode_assembly(FMT, True, STEPS, SMALL),
            _PAIR_CONSTRAINTS,
            [word, byte.to(tl.int32)],
            dtype=(tl.int32,) * 4,
            is_pure=True,
            pack=1,
        )
        values = ()
        for i in tl.static_range(8):
            half = (pairs[i % 4] >> (i // 4 * 16)).to(tl.int16)
            values = values + (half.to(tl.bfloat16, bitcast=True),)
    elif PTX:
        values = tl.inline_asm_elementwise(
            decode_assembly(FMT, False, False, SMALL),
            _CONSTRAINTS,
            [word, byte],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        step = byte if STEPS else step_of(byte, FMT, SMALL)
        values = ()
        for i in tl.static_range(8):
            values = values + (signed_value(word, i, ELEMENT) * step,)
    return values


@triton.jit
def unpack_terms(word, DTYPE: tl.constexpr, TERMS: tl.constexpr):
    """Return the numbers in int64 words, each as TERMS bfloat16 that sum to it."""
    numbers = ()
    if DTYPE == tl.bfloat16:
        for i in tl.static_range(4):
            number = (word >> (16 * i)).to(tl.int16).to(tl.bfloat16, bitcast=True)
            numbers = numbers + ((number,),)
    else:
        values = unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            numbers = numbers + (split(values[i], TERMS),)
    return numbers


@triton.jit
def split(x, TERMS: tl.constexpr):
    """Return float32 numbers as bfloat16 terms, eight bits of the significand each."""
    terms = ()
    for _ in tl.static_range(TERMS):
        term = float_of(bits_of(x) & -65536)
        # Infinity and NaN are in the first term alone.
        rest = tl.where(tl.abs(x) < float("inf"), x - term, 0.0)
        terms = terms + (rounded(tl.where(x == x, term, x), tl.bfloat16),)
        x = rest
    return terms


@triton.jit
def joined(v):
    """Return eight operands as one, [..., 2, 2, 2]: the digits of a place, the highest first."""
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    return tl.join(even, odd)


@triton.jit
def _arrange(
    x, scales, out, zeros, count, zero_count, K: tl.constexpr, FMT: tl.constexpr,
    DTYPE: tl.constexpr, TERMS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP, RELEASES)
    clear(zeros, zero_count)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    arrange_words(x, scales, out, i, count, K, FMT, DTYPE, TERMS, GROUP)


@triton.jit
def arrange_words(
    x, scales, out, i, count, K: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr,
    TERMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sort the columns of words i, int64, of `count`."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    row_words: tl.constexpr = K // 8
    padded: tl.constexpr = (row_words + GROUP - 1) // GROUP * GROUP
    target = out + i // GROUP * (8 * GROUP) + i % GROUP
    source = i // padded * row_words + i % padded
    inside = (i < count) & (i % padded < row_words)
    if scales is None:
        loads: tl.constexpr = DTYPE.primitive_bitwidth // 8
        for j in tl.static_range(loads):
            word = tl.load(x + source * loads + j, mask=inside, other=0)
            numbers = unpack_terms(word, DTYPE, TERMS)
            for c in tl.static_range(len(numbers)):
                for t in tl.static_range(TERMS):
                    at = (j * len(numbers) + c) * GROUP + t * 8 * count.to(tl.int64)
                    tl.store(target + at, numbers[c][t], mask=i < count)
    else:
        word = tl.load(x + source, mask=inside, other=0)
        byte = tl.load(scales + source // (FMT.block // 8), mask=inside, other=0)
        step = decode_scale(byte, SCALE)
        for c in tl.static_range(8):
            value = rounded(signed_value(word, c, ELEMENT) * step, tl.bfloat16)
            tl.store(target + c * GROUP, value, mask=i < count)
