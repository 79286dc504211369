"""Expand packed rows to E4M3 with their factors, for products of two dense operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..common.tiles import LAUNCH, decode_scale, overlapping, wait, wider
from .decode_triton import decode_sixteen
from .operands_triton import Rows, empty_rows, row_factor, shift_from, two_to_the
from .round_triton import round_rows

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


def expand(packed: PackedInput | PackedWeight, fmt: Format, beside: bool = False) -> Rows:
    """Return packed rows [R, K] as operands; beside: made while the kernel before runs."""
    codes = wider(packed.packed, torch.int64)
    n, k = len(codes), 16 * codes.shape[1]
    found = empty_rows(n, k, codes.device)
    _expand_rows_kernel[(n,)](
        codes, packed.scale.contiguous(), packed.global_scale,
        found.values.view(torch.int32), found.factors, K=k, FMT=fmt, LANES=_LANES,
        AT_ONCE=_AT_ONCE, BESIDE=beside, num_warps=1, **LAUNCH, **overlapping(codes.device, False),
    )  # fmt: skip
    return found


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
