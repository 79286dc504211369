"""Make E4M3 operands: of rows of numbers, alone or as they are computed, and of packed codes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat.torch import has_fp8
from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..common import tiles as kit
from ..dequantize.triton import packed_words, signed_value
from ..linear.decode_triton import joined
from ..linear.matmul_triton import gate_times_up
from ..norm.triton import normal_row, serves
from . import naive

E4M3_LARGEST, LEAST = tl.constexpr(naive.E4M3_MAX), tl.constexpr(naive.SMALLEST)
_MAX_SHIFT, _MANTISSA = tl.constexpr(naive.MAX_SHIFT), tl.constexpr(naive.BELOW_MAX)
_EXPONENT = tl.constexpr(naive.EXPONENT + 127)

# Words of eight columns that a program takes at a time, those that four warps have room for, and
# rows of scales.
_WORDS, _FEW, _ROWS = 2048, 1024, 16


class Rows(NamedTuple):
    """Rows of numbers as E4M3 operands."""

    values: Tensor  # E4M3 [R, K]
    factors: Tensor  # float32 [R], what products are multiplied by


class Powers(NamedTuple):
    """Powers and factors by which a product decodes a packed weight."""

    powers: Tensor  # float32 [N], what codes times scales are multiplied by
    factors: Tensor  # float32 [N], what products are multiplied by


def empty_rows(count: int, k: int, device: torch.device) -> Rows:
    """Return rows [count, k] to be filled."""
    values = torch.empty((count, k), dtype=torch.float8_e4m3fn, device=device)
    return Rows(values, torch.empty(count, dtype=torch.float32, device=device))


def operands(
    x: Tensor | PackedInput | Rows, weight: PackedWeight, fmt: Format, group: int
) -> tuple[Rows, Powers]:
    """Return rows x [M, K] as operands, and the powers of a weight [N, K], made in one launch."""
    # The columns of each `group` words of eight are sorted as decoded codes lie: by their place in
    # a word. Zeros fill the last group.
    m, k = len(x if isinstance(x, Tensor) else x[0]), 2 * weight.packed.shape[1]
    n, words = len(weight.packed), kit.cdiv(k // 8, group) * group
    device = weight.packed.device
    values = torch.empty((m, 8 * words), dtype=torch.float8_e4m3fn, device=device)
    rows = Rows(values, torch.empty(m, dtype=torch.float32, device=device))
    of_weight = Powers(*torch.empty((2, n), dtype=torch.float32, device=device))
    _operands[(m + kit.cdiv(n, _ROWS),)](
        *_read(x), values.view(torch.uint8), rows.factors,
        weight.scale.contiguous(), weight.global_scale, *of_weight, None, m, n, 0,
        K=k, WORDS=words, GROUP=group, FOURS=False, FMT=fmt,
        BLOCKS=triton.next_power_of_2(k // fmt.block), ROWS=_ROWS,
        TILE=min(max(_WORDS, group), triton.next_power_of_2(words)),
        num_warps=4 if words <= _FEW else 8, **kit.launch(device),
    )  # fmt: skip
    return rows, of_weight


def sorted_rows(
    x: Tensor | PackedInput | Rows, k: int, tile: int, fmt: Format, zeros: Tensor | None
) -> Rows:
    """Return rows x [M, K] as operands of `wide_kernel`, fours of columns sorted in each 64."""
    # They lie by their place in sixteen, and zeros fill the last 64. There is room for whole tiles
    # of rows: loading a tile that ends early took up to 1.4 times as long. zeros: int32, set to 0
    # in the same launch.
    first = x if isinstance(x, Tensor) else x[0]
    m, words = len(first), kit.cdiv(k, 64) * 8
    values = torch.empty(
        (kit.cdiv(m, tile) * tile, 8 * words), dtype=torch.float8_e4m3fn, device=first.device
    )
    rows = Rows(values, torch.empty(m, dtype=torch.float32, device=first.device))
    _operands[(m,)](
        *_read(x), values.view(torch.uint8), rows.factors, None, None, None, None, zeros,
        m, 0, 0 if zeros is None else len(zeros), K=k, WORDS=words, GROUP=8, FOURS=True, FMT=fmt,
        BLOCKS=triton.next_power_of_2(k // fmt.block), ROWS=_ROWS,
        TILE=min(_WORDS, triton.next_power_of_2(words)), num_warps=4 if words <= _FEW else 8,
        # The product finds the powers of its weights meanwhile.
        **kit.launch(first.device, True),
    )  # fmt: skip
    return rows


def _read(x: Tensor | PackedInput | Rows) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(x, Rows):
        return x.values.view(torch.uint8), x.factors, None
    if isinstance(x, PackedInput):
        return packed_words(x.packed), x.scale.contiguous(), x.global_scale
    return x, None, None


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
def sorted_bits(bits, TILE: tl.constexpr, GROUP: tl.constexpr, FOURS: tl.constexpr):
    """Return bits [TILE, 8] in the order of `operands`, or, as FOURS, of `sorted_rows`, flat."""
    if FOURS:
        bits = tl.reshape(bits, (TILE // GROUP, GROUP // 2, 4, 4))
        bits = tl.permute(bits, (0, 2, 1, 3))
    else:
        bits = tl.reshape(bits, (TILE // GROUP, GROUP, 8))
        bits = tl.permute(bits, (0, 2, 1))
    return tl.reshape(bits, (8 * TILE,))


@triton.jit
def row_divisor(largest):
    """Return the factor of a row and what `divided` takes, for its largest magnitudes."""
    factor = tl.maximum(tl.math.div_rn(tl.max(largest), E4M3_LARGEST), LEAST)
    # A row with an infinity is NaN where that is, and else 0.
    finite = factor < float("inf")
    inverse = tl.where(finite, tl.math.div_rn(1.0, factor), 0.0)
    return factor, tl.where(finite, factor, 1.0), inverse


@triton.jit
def divided(value, divisor, inverse):
    """Return numbers of a row, divided and rounded to E4M3: bits, uint8."""
    # Quotients below the normal float32 round to zero, whatever they are.
    return kit.e4m3_bits(kit.corrected_quotient(value, divisor, inverse))


@triton.jit
def quantize_row(
    x, out, factor_at, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    FOURS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round a row of numbers to E4M3, read once if TILE words are all of it."""
    column = tl.arange(0, TILE)[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + column, mask=column < K, other=0).to(tl.float32)
    largest = tl.abs(value)
    for start in tl.static_range(TILE * 8, WORDS * 8, TILE * 8):
        value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factor_at, factor)
    for start in tl.static_range(0, WORDS * 8, TILE * 8):
        if WORDS > TILE:
            value = tl.load(x + start + column, mask=start + column < K, other=0).to(tl.float32)
        bits = sorted_bits(divided(value, divisor, inverse), TILE, GROUP, FOURS)
        at = start + tl.arange(0, 8 * TILE)
        tl.store(out + at, bits, mask=at < 8 * WORDS)


