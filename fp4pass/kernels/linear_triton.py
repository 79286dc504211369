"""Linear layers on packed weights, on a GPU: decoded in the kernel, or through a dense weight.

A word holds eight codes. Decoding words gives eight operands, one for each place in a word, whose
lanes stay where the words were loaded, which is where the tensor cores want them. The columns of
x have to follow (operands_triton.py). Of a few rows they are sorted in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .dequantize_triton import dequantize_triton, packed_words
from .linear_ref import linear_quantized_ref, linear_ref
from .operands_triton import OPERAND, arranged, decode, joined, offset, unpack_terms
from .tiles import LAUNCH, as_words, cdiv, power, rounded

# Bfloat16 numbers that hold one of x exactly.
_TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# Rows of a product, so that the offsets of x fit 32 bits.
_ROWS = 8192

# Rows of x up to which decoding in the kernel beats a dense weight and cuBLAS on an H200: always,
# and where `fuses` says so. Dense float32 is slower still.
_FUSED = {torch.bfloat16: (128, 256), torch.float16: (64, 64), torch.float32: (_ROWS, _ROWS)}

# Rows of quantized x up to which that is so where the result is not bfloat16.
_FUSED_QUANTIZED = 768

# Rows of a program up to which, or from which where programs share sums, it pays to start a kernel
# before the one it waits for has ended.
_OVERLAP, _OVERLAP_PARTS = 32, 64

# Words to a thread block of the kernels without a product.
_BLOCK = 512


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: programs of `n` weights by `m` rows of x, `words` of each at a time.

    parts: programs that share one sum over K. warps_share: the warps of a program share it.
    """

    m: int
    n: int
    words: int
    warps: int
    stages: int
    parts: int = 1
    warps_share: bool = False


