"""The product of E4M3 rows and packed weights, which are decoded to E4M3 in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import PTX, decode_scale, rounded, wait
from .decode_triton import bytes_of, decode_sixteen, joined_quarters, operand


@triton.jit(do_not_specialize=["M", "ZEROS"])
def fp8_rows_kernel(
    x,
    x_factors,
    words,
    scales,
    powers,
    factors,
    bias,
    out,
    sums,
    arrived,
    M,
    N,
    ZEROS,
    K: tl.constexpr,
    FMT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """Multiply BM sorted E4M3 rows (operands_triton.py) and BN packed weights."""
    SCALE: tl.constexpr = FMT.scale
    row_words: tl.constexpr = K // 16
    WORDS: tl.constexpr = COLUMNS // 16
    share: tl.constexpr = FMT.block // 16
    whole: tl.constexpr = K % COLUMNS == 0
    padded: tl.constexpr = (K + COLUMNS - 1) // COLUMNS * COLUMNS
    parts, part = tl.num_programs(2), tl.program_id(2)
    steps = tl.cdiv(padded // COLUMNS, parts) * WORDS
    begin = part * steps
    end = tl.minimum(begin + steps, row_words)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_n = (tl.program_id(1) * BN).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)
    if PREFETCH:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [words + row * row_words + begin, tl.zeros_like(n) + tl.maximum(end - begin, 0) * 8],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    wait(OVERLAP, RELEASES)
    by = tl.load(powers + row)[:, None]
    x_row = tl.minimum(m, M - 1)[None, :].to(tl.int64) * padded
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(begin, end, WORDS):
        k = start + tl.arange(0, WORDS)[None, :]
        k_scale = start // share + tl.arange(0, WORDS // share)[None, :]
        word_at = words + row[:, None] * row_words + k
        byte_at = scales + row[:, None] * (row_words // share) + k_scale
        if whole:
            word = tl.load(word_at)
            byte = tl.load(byte_at)
        else:
            word = tl.load(word_at, mask=k < row_words, other=0)
            byte = tl.load(byte_at, mask=k_scale < row_words // share, other=0)
        step = decode_scale(byte, SCALE) * by
        if share > 1:
            step = tl.broadcast_to(step[:, :, None], (BN, WORDS // share, share))
            step = tl.reshape(step, (BN, WORDS))
        four = joined_quarters(decode_sixteen(word, step, FMT))
        four = tl.permute(tl.reshape(four, (BN, WORDS // 4, 4, 4)), (0, 1, 3, 2))
        weights = operand(tl.reshape(bytes_of(tl.reshape(four, (BN, 4 * WORDS))), (BN, COLUMNS)))
        x_tile = tl.load(x + x_row + (start * 16 + tl.arange(0, COLUMNS))[:, None])
        # Float8 as it is loaded: converted tiles take the way through shared memory twice.
        acc = tl.dot(weights, x_tile if PTX else operand(x_tile), acc)
    if arrived is None:
        finish(acc, x_factors, factors, bias, out, row, start_n, M, N, BM, BN)
    else:
        arrived += tl.program_id(1) * ZEROS + tl.program_id(0)
        tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = BM * BN
        at = sums + tile * parts * size + n[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(at + part * size, acc)
        # The last to finish adds all parts, in their order; the atomic orders the memory.
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1) == parts - 1:
            total = tl.load(at, cache_modifier=".cg")
            for i in range(1, parts):
                total += tl.load(at + i * size, cache_modifier=".cg")
            finish(total, x_factors, factors, bias, out, row, start_n, M, N, BM, BN)


@triton.jit
def finish(
    acc, x_factors, factors, bias, out, row, start_n, M, N, BM: tl.constexpr, BN: tl.constexpr
):
    """Store a tile [BN, BM] of products."""
    n = tl.arange(0, BN)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_m = (tl.program_id(0) * BM).to(tl.int64)
    at = tl.arange(0, BM)[None, :] * N + n[:, None]
    inside = (n < N - start_n)[:, None] & (m < M)[None, :]
    out += start_m * N + start_n
    y = acc * tl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
    y *= tl.load(factors + row)[:, None]
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)