@triton.jit
def sort_row(
    x, factor, out, factor_at, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    FOURS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sort the columns of a row that is in E4M3 already."""
    tl.store(factor_at, tl.load(factor))
    column = tl.arange(0, TILE)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for start in tl.static_range(0, WORDS * 8, TILE * 8):
        bits = tl.load(x + start + column, mask=start + column < K, other=0)
        at = start + tl.arange(0, 8 * TILE)
        tl.store(out + at, sorted_bits(bits, TILE, GROUP, FOURS), mask=at < 8 * WORDS)


@triton.jit
def expand_row(
    words, scales, global_scale, out, factor_at, K: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, FOURS: tl.constexpr, FMT: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Round a row of packed codes to E4M3."""
    SCALE: tl.constexpr = FMT.scale
    share: tl.constexpr = FMT.block // 8
    i = tl.arange(0, BLOCKS)
    every = tl.load(scales + i, mask=i < K // FMT.block, other=0)
    shift = shift_from(tl.max(every.to(tl.int32), axis=0), FMT)
    tl.store(factor_at, row_factor(shift, global_scale, FMT))
    by = two_to_the(shift)
    for start in range(0, WORDS, TILE):
        lane = start + tl.arange(0, TILE)
        word = tl.load(words + lane, mask=lane < K // 8, other=0)
        byte = tl.load(scales + lane // share, mask=lane < K // 8, other=0)
        bits = decode_e4m3(word, kit.decode_scale(byte, SCALE) * by, FMT)
        bits = sorted_bits(tl.reshape(joined(bits), (TILE, 8)), TILE, GROUP, FOURS)
        at = start * 8 + tl.arange(0, 8 * TILE)
        tl.store(out + at, bits, mask=at < 8 * WORDS)


@triton.jit(do_not_specialize=["M", "N", "count"])
def _operands(
    x, x_scales, x_global_scale, x_out, x_factors, scales, global_scale, powers, factors, zeros,
    M, N, count,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, FOURS: tl.constexpr,
    FMT: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Make a row of x, or the powers and factors of ROWS rows of the weight."""
    kit.wait(OVERLAP, RELEASES)
    blocks: tl.constexpr = K // FMT.block
    program = tl.program_id(0)
    kit.clear(zeros, count)
    if program < M:
        row = program.to(tl.int64)
        x_out += row * (8 * WORDS)
        if x_scales is None:
            quantize_row(x + row * K, x_out, x_factors + row, K, WORDS, GROUP, FOURS, TILE)
        elif x.dtype.element_ty == tl.uint8:
            sort_row(
                x + row * K, x_scales + row, x_out, x_factors + row, K, WORDS, GROUP, FOURS, TILE
            )
        else:
            expand_row(
                x + row * (K // 8), x_scales + row * blocks, x_global_scale, x_out,
                x_factors + row, K, WORDS, GROUP, FOURS, FMT, BLOCKS, TILE,
            )  # fmt: skip
    elif scales is not None:
        n = (program - M).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        i = tl.arange(0, BLOCKS)
        inside = (n < N)[:, None] & (i < blocks)[None, :]
        byte = tl.load(scales + n[:, None] * blocks + i[None, :], mask=inside, other=0)
        shift = shift_from(tl.max(byte.to(tl.int32), axis=1), FMT)
        tl.store(powers + n, two_to_the(shift), mask=n < N)
        tl.store(factors + n, row_factor(shift, global_scale, FMT), mask=n < N)


# A warp makes a row of codes: a lane reads sixteen, as many as a lane can store at once.
_LANES = 32

# Words of a row whose loads are all under way at once. More take registers that there are not.
_AT_ONCE = 1024


def expanded(
    x: Tensor | PackedInput | Rows, weight: PackedWeight, fmt: Format
) -> tuple[Rows, Rows]:
    """Return rows x [M, K] and a weight [N, K] as operands, their columns in order."""
    weight = weight._replace(packed=kit.wider(weight.packed, torch.int64))
    weight = weight._replace(scale=weight.scale.contiguous())
    rows = x if isinstance(x, Rows) else expand(x, fmt) if isinstance(x, PackedInput) else None
    # While rows of numbers are rounded, which wait for what came before.
    return rows or round_rows(x), expand(weight, fmt, rows is None)


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


def activate_round_triton(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Round the activation of x, times `up`, to E4M3 (`activate_round_ref`)."""
    if x.dtype == torch.float64 or not x.numel() or not _rounds(x.device):
        return naive.activate_round_ref(x, up, activation)
    rows = round_rows(*(each.reshape(-1, x.shape[-1]) for each in (x, up)), activation)
    return rows.values.view(x.shape), rows.factors.view(*x.shape[:-1], 1)


def norm_round_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sum and its RMSNorm, rounded to E4M3 (`norm_round_ref`)."""
    if not serves(x) or not x.numel() or not _rounds(x.device):
        return naive.norm_round_ref(x, residual, weight, eps)
    k = x.shape[-1]
    rows = empty_rows(x.numel() // k, k, x.device)
    total = x.new_empty(0 if residual is None else x.shape)
    block = triton.next_power_of_2(k)
    _norm_round_kernel[(len(rows.values),)](
        x.contiguous(), None if residual is None else residual.contiguous(), weight.contiguous(),
        total, rows.values.view(torch.uint8), rows.factors, eps, K=k, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **kit.launch(x.device),
    )  # fmt: skip
    return total, rows.values.view(x.shape), rows.factors.view(*x.shape[:-1], 1)


def _rounds(device: torch.device) -> bool:
    """Return whether kernels convert to E4M3: on every GPU with it, and in the interpreter."""
    return device.type != "cuda" or has_fp8(device)


def round_rows(x: Tensor, up: Tensor | None = None, activation: str | None = None) -> Rows:
    """Return rows x [M, K], or the activation of x times `up`, as operands; K >= 1."""
    # Rows that are slices of longer ones are read where they are.
    x = x if x.stride(1) == 1 else x.contiguous()
    if up is not None and up.stride(1) != 1:
        up = up.contiguous()
    m, k = x.shape
    found = empty_rows(m, k, x.device)
    warps = min(max(4, triton.next_power_of_2(kit.cdiv(k, _MOST))), 32)
    _round_rows_kernel[(m,)](
        x, up, found.values.view(torch.uint8), found.factors,
        x.stride(0), None if up is None else up.stride(0), K=k, TILE=warps * _COLUMNS,
        ACTIVATION=activation, num_warps=warps, **kit.launch(x.device, True),
    )  # fmt: skip
    return found


@triton.jit
def _round_rows_kernel(
    x, up, out, factors, stride, up_stride,
    K: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Round a row of numbers, or of gates times factors, which are read once."""
    kit.wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    values = ()
    largest = tl.zeros((TILE,), tl.float32)
    for start in tl.static_range(0, K, TILE):
        at = start + column
        value = tl.load(x + row * stride + at, mask=at < K, other=0.0)
        if up is not None:
            beside = tl.load(up + row * up_stride + at, mask=at < K, other=0.0).to(tl.float32)
            product = gate_times_up(value.to(tl.float32), beside, ACTIVATION, DTYPE)
            value = kit.rounded(product, DTYPE)
        values = values + (value,)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factors + row, factor)
    for i in tl.static_range(len(values)):
        at = i * TILE + column
        bits = divided(values[i].to(tl.float32), divisor, inverse)
        tl.store(out + row * K + at, bits, mask=at < K)


@triton.jit
def _norm_round_kernel(
    x, residual, weight, total, out, factors, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """residual: None where there is none; then nothing is written to `total`."""
    column = tl.arange(0, BLOCK)
    inside = column < K
    kit.wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    at = row * K + column
    normal = normal_row(x, residual, weight, total, at, column, inside, eps, K).to(tl.float32)
    factor, divisor, inverse = row_divisor(tl.abs(normal))
    tl.store(factors + row, factor)
    tl.store(out + at, divided(normal, divisor, inverse), mask=inside)


# In `decode_e4m3`: eight times four bytes, four words, four float16.
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))


@triton.constexpr_function
def e4m3_assembly(FMT):
    """Return PTX for `decode_e4m3`: four words of eight codes, and a float16 step for each."""
    # The magnitude of a code of two words stands where a float16 has its low exponent and high
    # mantissa bits: its value times 2^-(14 + min_exponent), subnormals included.
    mantissa_bits, min_exponent = FMT.element.minifloat
    place = 10 - mantissa_bits
    magnitudes = ((1 << FMT.element.bits - 1) - 1 << place) * 0x10001
    grow = (15 + 14 + min_exponent << 10) * 0x10001
    lines = ["{.reg .b32 t, two, u, b<4>, l<2>, h<2>;", ".reg .b16 v<16>;"]
    lines.append(f"mov.b32 two, {grow:#x};")
    for pair in range(2):
        words, step = (f"${8 + 2 * pair}, ${9 + 2 * pair}", f"${12 + pair}")
        for half, selector in enumerate(("0x5410", "0x7632")):
            lines.append(f"prmt.b32 t, {words}, {selector};")
            for code in range(4):
                by = place - 4 * code
                shift = f"shl.b32 u, t, {by};" if by > 0 else f"shr.u32 u, t, {-by};"
                lines += [
                    shift,
                    f"and.b32 u, u, {magnitudes:#x};",
                    "mul.rn.f16x2 u, u, two;",
                    f"mul.rn.f16x2 u, u, {step};",
                    f"cvt.rn.satfinite.e4m3x2.f16x2 v{8 * pair + 4 * half + code}, u;",
                ]
    # Byte b of the four words, whose signs follow the magnitudes.
    lines += [
        "prmt.b32 l0, $8, $9, 0x5140;",
        "prmt.b32 l1, $10, $11, 0x5140;",
        "prmt.b32 h0, $8, $9, 0x7362;",
        "prmt.b32 h1, $10, $11, 0x7362;",
    ]
    for byte in range(4):
        source = "l" if byte < 2 else "h"
        selector = "0x5410" if byte % 2 == 0 else "0x7632"
        lines.append(f"prmt.b32 b{byte}, {source}0, {source}1, {selector};")
    for code in range(8):
        lines += [
            f"mov.b32 ${code}, {{v{code}, v{8 + code}}};",
            f"shl.b32 u, b{code // 2}, 4;" if code % 2 == 0 else f"mov.b32 u, b{code // 2};",
            "and.b32 u, u, 0x80808080;",
            f"or.b32 ${code}, ${code}, u;",
        ]
    return "\n".join([*lines, "}"])


@triton.jit
def decode_e4m3(word, step, FMT: tl.constexpr):
    """Return the eight codes in int32 words times float32 steps, rounded to E4M3: bits, uint8."""
    # A product of code and step is exact in float16 unless E4M3 rounds it to zero.
    ELEMENT: tl.constexpr = FMT.element
    if kit.PTX:
        bits = tl.inline_asm_elementwise(
            e4m3_assembly(FMT), _CONSTRAINTS, [word, step.to(tl.float16)],
            dtype=(tl.uint8,) * 8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        bits = ()
        for i in tl.static_range(8):
            bits = bits + (kit.e4m3_bits(signed_value(word, i, ELEMENT) * step),)
    return bits


@triton.constexpr_function
def float16_bits(value):
    """Return the bits of a float16 that is zero or normal."""
    fraction, exponent = math.frexp(value)
    return (exponent + 14 << 10) + int(2048 * fraction) - 1024 if value else 0


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
        low, high = FMT.element.magnitudes[2 * i : 2 * i + 2]
        lines += [
            f"mov.b32 u, {float16_bits(low) | float16_bits(high) << 16:#x};",
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
    # As in `decode_e4m3`, but each magnitude is rounded once for all codes of a word.
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
                bits = kit.e4m3_bits(signed_value(code, 0, ELEMENT) * step)
                value |= bits.to(tl.int32) << (8 * i)
            four = four + (value,)
    return four


@triton.jit
def operand(bits):
    """Return E4M3 numbers for their bits: float32 in the interpreter, which has no other."""
    if kit.PTX:
        value = bits.to(tl.float8e4nv, bitcast=True)
    else:
        magnitude = bits.to(tl.int32) & 0x7F
        # The bits of a float32 of another bias.
        value = (magnitude << 20).to(tl.float32, bitcast=True) * kit.power(120)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where(bits.to(tl.int32) > 0x7F, -value, value)
    return value
