"""Make the operands of products: decode codes in registers, and sort x to follow their columns.

The PTX that decodes codes is last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common import tiles as kit
from ..dequantize.triton import packed_words, signed_value
from .tiling import TERMS

# Names of the dtypes of `InputRows` in kernels.
_DTYPES = {**kit.DTYPES, torch.float8_e4m3fn: tl.float8e4nv}

# Words to a thread block of `_arrange`.
_BLOCK = 512


class InputRows(NamedTuple):
    """Rows of x as words of numbers of a dtype, or of codes, which have no dtype and scales."""

    # Numbers in E4M3 have factors.

    words: Tensor
    dtype: torch.dtype | None
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    factors: Tensor | None = None  # float32 [M], what products of rows are multiplied by

    @staticmethod
    def of_numbers(x: Tensor) -> InputRows:
        """Return rows of numbers."""
        return InputRows(kit.as_words(x), x.dtype)

    @staticmethod
    def of_e4m3(values: Tensor, factors: Tensor) -> InputRows:
        """Return rows of E4M3 numbers, given as bytes or as numbers."""
        return InputRows(kit.wider(values, torch.int64), torch.float8_e4m3fn, factors=factors)

    @staticmethod
    def of_codes(packed: Tensor, scale: Tensor, global_scale: Tensor | None) -> InputRows:
        """Return rows of packed codes."""
        return InputRows(packed_words(packed), None, scale.contiguous(), global_scale)

    @property
    def terms(self) -> int:
        """Bfloat16 numbers that hold one of x."""
        return 1 if self.dtype is None else TERMS.get(self.dtype, 1)


def arranged(
    x: InputRows, m: int, k: int, group: int, fmt: Format, releases: bool,
    zeros: Tensor | None = None, tile: int = 1,
) -> Tensor:  # fmt: skip
    """Return x in bfloat16 terms, its columns sorted to follow decoded codes: [terms, m, K]."""
    # group: words whose columns are sorted by their place in a word; zeros fill the last group.
    # releases: as `launch` takes it. zeros: int32, set to 0 in the same launch.
    # tile: of one term, room is left for whole tiles of so many rows.
    words = kit.cdiv(k // 8, group) * group
    padded = kit.cdiv(m, tile) * tile
    out = x.words.new_empty((x.terms, padded, 8 * words), dtype=torch.bfloat16)
    _arrange[(kit.cdiv(m * words, _BLOCK),)](
        x.words, x.scale, out, zeros, m * words, 0 if zeros is None else len(zeros),
        K=k, FMT=fmt, DTYPE=None if x.dtype is None else _DTYPES[x.dtype], TERMS=x.terms,
        GROUP=group, BLOCK=_BLOCK, **kit.launch(out.device, releases),
    )  # fmt: skip
    return out


# The dtype of products. The interpreter has no arithmetic on bfloat16; float32 holds the same.
OPERAND = tl.constexpr(tl.bfloat16 if kit.PTX else tl.float32)

# In `decode`: eight times four bfloat16, four words, four bytes.
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 16 + ["r"] * 5))


@triton.jit
def step_of(byte, FMT: tl.constexpr, SMALL: tl.constexpr):
    """Return what `decode` multiplies codes by, for scale bytes: int32, or float32 without PTX."""
    SCALE: tl.constexpr = FMT.scale
    if kit.PTX:
        step = kit.asm(step_assembly(FMT, SMALL), "=r,r", [byte.to(tl.int32)])
    else:
        step = kit.scale_value(byte, SCALE) * kit.power(offset(FMT))
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
    if kit.PTX and PAIRS:
        pairs = tl.inline_asm_elementwise(
            decode_assembly(FMT, True, STEPS, SMALL), "=r,=r,=r,=r,r,r", [word, byte.to(tl.int32)],
            dtype=(tl.int32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
        values = ()
        for i in tl.static_range(8):
            half = (pairs[i % 4] >> (i // 4 * 16)).to(tl.int16)
            values = values + (half.to(tl.bfloat16, bitcast=True),)
    elif kit.PTX:
        values = tl.inline_asm_elementwise(
            decode_assembly(FMT, False, False, SMALL), _CONSTRAINTS, [word, byte],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=4,
        )  # fmt: skip
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
    elif DTYPE == tl.float8e4nv:
        for i in tl.static_range(8):
            value = kit.value_at((word >> (i // 4 * 32)).to(tl.int32), i % 4)
            numbers = numbers + ((kit.rounded(value, tl.bfloat16),),)
    else:
        values = kit.unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            numbers = numbers + (split(values[i], TERMS),)
    return numbers


@triton.jit
def split(x, TERMS: tl.constexpr):
    """Return float32 numbers as bfloat16 terms, eight bits of the significand each."""
    terms = ()
    for _ in tl.static_range(TERMS):
        term = kit.float_of(kit.bits_of(x) & -65536)
        # Infinity and NaN are in the first term alone.
        rest = tl.where(tl.abs(x) < float("inf"), x - term, 0.0)
        terms = terms + (kit.rounded(tl.where(x == x, term, x), tl.bfloat16),)
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
    kit.wait(OVERLAP, RELEASES)
    kit.clear(zeros, zero_count)
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
        step = kit.decode_scale(byte, SCALE)
        for c in tl.static_range(8):
            value = kit.rounded(signed_value(word, c, ELEMENT) * step, tl.bfloat16)
            tl.store(target + c * GROUP, value, mask=i < count)


# Powers of two as scales: the byte of 2, below which a code takes one product instead of two.
LARGE = tl.constexpr(128)


@triton.constexpr_function
def scale_exponent(FMT):
    """Return the exponent by which `decode` multiplies scales with mantissas in bfloat16."""
    return 127 - math.frexp(FMT.scale.max)[1]


@triton.constexpr_function
def offset(FMT):
    """Return the exponent of what `decode` returns beside code * scale."""
    if not FMT.scale.subnormal:
        return 0
    return scale_exponent(FMT) - 126 - FMT.element.minifloat[1]


@triton.constexpr_function
def small_scales(FMT):
    """Return whether `decode` is faster for scales below 2."""
    return not FMT.scale.subnormal


@triton.constexpr_function
def code_lines(FMT, results, step=None, rescales=False):
    """Return PTX for four codes of both halves of t as bfloat16, times the register `step`."""
    # A product copies a code, so that one copy has the sign and the other the low exponent and high
    # mantissa bits where a bfloat16 has them: a number 2^-(126 + min_exponent) times the code's
    # value, subnormals included. Scales are read likewise.
    place = 7 - FMT.element.minifloat[0]
    magnitudes = (1 << FMT.element.bits - 1) - 1
    lines = []
    for code, result in enumerate(results):
        at = code % 2 * 4
        number = result if step is None else "u"
        lines += ["shr.b32 t, t, 8;"] * (code == 2) + [
            f"and.b32 u, t, {((1 << FMT.element.bits) - 1 << at) * 0x10001:#x};",
            f"mul.lo.u32 u, u, {(1 << 12 - at) + (1 << place - at)};",
            f"and.b32 {number}, u, {(0x8000 | magnitudes << place) * 0x10001:#x};",
        ]
        if rescales:
            lines.append(times("u", "u", "two"))
        if step is not None:
            lines.append(times(result, "u", step))
    return lines


@triton.constexpr_function
def decode_assembly(FMT, PAIRS, STEPS, SMALL):
    """Return PTX for `decode`: four words of eight codes with a scale byte each, or one word."""
    # PAIRS, STEPS, SMALL: as `decode` takes them.
    rescales = not FMT.scale.subnormal and not SMALL
    lines = ["{.reg .b32 t, s<2>, u, two, zero;", "mov.b32 zero, 0x80008000;"]
    if PAIRS:
        lines += ["mov.b32 s0, $5;"] if STEPS else step_lines(FMT, "s0", "$5", SMALL)
        halves = [("mov.b32 t, $4;", 0, range(4))]
    else:
        for i in range(2):
            lines.append(f"prmt.b32 s{i}, $20, 0, {0x4140 + 0x202 * i:#x};")
            if SMALL:
                lines.append(small_line(FMT, f"s{i}", f"s{i}", 1))
                continue
            lines.append(f"shl.b32 s{i}, s{i}, {7 - FMT.scale.mantissa_bits};")
            if rescales:
                lines += [f"sub.u32 u, 0x80008000, s{i};", "and.b32 u, u, 0x80008000;"]
                lines += ["shr.b32 u, u, 9;", f"or.b32 s{i}, s{i}, u;"]
        if not SMALL:
            lines += normal_lines(FMT, "s0") + normal_lines(FMT, "s1")
        # Half of one word beside the same half of the next.
        halves = [
            (f"prmt.b32 t, ${16 + 2 * i}, ${17 + 2 * i}, {half};", i, range(start, start + 8, 2))
            for i in range(2)
            for half, start in (("0x5410", i), ("0x7632", 8 + i))
        ]
    if rescales:
        lines.append(two_to(126 + FMT.element.minifloat[1]))
    for load, i, results in halves:
        lines += [load, *code_lines(FMT, [f"${each}" for each in results], f"s{i}", rescales)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def wide_assembly(FMT):
    """Return PTX for sixteen codes times their scale byte: the codes i and i + 8 as bfloat16."""
    # As `decode_assembly`, whose numbers these are, of two words side by side.
    rescales = not FMT.scale.subnormal
    lines = ["{.reg .b32 t, s0, u, two, zero, w0, w1;", "mov.b32 zero, 0x80008000;"]
    lines += ["mov.b64 {w0, w1}, $8;", *step_lines(FMT, "s0", "$9", False)]
    if rescales:
        lines.append(two_to(126 + FMT.element.minifloat[1]))
    for half, start in (("0x5410", 0), ("0x7632", 4)):
        lines.append(f"prmt.b32 t, w0, w1, {half};")
        lines += code_lines(FMT, [f"${start + i}" for i in range(4)], "s0", rescales)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def scale_assembly(FMT):
    """Return PTX for the float32 of a scale byte."""
    if FMT.scale.mantissa_bits == 0:
        # Byte 0 is half of byte 1, a subnormal float32, and 255 is NaN.
        return (
            "{.reg .b32 s; .reg .pred p; setp.eq.u32 p, $1, 255; shl.b32 s, $1, 23; "
            "max.u32 s, s, 0x400000; selp.b32 s, 0x7fc00000, s, p; mov.b32 $0, s;}"
        )
    return (
        "{.reg .b16 t, a, b; .reg .b32 u; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 u, t; "
        "mov.b32 {a, b}, u; cvt.f32.f16 $0, a;}"
    )


@triton.constexpr_function
def step_assembly(FMT, SMALL):
    """Return PTX for `step_of`."""
    lines = ["{.reg .b32 s, two, zero;", "mov.b32 zero, 0x80008000;"]
    return "\n".join([*lines, *step_lines(FMT, "s", "$1", SMALL), "mov.b32 $0, s;}"])


@triton.constexpr_function
def step_lines(FMT, name, byte, SMALL):
    """Return PTX for a scale byte as two bfloat16."""
    if SMALL:
        return [small_line(FMT, name, byte, 0x10001)]
    place = 7 - FMT.scale.mantissa_bits
    if FMT.scale.subnormal:
        lines = [f"mul.lo.u32 {name}, {byte}, {0x10001 << place:#x};"]
    else:
        # Byte 0 is half of byte 1: a subnormal bfloat16.
        lines = [f"shl.b32 {name}, {byte}, {place};", f"max.u32 {name}, {name}, 0x40;"]
        lines.append(f"mul.lo.u32 {name}, {name}, 0x10001;")
    return lines + normal_lines(FMT, name)


@triton.constexpr_function
def small_line(FMT, name, byte, copies):
    """Return PTX for scales below 2 that are powers of two, times what a code's bits lack."""
    # 2^(byte - 127) times 2^(126 + min_exponent) is a bfloat16 then, for byte 0 too.
    lacking = (126 + FMT.element.minifloat[1] << 7) * 0x10001
    return f"mad.lo.u32 {name}, {byte}, {copies << 7:#x}, {lacking:#x};"


@triton.constexpr_function
def normal_lines(FMT, name):
    """Return PTX that multiplies scales with mantissas so that products of codes are normal."""
    if not FMT.scale.subnormal:
        return []
    rest = scale_exponent(FMT) + 127 - FMT.scale.bias - 127
    return [line for e in (127, rest) for line in (two_to(e), times(name, name, "two"))]


@triton.constexpr_function
def times(to, a, b):
    """Return PTX for a product of bfloat16 pairs."""
    # sm_80 has no product of bfloat16 pairs, but this; -0 keeps the sign of zeros.
    return f"fma.rn.bf16x2 {to}, {a}, {b}, zero;"


@triton.constexpr_function
def two_to(exponent):
    """Return PTX that makes `two` a power of two, twice."""
    return f"mov.b32 two, {(exponent + 127 << 7) * 0x10001:#x};"
