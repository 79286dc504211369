"""Linear layers on packed weights, on a GPU: few rows in one kernel, many through a dense weight."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .dequantize_ref import dequantize_ref
from .dequantize_triton import dequantize_triton, packed_words
from .tiles import LAUNCH, PTX, as_words, bits_of, code_value, float_of, min_exponent, power
from .tiles import rounded, scale_value, unpack_word


def linear_triton(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """x @ W^T + bias: x [..., K], packed [N, K / 2] -> [..., N] in x's dtype."""
    raise NotImplementedError


# What is multiplied. The interpreter knows no arithmetic of bfloat16; float32 holds the same.
OPERAND = tl.constexpr(tl.bfloat16 if PTX else tl.float32)

# Of the assembly in `decode`: 16 times four bfloat16, four words, four bytes.
_OPERANDS = tl.constexpr(",".join(["=r"] * 32 + ["l"] * 4 + ["r"]))


@triton.constexpr_function
def lift(FMT):
    """The exponent that scales are multiplied by, so that they meet codes read as bfloat16 bits."""
    return 127 - math.frexp(FMT.scale.max)[1] if FMT.scale.subnormal else 0


@triton.constexpr_function
def offset(FMT):
    """The exponent by which `decode` is off: its values are code * scale * 2^offset."""
    return lift(FMT) - 126 - FMT.element.minifloat[1] if FMT.scale.subnormal else 0


@triton.constexpr_function
def decode_asm(FMT):
    """PTX that decodes four words of 16 codes with a scale byte each.

    A nibble is read as the sign and the low exponent and high mantissa bits of a bfloat16, a
    number 2^-(126 + min_exponent) times its value, subnormals included.
    """
    place = 7 - FMT.element.minifloat[0]
    mask = 0x70007 << place
    rebias = 126 + FMT.element.minifloat[1]
    lines = [
        "{.reg .b32 a<8>, t<4>, s<2>, u, v, zero, one;",
        "mov.b32 zero, 0x80008000;",
        "prmt.b32 s0, $36, 0, 0x4140;",
        "prmt.b32 s1, $36, 0, 0x4342;",
    ]
    for i in range(4):
        lines.append(f"mov.b64 {{a{2 * i}, a{2 * i + 1}}}, ${32 + i};")

    def constant(exponent):
        return f"mov.b32 one, {(exponent + 127 << 7) * 0x10001:#x};"

    for i in range(2):
        if FMT.scale.subnormal:
            up = 127 - FMT.scale.bias + 127 - math.frexp(FMT.scale.max)[1]
            lines += [
                f"shl.b32 s{i}, s{i}, {7 - FMT.scale.mantissa_bits};",
                constant(127),
                f"fma.rn.bf16x2 s{i}, s{i}, one, zero;",
                constant(up - 127),
                f"fma.rn.bf16x2 s{i}, s{i}, one, zero;",
            ]
        else:
            lines += [
                f"add.u32 u, s{i}, 0x00FF00FF;",
                "lop3.b32 u, u, 0x01000100, 0, 0x30;",
                "and.b32 u, u, 0x01000100;",
                "shr.b32 u, u, 2;",
                f"shl.b32 v, s{i}, 7;",
                f"or.b32 s{i}, u, v;",
                constant(rebias),
            ]
    for i in range(2):
        for half in range(2):
            for part, select in enumerate((0x5410, 0x7632)):
                lines.append(
                    f"prmt.b32 t{2 * half + part}, a{4 * i + half}, a{4 * i + 2 + half}, {select:#x};"
                )
        for n in range(16):
            word, up = f"t{n // 4}", 12 - 4 * (n % 4)
            move = up - 12 + place
            lines.append(f"shl.b32 u, {word}, {up};")
            lines.append(f"sh{'l' if move > 0 else 'r'}.b32 v, {word}, {abs(move)};")
            lines.append(f"and.b32 v, v, {mask:#x};")
            lines.append("lop3.b32 u, u, 0x80008000, v, 0xEA;")
            if not FMT.scale.subnormal:
                lines.append("fma.rn.bf16x2 u, u, one, zero;")
            lines.append(f"fma.rn.bf16x2 ${2 * n + i}, u, s{i}, zero;")
    return "\n".join([*lines, "}"])


