"""Multiply packed weights in Triton kernels (docs/kernels.md)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedWeight
from ..common import tiles as kit
from ..quantize.triton import activate, narrow
from .decode_triton import OPERAND, decode, joined, offset, step_of

# Weights to a thread block of the kernel that adds parts.
_BLOCK = 512


@triton.jit
def finish(
    y, x_global_scale, global_scale, bias, n, N, FMT: tl.constexpr, SHIFT: tl.constexpr,
    x_factors=None, m=None, M=None,
):  # fmt: skip
    """Return the float32 result for sums y [BN, BM] of the weights n, times 2^SHIFT."""
    # x_factors: of the rows m of x, if they have some.
    y *= kit.power(-SHIFT)
    if x_factors is not None:
        y *= tl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
    if x_global_scale is not None:
        y *= kit.global_multiplier(x_global_scale, FMT)
    if global_scale is not None:
        y *= kit.global_multiplier(global_scale, FMT)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def few_rows_sums(
    x, words, scales, row, x_row, live_rows, M, first,
    K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, RUN: tl.constexpr, SHARE: tl.constexpr, SMALL: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Return the sums of weights `row` and rows of x over K, or over a part from `first` on."""
    # row: [1, BN, 1]. x_row, live_rows: [1, ROWS, 1], where they are and which are there. M: rows
    # of a term of x. SHARE warps share K, and of each there is a sum: [WARPS, BN, BM]. Where these
    # are not all, each has rows of its own, and the 1 in front of these shapes is WARPS. SMALL:
    # scales are taken for less than LARGE; the bits that their bytes have are returned beside the
    # sums, to tell. STAGES: loads that are under way at a time, or None for those of the launch.
    BN: tl.constexpr = TILES.n
    WORDS: tl.constexpr = TILES.words
    WARPS: tl.constexpr = TILES.warps
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    span: tl.constexpr = row_words // TILES.parts
    whole: tl.constexpr = span % (SHARE * WORDS) == 0
    tl.static_assert(whole or TILES.parts == 1)
    warp = (tl.arange(0, WARPS) % SHARE)[:, None, None]
    column = warp * WORDS + tl.arange(0, WORDS)[None, None, :]
    scale_column = warp * (WORDS // share) + tl.arange(0, WORDS // share)[None, None, :]
    x_column = warp * (8 * WORDS) + tl.arange(0, 8 * WORDS)[None, None, :]
    acc = tl.zeros((WARPS, BN, BM), tl.float32)
    seen = tl.zeros((WARPS, BN, WORDS // share), tl.uint8)
    for start in tl.range(first, first + span, SHARE * WORDS, num_stages=STAGES):
        k = start + column
        k_scale = start // share + scale_column
        k_x = start * 8 + x_column
        word_at = words + row * row_words + k
        byte_at = scales + row * (row_words // share) + k_scale
        word = kit.load(word_at, k < row_words, whole)
        byte = kit.load(byte_at, k_scale < row_words // share, whole)
        if SMALL:
            seen |= byte
        if RUN > 1:
            byte = step_of(byte, FMT, SMALL)
        byte = tl.broadcast_to(byte[:, :, :, None], (WARPS, BN, WORDS // share, share))
        byte = tl.reshape(byte, (WARPS, BN, WORDS))
        weights = joined(decode(word, byte, FMT, True, SMALL, RUN > 1))
        # The columns of a word in the order 0, 4, 1, 5, ..., of both.
        weights = tl.permute(weights, (0, 1, 2, 4, 5, 3))
        if RUN > 1:
            weights = tl.reshape(weights, (WARPS, BN, WORDS // (4 * RUN), 4, RUN, 8))
            weights = tl.permute(weights, (0, 1, 2, 4, 3, 5))
        weights = tl.reshape(weights, (WARPS, BN, 8 * WORDS))
        live = live_rows if whole else live_rows & (k_x < K)
        for t in tl.static_range(TERMS):
            x_tile = tl.load(x + t * (M * K) + x_row * K + k_x, mask=live, other=0.0)
            if RUN > 1:
                x_tile = tl.reshape(x_tile, (WARPS, ROWS, WORDS // (4 * RUN), 4, RUN, 2, 4))
                x_tile = tl.permute(x_tile, (0, 2, 4, 3, 6, 5, 1))
            else:
                x_tile = tl.reshape(x_tile, (WARPS, ROWS, WORDS, 2, 4))
                x_tile = tl.permute(x_tile, (0, 2, 4, 3, 1))
            x_tile = tl.broadcast_to(
                tl.reshape(x_tile, (WARPS, 8 * WORDS, ROWS)), (WARPS, 8 * WORDS, BM)
            )
            acc = tl.dot(weights, x_tile.to(OPERAND), acc)
    return acc, seen


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x, x_global_scale, x_factors, weights, outs, sizes, starts, M,
    K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply x, in bfloat16 TERMS, and weights of several sizes, or make a part of their sums."""
    # weights: columns of a PackedWeight. The warps share K. ROWS: TILES.m, of which M are there, or
    # 1, which tensor cores get that often. ACTIVATION: of a gate, whose weight is the first one and
    # its factor's the second, with one result; or None.
    kit.wait(OVERLAP, RELEASES)
    program = tl.program_id(0)
    N = kit.chosen(sizes, starts, program)
    out = kit.chosen(outs, starts, program)
    if ACTIVATION is None:
        words = kit.chosen(weights.packed, starts, program)
        scales = kit.chosen(weights.scale, starts, program)
        n = (program - kit.chosen(starts, starts, program)) * TILES.n + tl.arange(0, TILES.n)
        row = n
    else:
        # Of sixteen weights eight are of the gate and eight of its factor, both of one thread.
        i = tl.arange(0, TILES.n)
        words = either(weights.packed, i)
        scales = either(weights.scale, i)
        n = program * (TILES.n // 2) + tl.arange(0, TILES.n // 2)
        row = program * (TILES.n // 2) + i // 16 * 8 + i % 8
    row = tl.minimum(row, N - 1).to(tl.int64)[None, :, None]
    m = tl.arange(0, TILES.m)
    x_row = tl.arange(0, ROWS)[None, :, None]
    acc, _ = few_rows_sums(
        x, words, scales, row, x_row, x_row < M, M, tl.program_id(1) * (K // 8 // TILES.parts),
        K, FMT, TERMS, ROWS, TILES.m, TILES, 1, TILES.warps,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    at = m[None, :].to(tl.int64) * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    DTYPE: tl.constexpr = out.dtype.element_ty
    if ACTIVATION is not None:
        factors = ()
        sums = halves(y, TILES.n, TILES.m)
        for i in tl.static_range(2):
            stored = None if weights.global_scale is None else weights.global_scale[i]
            bias = None if weights.bias is None else weights.bias[i]
            half = finish(
                sums[i], x_global_scale, stored, bias, n, N, FMT, offset(FMT), x_factors, m, M
            )
            factors = factors + (half,)
        y = gate_times_up(factors[0], factors[1], ACTIVATION, DTYPE)
        tl.store(out + at, kit.rounded(y, DTYPE), mask=inside)
    elif TILES.parts == 1:
        stored = weights.global_scale
        global_scale = None if stored is None else kit.chosen(stored, starts, program)
        bias = None if weights.bias is None else kit.chosen(weights.bias, starts, program)
        y = finish(y, x_global_scale, global_scale, bias, n, N, FMT, offset(FMT), x_factors, m, M)
        tl.store(out + at, kit.rounded(y, DTYPE), mask=inside)
    else:
        tl.store(out + tl.program_id(1) * M.to(tl.int64) * N + at, y, mask=inside)


@triton.jit
def either(pointers, i):
    """Return the first of two pointers for the even eights of i, and the second for the others."""
    # Both are aligned, which the compiler does not know of what it selects.
    pointer = tl.where((i // 8 % 2 == 1)[None, :, None], pointers[1], pointers[0])
    return tl.multiple_of(pointer, (16, 16, 16))


@triton.jit
def halves(y, BN: tl.constexpr, BM: tl.constexpr):
    """Return the two [BN / 2, BM] of sums [BN, BM] in eights of gates and of their factors."""
    y = tl.permute(tl.reshape(y, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    return tl.split(tl.reshape(y, (BN // 2, BM, 2)))


@triton.constexpr_function
def padded_columns(K, WORDS):
    """Return the columns of sorted x: K, up to whole groups of WORDS."""
    return (K // 8 + WORDS - 1) // WORDS * WORDS * 8


@triton.jit
def rows_sums(
    x, words, scales, row, x_row, live_rows, M, part,
    K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, SMALL: tl.constexpr = False, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Return the sums [BN, BM] of weights `row` and sorted rows of x over K, or a part of K."""
    # row: [BN, 1]. x_row: [1, BM], where rows of x begin, and live_rows, which are read, or None
    # for all. M: rows of a term of x. SMALL, STAGES: as above.
    BN: tl.constexpr = TILES.n
    WORDS: tl.constexpr = TILES.words
    PARTS: tl.constexpr = TILES.parts
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    whole: tl.constexpr = row_words % WORDS == 0
    padded: tl.constexpr = padded_columns(K, WORDS)
    span: tl.constexpr = (row_words + PARTS * WORDS - 1) // (PARTS * WORDS) * WORDS
    # The compiler does not load ahead without an alignment of four bytes.
    ahead: tl.constexpr = WORDS // share % 4 != 0 or row_words // share % 4 != 0
    acc = tl.zeros((BN, BM), tl.float32)
    seen = tl.zeros((BN, WORDS // share), tl.uint8)
    first = part * span
    if ahead or live_rows is not None:
        # Of dense products in the loop, and below the row of x first: with addresses in another
        # order 32 rows took 4 % longer.
        byte_at = scales + row * (row_words // share)
    if ahead:
        later = tl.arange(0, WORDS // share)[None, :] + first // share
        later = tl.load(byte_at + later, mask=later < row_words // share, other=0)
    last = tl.minimum(first + span, row_words)
    for start in tl.range(first, last, WORDS, num_stages=STAGES):
        k = start + tl.arange(0, WORDS)[None, :]
        k_scale = start // share + tl.arange(0, WORDS // share)[None, :]
        word_at = words + row * row_words + k
        if live_rows is None:
            byte_at = scales + row * (row_words // share)
        word = kit.load(word_at, k < row_words, whole)
        if ahead:
            byte = later
            k_scale += WORDS // share
            later = tl.load(byte_at + k_scale, mask=k_scale < row_words // share, other=0)
        else:
            byte = kit.load(byte_at + k_scale, k_scale < row_words // share, whole)
        if SMALL:
            seen |= byte
        byte = tl.broadcast_to(byte[:, :, None], (BN, WORDS // share, share))
        weights = joined(decode(word, tl.reshape(byte, (BN, WORDS)), FMT, False, SMALL))
        weights = tl.reshape(tl.permute(weights, (0, 2, 3, 4, 1)), (BN, 8 * WORDS))
        for t in tl.static_range(TERMS):
            term_x = x + t * padded * M.to(tl.int64)
            term_k = (start * 8 + tl.arange(0, WORDS * 8))[:, None]
            if live_rows is None:
                term = tl.load(term_x + x_row + term_k)
            else:
                term = tl.load(term_x + term_k + x_row, mask=live_rows, other=0.0)
            acc = tl.dot(weights, term.to(OPERAND), acc)
    return acc, seen


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x, x_global_scale, x_factors, weight, out, M, N,
    K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply rows of sorted x (decode_triton.py) and weights, or make a part of their sums."""
    kit.wait(OVERLAP, RELEASES)
    BM: tl.constexpr = TILES.m
    BN: tl.constexpr = TILES.n
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_n = (tl.program_id(1) * BN).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)[:, None]
    x_row = tl.minimum(m, M - 1)[None, :] * padded_columns(K, TILES.words)
    acc, _ = rows_sums(
        x, weight.packed, weight.scale, row, x_row, None, M, tl.program_id(2),
        K, FMT, TERMS, BM, TILES,
    )  # fmt: skip
    # Offsets in 32 bits take half the registers.
    start_m = (tl.program_id(0) * BM).to(tl.int64)
    out += start_m * N + start_n
    at = tl.arange(0, BM)[None, :] * N + n[:, None]
    inside = (n < N - start_n)[:, None] & (m < M)[None, :]
    if TILES.parts == 1:
        y = finish(
            acc, x_global_scale, weight.global_scale, weight.bias, start_n + n, N, FMT,
            offset(FMT), x_factors, m, M,
        )  # fmt: skip
        tl.store(out + at, kit.rounded(y, out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + tl.program_id(2) * M.to(tl.int64) * N + at, acc, mask=inside)


@triton.jit(do_not_specialize=["M"])
def add_parts_kernel(
    sums, x_global_scale, x_factors, global_scale, bias, out, M, N,
    FMT: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Add and finish the sums of PARTS, of BLOCK weights and one row."""
    kit.wait(OVERLAP, RELEASES)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * N + n
    acc = tl.load(sums + at, mask=n < N, other=0.0)
    for i in tl.static_range(1, PARTS):
        acc += tl.load(sums + i * M.to(tl.int64) * N + at, mask=n < N, other=0.0)
    m = tl.program_id(1) + tl.arange(0, 1)
    y = finish(acc[:, None], x_global_scale, global_scale, bias, n, N, FMT, SHIFT, x_factors, m, M)
    y = tl.reshape(y, (BLOCK,))
    tl.store(out + at, kit.rounded(y, out.dtype.element_ty), mask=n < N)


def add_parts(
    sums: Tensor, x_global_scale: Tensor | None, weight: PackedWeight, out: Tensor, fmt: Format,
    shift: int, releases: bool = False, x_factors: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` [..., N] with the sum of float32 [parts, M, N], times 2^-shift, finished."""
    parts, m, n = sums.shape
    add_parts_kernel[(kit.cdiv(n, _BLOCK), m)](
        sums, x_global_scale, x_factors, weight.global_scale, weight.bias, out, m, n, FMT=fmt,
        SHIFT=shift, PARTS=parts, BLOCK=_BLOCK, **kit.launch(out.device, releases),
    )  # fmt: skip


@triton.jit
def gate_times_up(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the activation of a gate times its factor, rounded where eager rounds but at last."""
    active = activate((narrow(gate, DTYPE),), ACTIVATION, DTYPE)[0]
    return narrow(active, DTYPE) * narrow(up, DTYPE)


@triton.jit
def gate_kernel(
    gate, up, out, N, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply the activation of a part of a row and its factors."""
    kit.wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_stride + n, mask=n < N, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + n, mask=n < N, other=0.0).to(tl.float32)
    y = gate_times_up(x, factor, ACTIVATION, DTYPE)
    tl.store(out + row * N + n, kit.rounded(y, DTYPE), mask=n < N)
