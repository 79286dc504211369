"""Make E4M3 operands: of rows of numbers, and of packed codes."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import E4M3, Format
from ...core.packing import PackedInput, PackedWeight
from ..common import tiles as kit
from ..dequantize.triton import signed_value
from .naive import BELOW_MAX, E4M3_MAX, EXPONENT, MAX_SHIFT, SMALLEST

_LARGEST, _LEAST, _MAX_SHIFT = map(tl.constexpr, (E4M3_MAX, SMALLEST, MAX_SHIFT))
_EXPONENT, _MANTISSA = tl.constexpr(EXPONENT + 127), tl.constexpr(BELOW_MAX)

# Words of eight columns that a program takes at a time, and those that four warps have room for.
_WORDS, _FEW = 2048, 1024


class Rows(NamedTuple):
    """Rows of numbers as E4M3 operands."""

    values: Tensor  # E4M3 [R, K]
    factors: Tensor  # float32 [R], what products are multiplied by


def empty_rows(count: int, k: int, device: torch.device) -> Rows:
    """Return rows [count, k] to be filled."""
    values = torch.empty((count, k), dtype=torch.float8_e4m3fn, device=device)
    return Rows(values, torch.empty(len(values), dtype=torch.float32, device=device))


def sorted_rows(x: Tensor, tile: int, zeros: Tensor | None) -> Rows:
    """Return rows x [M, K] as operands of `wide_kernel`, fours of columns sorted in each 64.

    They lie by their place in sixteen, and zeros fill the last 64. There is room for whole tiles of
    rows: loading a tile that ends early took up to 1.4 times as long. zeros: int32, set to 0 in the
    same launch.
    """
    (m, k), words = x.shape, kit.cdiv(x.shape[1], 64) * 8
    rows = empty_rows(kit.cdiv(m, tile) * tile, 8 * words, x.device)
    _sort_rows_kernel[(m,)](
        x, rows.values.view(torch.uint8), rows.factors, zeros, 0 if zeros is None else len(zeros),
        K=k, WORDS=words, TILE=min(_WORDS, triton.next_power_of_2(words)),
        # The product finds the powers of its weights meanwhile.
        num_warps=4 if words <= _FEW else 8, **kit.launch(x.device, True),
    )  # fmt: skip
    return rows


@triton.jit
def shift_from(largest, FMT: tl.constexpr):
    """Return the exponent of `shift_of` for the largest scale bytes of rows, int32."""
    SCALE: tl.constexpr = FMT.scale
    bits = kit.bits_of(kit.scale_value(largest, SCALE) * FMT.element.max)
    exponent = (bits + _MANTISSA) >> 23
    # The interpreter of Triton 3.8 takes no difference of a constant for an argument.
    shift = _EXPONENT - exponent
    return tl.minimum(tl.maximum(shift, -_MAX_SHIFT), _MAX_SHIFT)


@triton.jit
def two_to_the(exponent):
    """Return 2^exponent as float32, for int32 exponents in [-126, 127]."""
    return kit.float_of((exponent + 127) << 23)


@triton.jit
def row_factor(shift, global_scale, FMT: tl.constexpr):
    """Return what the E4M3 numbers of a row are multiplied by."""
    factor = two_to_the(-shift)
    if global_scale is not None:
        factor *= kit.global_multiplier(global_scale, FMT)
    return factor


@triton.jit
def row_divisor(largest):
    """Return the factor of a row, and its divisor and its inverse, for its largest magnitudes."""
    # Quotients below the normal float32 round to zero, whatever they are.
    factor = tl.maximum(tl.math.div_rn(tl.max(largest), _LARGEST), _LEAST)
    # A row with an infinity is NaN where that is, and else 0.
    finite = factor < float("inf")
    inverse = tl.where(finite, tl.math.div_rn(1.0, factor), 0.0)
    return factor, tl.where(finite, factor, 1.0), inverse


@triton.jit(do_not_specialize=["count"])
def _sort_rows_kernel(
    x, out, factors, zeros, count, K: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Make a row of x, read once if TILE words are all of it."""
    kit.wait(OVERLAP, RELEASES)
    kit.clear(zeros, count)
    row = tl.program_id(0).to(tl.int64)
    out += row * (8 * WORDS)
    x += row * K
    column = tl.arange(0, TILE)[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + column, mask=column < K, other=0).to(tl.float32)
    largest = tl.abs(value)
    for start in tl.static_range(TILE * 8, WORDS * 8, TILE * 8):
        value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factors + row, factor)
    for start in tl.static_range(0, WORDS * 8, TILE * 8):
        if WORDS > TILE:
            value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        bits = e4m3_bits(kit.corrected_quotient(value, divisor, inverse))
        bits = tl.reshape(bits, (TILE // 8, 4, 4, 4))
        bits = tl.reshape(tl.permute(bits, (0, 2, 1, 3)), (8 * TILE,))
        at = start + tl.arange(0, 8 * TILE)
        tl.store(out + at, bits, mask=at < 8 * WORDS)


# A warp makes a row of codes: a lane reads sixteen, as many as a lane can store at once.
_LANES = 32

# Words of a row whose loads are all under way at once. More take registers that there are not.
_AT_ONCE = 1024


def expanded(x: Tensor | PackedInput, weight: PackedWeight, fmt: Format) -> tuple[Rows, Rows]:
    """Return rows x [M, K] and a weight [N, K] as operands, their columns in order."""
    weight = weight._replace(packed=kit.wider(weight.packed, torch.int64))
    weight = weight._replace(scale=weight.scale.contiguous())
    rows = expand(x, fmt) if isinstance(x, PackedInput) else round_rows(x)
    # While rows of numbers are rounded, which wait for what came before.
    return rows, expand(weight, fmt, not isinstance(x, PackedInput))


def expand(packed: PackedInput | PackedWeight, fmt: Format, beside: bool = False) -> Rows:
    """Return packed rows [R, K] as operands; beside: made while the kernel before runs."""
    codes = kit.wider(packed.packed, torch.int64)
    n, k = len(codes), 16 * codes.shape[1]
    found = empty_rows(n, k, codes.device)
    _expand_rows_kernel[(n,)](
        codes, packed.scale.contiguous(), packed.global_scale,
        found.values.view(torch.int32), found.factors, K=k, FMT=fmt, LANES=_LANES,
        AT_ONCE=_AT_ONCE, BESIDE=beside, num_warps=1, **kit.launch(codes.device),
    )  # fmt: skip
    return found


@triton.jit
def _store_some(
    out, at, word, byte, by, row_words: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr
):
    """Store words of sixteen codes, rounded."""
    SCALE: tl.constexpr = FMT.scale
    four = decode_sixteen(word, kit.decode_scale(byte, SCALE) * by, FMT)
    value = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    at = at[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = tl.reshape(value, at.shape)
    if WHOLE:
        tl.store(out + at, value)
    else:
        tl.store(out + at, value, mask=at < 4 * row_words)


@triton.jit
def _expand_rows_kernel(
    words, scales, global_scale, out, factors, K: tl.constexpr, FMT: tl.constexpr,
    LANES: tl.constexpr, AT_ONCE: tl.constexpr, BESIDE: tl.constexpr, OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    """Round a row of codes, in int64 words of sixteen."""
    if not BESIDE:
        kit.wait(OVERLAP, RELEASES)
    share: tl.constexpr = FMT.block // 16
    row_words: tl.constexpr = K // 16
    lane = tl.arange(0, LANES)
    row = tl.program_id(0).to(tl.int64)
    words += row * row_words
    scales += row * (K // FMT.block)
    out += row * (K // 4)
    if row_words <= AT_ONCE:
        # All of the row is under way before its scales are looked through.
        word = ()
        byte = ()
        for start in tl.static_range(0, row_words, LANES):
            at = start + lane
            inside = at < row_words
            word = word + (kit.load(words + at, inside, start + LANES <= row_words),)
            byte = byte + (kit.load(scales + at // share, inside, start + LANES <= row_words),)
        largest = byte[0].to(tl.int32)
        for i in tl.static_range(1, len(byte)):
            largest = tl.maximum(largest, byte[i].to(tl.int32))
        shift = shift_from(tl.max(largest, axis=0), FMT)
        tl.store(factors + row, row_factor(shift, global_scale, FMT))
        by = two_to_the(shift)
        for i in tl.static_range(len(word)):
            _store_some(
                out, i * LANES + lane, word[i], byte[i], by, row_words, FMT,
                (i + 1) * LANES <= row_words,
            )  # fmt: skip
    else:
        column = tl.arange(0, 32 * LANES)
        largest = tl.zeros((32 * LANES,), tl.int32)
        for start in range(0, K // FMT.block, 32 * LANES):
            at = start + column
            byte = tl.load(scales + at, mask=at < K // FMT.block, other=0)
            largest = tl.maximum(largest, byte.to(tl.int32))
        shift = shift_from(tl.max(largest, axis=0), FMT)
        tl.store(factors + row, row_factor(shift, global_scale, FMT))
        by = two_to_the(shift)
        for start in range(0, row_words, LANES):
            at = start + lane
            word = tl.load(words + at, mask=at < row_words, other=0)
            byte = tl.load(scales + at // share, mask=at < row_words, other=0)
            _store_some(out, at, word, byte, by, row_words, FMT, False)
    if BESIDE:
        # The kernel behind this one reads the results of the one before, too.
        kit.wait(OVERLAP, RELEASES)


# Columns of x that a warp takes at a time, and those that it has room for.
_COLUMNS, _MOST = 256, 2048


def round_rows(x: Tensor) -> Rows:
    """Return rows x [M, K] as operands; K >= 1."""
    # Rows that are slices of longer ones are read where they are.
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    found = empty_rows(m, k, x.device)
    warps = min(max(4, triton.next_power_of_2(kit.cdiv(k, _MOST))), 32)
    _round_rows_kernel[(m,)](
        x, found.values.view(torch.uint8), found.factors, x.stride(0),
        K=k, TILE=warps * _COLUMNS, num_warps=warps, **kit.launch(x.device, True),
    )  # fmt: skip
    return found


@triton.jit
def _round_rows_kernel(
    x, out, factors, stride, K: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Round a row of numbers, which are read once."""
    kit.wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    values = ()
    largest = tl.zeros((TILE,), tl.float32)
    for start in tl.static_range(0, K, TILE):
        at = start + column
        value = tl.load(x + row * stride + at, mask=at < K, other=0.0)
        values = values + (value,)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factors + row, factor)
    for i in tl.static_range(len(values)):
        at = i * TILE + column
        value = values[i].to(tl.float32)
        bits = e4m3_bits(kit.corrected_quotient(value, divisor, inverse))
        tl.store(out + row * K + at, bits, mask=at < K)


_E4M3 = tl.constexpr(E4M3)


@triton.constexpr_function
def table_assembly(FMT):
    """Return PTX for `decode_sixteen`: a word of sixteen codes and their float32 step."""
    lines = [
        "{.reg .b32 u, m, a, q, eights, s0, s1, w0, w1, step;",
        ".reg .b16 c<4>;",
        "mov.b32 eights, 0x80808080;",
        "mov.b64 {w0, w1}, $4;",
        "cvt.rn.f16x2.f32 step, $5, $5;",
    ]
    # A code without its sign selects the byte of s0 and s1 that its magnitude becomes.
    for i in range(4):
        both = struct.pack("<2e", *FMT.element.magnitudes[2 * i : 2 * i + 2])
        lines += [
            f"mov.b32 u, {int.from_bytes(both, 'little'):#x};",
            "mul.rn.f16x2 u, u, step;",
            f"cvt.rn.satfinite.e4m3x2.f16x2 c{i}, u;",
        ]
    lines += ["mov.b32 s0, {c0, c1};", "mov.b32 s1, {c2, c3};"]
    for quarter in range(4):
        word = f"w{quarter // 2}"
        codes = word
        if quarter % 2:
            lines += [f"shr.u32 u, {word}, 16;", "shr.u32 m, m, 16;"]
            codes = "u"
        else:
            lines.append(f"and.b32 m, {word}, 0x77777777;")
        lines += [
            "prmt.b32 a, s0, s1, m;",
            # A code with a sign selects the sign of 0x80 eight times, others 0x80: shifted, a sign.
            f"prmt.b32 q, eights, eights, {codes};",
            "shl.b32 q, q, 1;",
            f"lop3.b32 ${quarter}, q, eights, a, 0xEA;",
        ]
    return "\n".join([*lines, "}"])


@triton.jit
def decode_sixteen(word, step, FMT: tl.constexpr):
    """Return the codes in int64 words times float32 steps as E4M3, in order: four int32."""
    # A product of code and step is exact in float16 unless E4M3 rounds it to zero. A magnitude is
    # rounded once for all codes of a word.
    ELEMENT: tl.constexpr = FMT.element
    if kit.PTX:
        four = tl.inline_asm_elementwise(
            table_assembly(FMT), "=r,=r,=r,=r,l,f", [word, step],
            dtype=(tl.int32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        four = ()
        for quarter in tl.static_range(4):
            value = tl.zeros_like(step).to(tl.int32)
            for i in tl.static_range(4):
                code = (word >> (16 * quarter + 4 * i)).to(tl.int32)
                bits = e4m3_bits(signed_value(code, 0, ELEMENT) * step)
                value |= bits.to(tl.int32) << (8 * i)
            four = four + (value,)
    return four


@triton.jit
def e4m3_bits(x):
    """Return float32 x, at most 448 in size or NaN, rounded to E4M3: its bits, uint8."""
    if kit.PTX:
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # The interpreter's own conversion rounds ties away.
        magnitude = kit.round_to_scale(tl.abs(x), _E4M3.value)
        bits = tl.where(x == x, magnitude | ((kit.bits_of(x) >> 24) & 0x80), 0x7F).to(tl.uint8)
    return bits
