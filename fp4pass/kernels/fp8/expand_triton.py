"""Round rows to E4M3 with their factors, for products of two dense operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..common.tiles import LAUNCH, cdiv, decode_scale, overlapping, rounded, wait, wider
from ..linear.around_triton import gate_times_up
from .decode_triton import decode_sixteen
from .operands_triton import Rows, divided, row_divisor, row_factor, shift_from, two_to_the

# Columns of x that a warp takes at a time, and those that it has room for.
_COLUMNS, _MOST = 256, 2048

# A warp makes a row of codes: a lane reads sixteen, as many as a lane can store at once.
_LANES = 32

# Words of a row whose loads are all under way at once. More take registers that there are not.
_AT_ONCE = 1024


def expanded(x: Tensor | PackedInput, weight: PackedWeight, fmt: Format) -> tuple[Rows, Rows]:
    """Return rows x [M, K] and a weight [N, K] as operands, their columns in order."""
    weight = weight._replace(packed=wider(weight.packed, torch.int64))
    weight = weight._replace(scale=weight.scale.contiguous())
    rows = expand(x, fmt) if isinstance(x, PackedInput) else round_rows(x)
    # While rows of numbers are rounded, which wait for what came before.
    return rows, expand(weight, fmt, not isinstance(x, PackedInput))


def _rows(count: int, k: int, device: torch.device) -> Rows:
    values = torch.empty((count, k), dtype=torch.float8_e4m3fn, device=device)
    return Rows(values, torch.empty(count, dtype=torch.float32, device=device))


def round_rows(x: Tensor, up: Tensor | None = None, activation: str | None = None) -> Rows:
    """Return rows x [M, K], or the activation of x times `up`, as operands; K >= 1."""
    # Rows that are slices of longer ones are read where they are.
    x, *factor = (
        each if each.stride(1) == 1 else each.contiguous() for each in (x, up) if each is not None
    )
    m, k = x.shape
    found, up = _rows(m, k, x.device), factor[0] if factor else None
    warps = min(max(4, triton.next_power_of_2(cdiv(k, _MOST))), 32)
    _round_rows_kernel[(m,)](
        x, up, found.values.view(torch.uint8), found.factors,
        x.stride(0), None if up is None else up.stride(0), K=k, TILE=warps * _COLUMNS,
        ACTIVATION=activation, num_warps=warps, **LAUNCH, **overlapping(x.device, True),
    )  # fmt: skip
    return found


def expand(packed: PackedInput | PackedWeight, fmt: Format, beside: bool = False) -> Rows:
    """Return packed rows [R, K] as operands; beside: made while the kernel before runs."""
    codes = wider(packed.packed, torch.int64)
    n, k = len(codes), 16 * codes.shape[1]
    found = _rows(n, k, codes.device)
    _expand_rows_kernel[(n,)](
        codes, packed.scale.contiguous(), packed.global_scale,
        found.values.view(torch.int32), found.factors, K=k, FMT=fmt, LANES=_LANES,
        AT_ONCE=_AT_ONCE, BESIDE=beside, num_warps=1, **LAUNCH, **overlapping(codes.device, False),
    )  # fmt: skip
    return found


@triton.jit
def _round_rows_kernel(
    x, up, out, factors, stride, up_stride,
    K: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Round a row of numbers, or of gates times factors, which are read once."""
    wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    values = ()
    largest = tl.zeros((TILE,), tl.float32)
    for start in tl.static_range(0, K, TILE):
        at = start + column
        value = tl.load(x + row * stride + at, mask=at < K, other=0.0)
        if up is not None:
            factor = tl.load(up + row * up_stride + at, mask=at < K, other=0.0).to(tl.float32)
            product = gate_times_up(value.to(tl.float32), factor, ACTIVATION, DTYPE)
            value = rounded(product, DTYPE)
        values = values + (value,)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    factor, divisor, inverse = row_divisor(largest)
    tl.store(factors + row, factor)
    for i in tl.static_range(len(values)):
        at = i * TILE + column
        bits = divided(values[i].to(tl.float32), divisor, inverse)
        tl.store(out + row * K + at, bits, mask=at < K)


@triton.jit
def _load_some(
    words, scales, at, row_words: tl.constexpr, share: tl.constexpr, WHOLE: tl.constexpr
):
    """Load words of sixteen codes and their scale bytes; WHOLE: none is beyond the row."""
    if WHOLE:
        word = tl.load(words + at)
        byte = tl.load(scales + at // share)
    else:
        word = tl.load(words + at, mask=at < row_words, other=0)
        byte = tl.load(scales + at // share, mask=at < row_words, other=0)
    return word, byte


@triton.jit
def _store_some(
    out, at, word, byte, by, row_words: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr
):
    """Store words of sixteen codes, rounded."""
    SCALE: tl.constexpr = FMT.scale
    four = decode_sixteen(word, decode_scale(byte, SCALE) * by, FMT)
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
        wait(OVERLAP, RELEASES)
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
            some = _load_some(
                words, scales, start + lane, row_words, share, start + LANES <= row_words
            )
            word = word + (some[0],)
            byte = byte + (some[1],)
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
            word, byte = _load_some(words, scales, start + lane, row_words, share, False)
            _store_some(out, start + lane, word, byte, by, row_words, FMT, False)
    if BESIDE:
        # The kernel behind this one reads the results of the one before, too.
        wait(OVERLAP, RELEASES)