@triton.jit
def decode(word, byte, FMT: tl.constexpr):
    """The codes in int64 words, times the scales of their blocks, times 2^offset: 16 bfloat16."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    if PTX:
        values = tl.inline_asm_elementwise(
            decode_asm(FMT),
            _OPERANDS,
            [word, byte],
            dtype=(tl.bfloat16,) * 16,
            is_pure=True,
            pack=4,
        )
    else:
        step = scale_value(byte, SCALE) * power(offset(FMT))
        values = ()
        for i in tl.static_range(16):
            code = (word >> (4 * i)).to(tl.int32)
            value = float_of(bits_of(code_value(code & 7, ELEMENT)) | ((code & 8) << 28))
            values = values + ((value * step).to(OPERAND),)
    return values


@triton.constexpr_function
def count_terms(DTYPE):
    """How many bfloat16 hold the significand of a dtype."""
    return -(-(DTYPE.fp_mantissa_width + 1) // 8)


@triton.jit
def terms(word, DTYPE: tl.constexpr):
    """The numbers in int64 words, each as a tuple of operands that sum to it."""
    numbers = ()
    if PTX and DTYPE == tl.bfloat16:
        for i in tl.static_range(4):
            number = (word >> (16 * i)).to(tl.int16).to(tl.bfloat16, bitcast=True)
            numbers = numbers + ((number,),)
    else:
        values = unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            numbers = numbers + (split(values[i], count_terms(DTYPE)),)
    return numbers


@triton.jit
def split(x, COUNT: tl.constexpr):
    """Float32 numbers as COUNT bfloat16 each, 8 bits of the significand at a time."""
    parts = ()
    for _ in tl.static_range(COUNT):
        part = float_of(bits_of(x) & -65536)
        parts = parts + (part.to(OPERAND),)
        # Infinity and NaN are in the first part alone.
        x = tl.where(tl.abs(x) < float("inf"), x - part, 0.0)
    return parts


@triton.jit
def _linear(
    x,
    words,
    scales,
    x_divisor,
    divisor,
    bias,
    out,
    M,
    N,
    K: tl.constexpr,
    FMT: tl.constexpr,
    DTYPE: tl.constexpr,
    ONE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WARPS_K: tl.constexpr,
    WORDS: tl.constexpr,
    EVICT: tl.constexpr,
):
    row_words: tl.constexpr = K // 16
    x_words: tl.constexpr = DTYPE.primitive_bitwidth // 4
    step_words: tl.constexpr = WARPS_K * WORDS
    whole: tl.constexpr = row_words % step_words == 0
    # Words of 16 codes to a scale.
    share: tl.constexpr = FMT.block // 16
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    x_row = tl.minimum(m, M - 1)[None, None, :] * (row_words * x_words)
    warp = tl.arange(0, WARPS_K)[:, None]
    column = warp * WORDS + tl.arange(0, WORDS)[None, :]
    scale_column = warp * (WORDS // share) + tl.arange(0, WORDS // share)[None, :]
    acc = tl.zeros((WARPS_K, BN, BM), tl.float32)
    for start in range(0, row_words, step_words):
        k = start + column
        k_scale = start // share + scale_column
        weight_at = row * row_words + k[:, None, :]
        scale_at = row * (row_words // share) + k_scale[:, None, :]
        x_at = k * x_words if ONE else x_row + k[:, :, None] * x_words
        if whole:
            word = tl.load(words + weight_at, eviction_policy=EVICT)
            byte = tl.load(scales + scale_at, eviction_policy=EVICT)
        else:
            word = tl.load(words + weight_at, mask=(k < row_words)[:, None, :], other=0)
            here = (k_scale < row_words // share)[:, None, :]
            byte = tl.load(scales + scale_at, mask=here, other=0)
        byte = tl.broadcast_to(byte[:, :, :, None], (WARPS_K, BN, WORDS // share, share))
        byte = tl.reshape(byte, (WARPS_K, BN, WORDS))
        weights = decode(word, byte, FMT)
        for i in tl.static_range(x_words):
            if whole:
                x_word = tl.load(x + x_at + i)
            elif ONE:
                x_word = tl.load(x + x_at + i, mask=k < row_words, other=0)
            else:
                x_word = tl.load(x + x_at + i, mask=(k < row_words)[:, :, None], other=0)
            numbers = terms(x_word, DTYPE)
            for j in tl.static_range(len(numbers)):
                for part in tl.static_range(len(numbers[j])):
                    term = numbers[j][part]
                    if ONE:
                        term = tl.broadcast_to(term[:, :, None], (WARPS_K, WORDS, BM))
                    acc = tl.dot(weights[i * len(numbers) + j], term, acc)
    y = tl.sum(acc, axis=0) * power(-offset(FMT))
    if divisor is not None:
        y *= tl.math.div_rn(1.0, tl.load(divisor))
    if x_divisor is not None:
        y *= tl.math.div_rn(1.0, tl.load(x_divisor))
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])