def linear_triton(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """x @ W^T + bias: x [..., K], packed [N, K / 2] -> [..., N].

    A weight enters as code * scale, exactly; the global scale multiplies the float32 sum, and the
    bias is added before the one rounding. Many rows multiply a dense weight of x's dtype.
    """
    if x.dtype == torch.float64:
        return linear_ref(x, packed, scale, global_divisor, bias, fmt)
    if not fuses(x.numel() // x.shape[-1], packed.shape[0], x.dtype, fmt):
        weight = dequantize_triton(packed, scale, global_divisor, fmt, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = x.new_empty((*x.shape[:-1], packed.shape[0]))
    return _multiply(
        as_words(x), None, None, packed, scale, global_divisor, bias, out, x.dtype, fmt
    )


def linear_quantized_triton(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_divisor: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    dtype: torch.dtype,
) -> Tensor:
    """The same for activations that are quantized too; the result is in `dtype`."""
    if dtype == torch.float64:
        return linear_quantized_ref(
            x_packed, x_scale, x_global_divisor, packed, scale, global_divisor, bias, fmt, dtype
        )
    rows = x_packed.numel() // x_packed.shape[-1]
    if dtype == torch.bfloat16 and not fuses(rows, packed.shape[0], dtype, fmt):
        x = dequantize_triton(x_packed, x_scale, x_global_divisor, fmt, dtype)
        return linear_triton(x, packed, scale, global_divisor, bias, fmt)
    dense = None
    if rows > _FUSED_QUANTIZED:
        dense = dequantize_triton(packed, scale, None, fmt, torch.bfloat16).t()
    out = x_packed.new_empty((rows, packed.shape[0]), dtype=dtype)
    codes = x_packed.reshape(rows, x_packed.shape[-1]).split(_ROWS)
    scales = x_scale.reshape(rows, x_scale.shape[-1]).split(_ROWS)
    finishing = (x_global_divisor, global_divisor, bias)
    for x, s, part in zip(codes, scales, out.split(_ROWS), strict=True):
        if dense is None:
            x, s = packed_words(x), s.contiguous()
            _multiply(x, s, finishing[0], packed, scale, *finishing[1:], part, None, fmt)
        else:
            # Code times block scale is exact in bfloat16, whatever the global scales are.
            x = dequantize_triton(x, s, None, fmt, torch.bfloat16)
            _add(torch.mm(x, dense, out_dtype=torch.float32)[None], *finishing, part, 0, False)
    return out.view(*x_packed.shape[:-1], packed.shape[0])


def fuses(m: int, n: int, dtype: torch.dtype, fmt: Format) -> bool:
    """Whether x [m, K] and a weight [n, K] are multiplied without a dense weight."""
    always, at_most = _FUSED[dtype]
    # Of the largest tiles 264 run at a time; a last round that is half empty costs a whole one.
    rounds = cdiv(n, 64) * cdiv(m, 128) / 264
    full = rounds < 1 or rounds % 1 > 0.5
    # Powers of two, far apart, take one more product a weight.
    return m <= always or (m <= at_most and full and fmt.scale.mantissa_bits > 0)


def config(m: int, n: int, k: int, terms: int, shared_memory: int) -> Tiles:
    """The tiles for x [m, k] and a weight [n, k]; shared_memory: bytes that a program can have.

    Measured on an H200, where 132 programs run at a time.
    """
    if m == 1:
        # Whole steps of four warps, if they can be.
        return Tiles(8, 16, 32 if k % 1024 == 0 else 16, 4, 3, warps_share=True)
    # Each program reads all of x, in whole steps of four warps, which of 16 rows can be too much.
    if k % 512 == 0 and terms == 1 and (m <= 8 or (m <= 16 and n <= 8192 and k <= 4096)):
        rows, stages = (8, 4 if n <= 8192 else 3) if m <= 8 else (16, 4)
        while stages * 4 * 16 * (16 * rows + 5 * 16) > shared_memory:
            stages -= 1
        return Tiles(rows, 16, 16, 4, stages, warps_share=True)
    if 8 < m <= 16 and n <= 8192 and terms == 1 and k > 4096:
        # Two warps, so that more programs are under way.
        stages = 4 if 4 * 32 * (16 * 16 + 5 * 32) <= shared_memory else 3
        return Tiles(16, 32, 32, 2, stages, parts=4)
    rows = min(128, max(8, triton.next_power_of_2(m)))
    while rows > 64 and cdiv(n, 64) * cdiv(m, rows) < 128:
        rows //= 2
    words = 32 if rows <= 32 else 16
    stages = 4 if rows == 64 else 3
    while stages * words * (16 * terms * rows + 5 * 64) > shared_memory:
        if stages > 2:
            stages -= 1
        elif words > 16:
            words, stages = 16, 3
        else:
            rows, stages = rows // 2, 3
    parts = 1
    if m <= 64:
        programs = cdiv(n, 64) * cdiv(m, rows)
        while parts < 4 and 2 * parts * programs <= 256 and k >= 64 * words * parts:
            parts *= 2
    return Tiles(rows, 64, words, 4, stages, parts)


@lru_cache(maxsize=64)
def _device(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory for a program, and whether a kernel may start before its input is."""
    if device.type == "cpu":
        return 227 * 1024, False
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major >= 9


def _multiply(
    x: Tensor,
    x_scale: Tensor | None,
    x_divisor: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    divisor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype | None,
    fmt: Format,
    tiles: Tiles | None = None,
) -> Tensor:
    """Fill `out` [..., N] with the product; x: words of numbers of `dtype`, or of codes if None."""
    if not out.numel():
        return out
    n, k = packed.shape[0], 2 * packed.shape[1]
    m = out.numel() // n
    terms = 1 if dtype is None else _TERMS[dtype]
    shared_memory, overlap = _device(out.device)
    tiles = tiles or config(m, n, k, terms, shared_memory)
    words = packed_words(packed)
    scale = scale.contiguous()
    common = dict(K=k, FMT=fmt, WORDS=tiles.words, num_stages=tiles.stages, **LAUNCH)
    if tiles.warps_share:
        if dtype != torch.bfloat16:
            x = arranged(x, x_scale, m, k, dtype, terms, 1, fmt, False)
        common |= dict(BM=tiles.m, BN=tiles.n, WARPS=tiles.warps, num_warps=tiles.warps)
        grid = (cdiv(n, tiles.n),)
        if m == 1:
            x = x.view(torch.int64)
            _one_row[grid](x, words, scale, x_divisor, divisor, bias, out, n, TERMS=terms, **common)
        else:
            x = x.view(torch.bfloat16)
            _few_rows[grid](x, words, scale, x_divisor, divisor, bias, out, m, n, **common)
        return out
    whole = tiles.parts == 1
    overlap = overlap and (tiles.m <= _OVERLAP if whole else tiles.m >= _OVERLAP_PARTS)
    x = arranged(x, x_scale, m, k, dtype, terms, tiles.words, fmt, overlap)
    sums = out if whole else out.new_empty((tiles.parts, m, n), dtype=torch.float32)
    early = {"launch_pdl": True} if overlap else {}
    _rows[(cdiv(m, tiles.m), cdiv(n, tiles.n), tiles.parts)](
        x, words, scale, x_divisor, divisor, bias, sums, m, n, TERMS=terms, BM=tiles.m, BN=tiles.n,
        PARTS=tiles.parts, OVERLAP=overlap, num_warps=tiles.warps, **common, **early,
    )  # fmt: skip
    if not whole:
        _add(sums, x_divisor, divisor, bias, out, offset(fmt), overlap)
    return out


def _add(
    sums: Tensor,
    x_divisor: Tensor | None,
    divisor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    shift: int,
    overlap: bool,
) -> None:
    """Fill `out` [..., N] with the sum of float32 [parts, M, N], finished."""
    parts, m, n = sums.shape
    early = {"launch_pdl": True} if overlap else {}
    _add_parts[(cdiv(n, _BLOCK), m)](
        sums, x_divisor, divisor, bias, out, m, n, SHIFT=shift, PARTS=parts,
        BLOCK=_BLOCK, OVERLAP=overlap, **LAUNCH, **early,
    )  # fmt: skip


@triton.jit
def finish(y, x_divisor, divisor, bias, n, N, SHIFT: tl.constexpr):
    """The result for sums y [BN, BM] of the weights n, times 2^SHIFT, in float32."""
    y *= power(-SHIFT)
    if x_divisor is not None:
        y *= tl.math.div_rn(1.0, tl.load(x_divisor))
    if divisor is not None:
        y *= tl.math.div_rn(1.0, tl.load(divisor))
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def _one_row(
    x,
    words,
    scales,
    x_divisor,
    divisor,
    bias,
    out,
    N,
    K: tl.constexpr,
    FMT: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
):
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    whole: tl.constexpr = row_words % (WARPS * WORDS) == 0
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    warp = tl.arange(0, WARPS)[:, None]
    column = warp * WORDS + tl.arange(0, WORDS)[None, :]
    scale_column = warp * (WORDS // share) + tl.arange(0, WORDS // share)[None, :]
    acc = tl.zeros((WARPS, BN, BM), tl.float32)
    for start in range(0, row_words, WARPS * WORDS):
        k = start + column
        k_scale = start // share + scale_column
        word_at = words + row * row_words + k[:, None, :]
        byte_at = scales + row * (row_words // share) + k_scale[:, None, :]
        if whole:
            word = tl.load(word_at)
            byte = tl.load(byte_at)
        else:
            word = tl.load(word_at, mask=(k < row_words)[:, None, :], other=0)
            byte = tl.load(byte_at, mask=(k_scale < row_words // share)[:, None, :], other=0)
        byte = tl.broadcast_to(byte[:, :, :, None], (WARPS, BN, WORDS // share, share))
        weights = decode(word, tl.reshape(byte, (WARPS, BN, WORDS)), FMT, False)
        for t in tl.static_range(TERMS):
            for i in tl.static_range(2):
                x_at = x + t * (K // 4) + k * 2 + i
                if whole:
                    x_word = tl.load(x_at)
                else:
                    x_word = tl.load(x_at, mask=k < row_words, other=0)
                numbers = unpack_terms(x_word, tl.bfloat16, 1)
                for j in tl.static_range(4):
                    # Every column is the same row: the tensor cores want eight.
                    term = tl.broadcast_to(numbers[j][0][:, :, None], (WARPS, WORDS, BM))
                    acc = tl.dot(weights[4 * i + j], term.to(OPERAND), acc)
    y = finish(tl.sum(acc, axis=0), x_divisor, divisor, bias, n, N, offset(FMT))
    first = (tl.arange(0, BM) == 0)[None, :]
    at = n[:, None] + tl.zeros((1, BM), tl.int32)
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=(n < N)[:, None] & first)


@triton.jit(do_not_specialize=["M"])
def _few_rows(
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
):
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    tl.static_assert(row_words % (WARPS * WORDS) == 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    m = tl.arange(0, BM)
    live = (m < M)[None, :, None]
    warp = tl.arange(0, WARPS)[:, None, None]
    column = warp * WORDS + tl.arange(0, WORDS)[None, None, :]
    scale_column = warp * (WORDS // share) + tl.arange(0, WORDS // share)[None, None, :]
    x_column = warp * (8 * WORDS) + tl.arange(0, 8 * WORDS)[None, None, :]
    acc = tl.zeros((WARPS, BN, BM), tl.float32)
    for start in range(0, row_words, WARPS * WORDS):
        k = start + column
        k_scale = start // share + scale_column
        k_x = start * 8 + x_column
        word = tl.load(words + row * row_words + k)
        byte = tl.load(scales + row * (row_words // share) + k_scale)
        byte = tl.broadcast_to(byte[:, :, :, None], (WARPS, BN, WORDS // share, share))
        weights = joined(decode(word, tl.reshape(byte, (WARPS, BN, WORDS)), FMT, True))
        # The columns of a word in the order 0, 4, 1, 5, ..., of both.
        weights = tl.reshape(tl.permute(weights, (0, 1, 2, 4, 5, 3)), (WARPS, BN, 8 * WORDS))
        x_tile = tl.load(x + m[None, :, None] * K + k_x, mask=live, other=0.0)
        x_tile = tl.permute(tl.reshape(x_tile, (WARPS, BM, WORDS, 2, 4)), (0, 2, 4, 3, 1))
        x_tile = tl.reshape(x_tile, (WARPS, 8 * WORDS, BM)).to(OPERAND)
        acc = tl.dot(weights, x_tile, acc)
    y = finish(tl.sum(acc, axis=0), x_divisor, divisor, bias, n, N, offset(FMT))
    at = m[None, :].to(tl.int64) * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _rows(
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
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if PARTS > 1:
            tl.extra.cuda.gdc_launch_dependents()
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    whole: tl.constexpr = row_words % WORDS == 0
    padded: tl.constexpr = (row_words + WORDS - 1) // WORDS * WORDS * 8
    span: tl.constexpr = (row_words + PARTS * WORDS - 1) // (PARTS * WORDS) * WORDS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_n = (tl.program_id(1) * BN).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)[:, None]
    x_row = tl.minimum(m, M - 1)[None, :] * padded
    acc = tl.zeros((BN, BM), tl.float32)
    first = tl.program_id(2) * span
    for start in range(first, tl.minimum(first + span, row_words), WORDS):
        k = start + tl.arange(0, WORDS)[None, :]
        k_scale = start // share + tl.arange(0, WORDS // share)[None, :]
        word_at = words + row * row_words + k
        byte_at = scales + row * (row_words // share) + k_scale
        if whole:
            word = tl.load(word_at)
            byte = tl.load(byte_at)
        else:
            word = tl.load(word_at, mask=k < row_words, other=0)
            byte = tl.load(byte_at, mask=k_scale < row_words // share, other=0)
        byte = tl.broadcast_to(byte[:, :, None], (BN, WORDS // share, share))
        weights = joined(decode(word, tl.reshape(byte, (BN, WORDS)), FMT, False))
        weights = tl.reshape(tl.permute(weights, (0, 2, 3, 4, 1)), (BN, 8 * WORDS))
        for t in tl.static_range(TERMS):
            term_at = x + t * padded * M.to(tl.int64) + x_row
            term = tl.load(term_at + (start * 8 + tl.arange(0, WORDS * 8))[:, None])
            acc = tl.dot(weights, term.to(OPERAND), acc)
    # Offsets in 32 bits take half the registers.
    start_m = (tl.program_id(0) * BM).to(tl.int64)
    out += start_m * N + start_n
    at = tl.arange(0, BM)[None, :] * N + n[:, None]
    inside = (n < N - start_n)[:, None] & (m < M)[None, :]
    if PARTS == 1:
        y = finish(acc, x_divisor, divisor, bias, start_n + n, N, offset(FMT))
        tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + tl.program_id(2) * M.to(tl.int64) * N + at, acc, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _add_parts(
    sums,
    x_divisor,
    divisor,
    bias,
    out,
    M,
    N,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * N + n
    acc = tl.load(sums + at, mask=n < N, other=0.0)
    for i in tl.static_range(1, PARTS):
        acc += tl.load(sums + i * M.to(tl.int64) * N + at, mask=n < N, other=0.0)
    y = tl.reshape(finish(acc[:, None], x_divisor, divisor, bias, n, N, SHIFT), (BLOCK,))
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=n < N)
