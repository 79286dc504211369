"""The product of E4M3 rows and packed weights, which are decoded to E4M3 in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import PTX, decode_scale, rounded, wait
from ..linear.decode_triton import joined
from .decode_triton import decode_e4m3, operand


@triton.jit(do_not_specialize=["M"])
def fp8_rows_kernel(
    x, x_factors, words, scales, powers, factors, bias, out, M, N,
    K: tl.constexpr, FMT: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply sorted E4M3 rows (operands_triton.py) and packed weights."""
    wait(OVERLAP, RELEASES)
    BM: tl.constexpr = TILES.m
    BN: tl.constexpr = TILES.n
    WORDS: tl.constexpr = TILES.words
    SCALE: tl.constexpr = FMT.scale
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    whole: tl.constexpr = row_words % WORDS == 0
    padded: tl.constexpr = (row_words + WORDS - 1) // WORDS * WORDS * 8
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_n = (tl.program_id(1) * BN).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)
    by = tl.load(powers + row)[:, None]
    x_row = tl.minimum(m, M - 1)[None, :].to(tl.int64) * padded
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, row_words, WORDS):
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
        step = tl.broadcast_to(step[:, :, None], (BN, WORDS // share, share))
        bits = decode_e4m3(word, tl.reshape(step, (BN, WORDS)), FMT)
        weights = tl.permute(joined(bits), (0, 2, 3, 4, 1))
        weights = operand(tl.reshape(weights, (BN, 8 * WORDS)))
        x_tile = tl.load(x + x_row + (start * 8 + tl.arange(0, 8 * WORDS))[:, None])
        # Float8 as it is loaded: converted tiles take the way through shared memory twice.
        acc = tl.dot(weights, x_tile if PTX else operand(x_tile), acc)
    start_m = (tl.program_id(0) * BM).to(tl.int64)
    at = tl.arange(0, BM)[None, :] * N + n[:, None]
    inside = (n < N - start_n)[:, None] & (m < M)[None, :]
    out += start_m * N + start_n
    y = acc * tl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
    y *= tl.load(factors + row)[:, None]
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)
