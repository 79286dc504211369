"""Linear layers on packed weights, on a GPU: decoded in the kernel, or through a dense weight.

A word holds eight codes. Decoding words gives eight operands, one for each place in a word, whose
lanes stay where the words were loaded, which is where the tensor cores want them. The columns of
x have to follow (operands_triton.py). Of a few rows they are sorted in registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, as_words, cdiv, overlapping
from ..dequantize.triton import dequantize_all_triton, dequantize_triton, packed_words
from .decode_triton import arranged, offset
from .matmul_triton import add_parts_kernel, few_rows_kernel, rows_kernel
from .reference import linear_quantized_ref, linear_ref

# Bfloat16 numbers that hold one of x exactly.
_TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# Rows of a product, so that the offsets of x fit 32 bits.
_ROWS = 8192

# Rows of x up to which decoding in the kernel beats a dense weight and cuBLAS on an H200: always,
# and where `fuses` says so. Dense float32 is slower still.
_FUSED = {torch.bfloat16: (128, 256), torch.float16: (64, 64), torch.float32: (_ROWS, _ROWS)}

# Rows of quantized x up to which that is so where the result is not bfloat16.
_FUSED_QUANTIZED = 768

# Weights beyond which enough programs run for few rows, whatever else is chosen.
_MANY = 8192

# Words to a thread block of the kernels without a product.
_BLOCK = 512


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: programs of `n` weights by `m` rows of x, `words` of each at a time.

    parts: programs that share one sum over K. warps_share: the warps of a program share it.
    releases: the next kernel may be launched while this one runs, to wait for it. Its programs take
    room from those of this one that still have to start, so this pays or costs by the shape.
    """

    m: int
    n: int
    words: int
    warps: int
    stages: int
    parts: int = 1
    warps_share: bool = False
    releases: bool = False


def linear_triton(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """x @ W^T + bias: x [..., K], packed [N, K / 2] -> [..., N].

    A weight enters as code * scale, exactly; the global scale multiplies the float32 sum, and the
    bias is added before the one rounding. Many rows multiply a dense weight of x's dtype.
    """
    if x.dtype == torch.float64:
        return linear_ref(x, packed, scale, global_scale, bias, fmt)
    if not fuses(x.numel() // x.shape[-1], packed.shape[0], x.dtype, fmt):
        weight = dequantize_triton(packed, scale, global_scale, fmt, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = x.new_empty((*x.shape[:-1], packed.shape[0]))
    return _multiply(as_words(x), None, None, packed, scale, global_scale, bias, out, x.dtype, fmt)


def linear_quantized_triton(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    dtype: torch.dtype,
) -> Tensor:
    """The same for activations that are quantized too; the result is in `dtype`."""
    if dtype == torch.float64:
        return linear_quantized_ref(
            x_packed, x_scale, x_global_scale, packed, scale, global_scale, bias, fmt, dtype
        )
    rows = x_packed.numel() // x_packed.shape[-1]
    if dtype == torch.bfloat16 and not fuses(rows, packed.shape[0], dtype, fmt):
        operands = (x_packed, x_scale, x_global_scale), (packed, scale, global_scale)
        x, weight = dequantize_all_triton(operands, fmt, dtype)
        return F.linear(x, weight, None if bias is None else bias.to(dtype))
    dense = None
    if rows > _FUSED_QUANTIZED:
        dense = dequantize_triton(packed, scale, None, fmt, torch.bfloat16).t()
    out = x_packed.new_empty((rows, packed.shape[0]), dtype=dtype)
    codes = x_packed.reshape(rows, x_packed.shape[-1]).split(_ROWS)
    scales = x_scale.reshape(rows, x_scale.shape[-1]).split(_ROWS)
    finishing = (x_global_scale, global_scale, bias)
    for x, s, part in zip(codes, scales, out.split(_ROWS), strict=True):
        if dense is None:
            x, s = packed_words(x), s.contiguous()
            _multiply(x, s, finishing[0], packed, scale, *finishing[1:], part, None, fmt)
        else:
            # Code times block scale is exact in bfloat16, whatever the global scales are.
            x = dequantize_triton(x, s, None, fmt, torch.bfloat16)
            _add(torch.mm(x, dense, out_dtype=torch.float32)[None], *finishing, part, fmt, 0, False)
    return out.view(*x_packed.shape[:-1], packed.shape[0])


def linear_group_triton(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
) -> list[Tensor]:
    """`linear_triton` of one x and several weights: the same bits, one launch for few rows."""
    weights = (packed, scale, global_scale, bias)
    if (tiles := _group_tiles(x, x.dtype, *weights)) is None:
        return [linear_triton(x, *each, fmt) for each in zip(*weights, strict=True)]
    out = [x.new_empty((*x.shape[:-1], each.shape[0])) for each in packed]
    _multiply_few(as_words(x), None, None, *weights, out, x.dtype, fmt, tiles)
    return out


def linear_quantized_group_triton(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The same for activations that are quantized too; the results are in `dtype`."""
    activations = (x_packed, x_scale, x_global_scale)
    weights = (packed, scale, global_scale, bias)
    if dtype == torch.float64 or (tiles := _group_tiles(x_packed, None, *weights)) is None:
        each_of = zip(*weights, strict=True)
        return [linear_quantized_triton(*activations, *each, fmt, dtype) for each in each_of]
    shapes = [(*x_packed.shape[:-1], each.shape[0]) for each in packed]
    out = [x_packed.new_empty(shape, dtype=dtype) for shape in shapes]
    x, s = packed_words(x_packed), x_scale.contiguous()
    _multiply_few(x, s, x_global_scale, *weights, out, None, fmt, tiles)
    return out


def _group_tiles(
    x: Tensor,
    dtype: torch.dtype | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
) -> Tiles | None:
    """The tiles for several weights in one launch, or None if that is not to be: where sums would
    be in another order than those of one weight, or weights differ in what they have."""
    m, k = x.numel() // x.shape[-1], 2 * packed[0].shape[1]
    sizes = [each.shape[0] for each in packed]
    alike = all(len({each is None for each in some}) == 1 for some in (global_scale, bias))
    if dtype == torch.float64 or not 0 < m <= 8 or not alike or not all(sizes):
        return None
    terms = 1 if dtype is None else _TERMS[dtype]
    shared_memory = _shared_memory(x.device)
    first, *rest = (config(m, n, k, terms, shared_memory, sum(sizes)) for n in sizes)
    return first if first.warps_share and all(each == first for each in rest) else None


def fuses(m: int, n: int, dtype: torch.dtype, fmt: Format) -> bool:
    """Whether x [m, K] and a weight [n, K] are multiplied without a dense weight."""
    always, at_most = _FUSED[dtype]
    # Of the largest tiles 264 run at a time; a last round that is half empty costs a whole one.
    rounds = cdiv(n, 64) * cdiv(m, 128) / 264
    full = rounds < 1 or rounds % 1 > 0.5
    # Powers of two, far apart, take one more product a weight.
    return m <= always or (m <= at_most and full and fmt.scale.mantissa_bits > 0)


def config(
    m: int, n: int, k: int, terms: int, shared_memory: int, together: int | None = None
) -> Tiles:
    """The tiles for x [m, k] and a weight [n, k]; shared_memory: bytes that a program can have.

    together: weights in one launch, if they are of several tensors; it changes no order of sums.
    Measured on an H200, where 132 programs run at a time.
    """
    together = together or n
    if m == 1:
        # Whole steps of four warps, if they can be.
        words = 32 if k % 1024 == 0 else 16
        return Tiles(8, 16, words, 4, 3, warps_share=True, releases=together <= _MANY)
    if m <= 8 and terms == 1 and k % 512 == 0:
        # Whole steps of all warps.
        if n > _MANY:
            return Tiles(8, 16, 32, 2, 3 if k >= 4096 else 4, warps_share=True, releases=True)
        if k % 1024 == 0:
            return Tiles(8, 16, 32, 4, 3, warps_share=True, releases=together <= 4096)
        return Tiles(8, 16, 16, 4, 4 if together <= 4096 else 3, warps_share=True, releases=True)
    if 8 < m <= 16 and terms == 1:
        parts = 8
        while parts > 1 and (cdiv(n, 32) * parts > 512 or k % (256 * parts)):
            parts //= 2
        if n <= _MANY and k % 256 == 0 and cdiv(n, 32) * parts >= 256:
            # Programs of one warp, which wait for no other.
            return Tiles(16, 32, 32, 1, 3, parts, warps_share=True, releases=True)
        if k % 512 == 0 and k <= 4096 and n * k <= 1 << 25:
            # Each reads all of x, which pays for weights of 25 million elements and not for 59.
            return Tiles(16, 16, 32, 2, 3, warps_share=True, releases=True)
        if n <= _MANY and k > 4096:
            # Two warps, so that more programs are under way.
            return Tiles(16, 32, 32, 2, 4, parts=4)
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
    return Tiles(rows, 64, words, 4, stages, parts, releases=m <= 16 or 32 < m <= 64)


@lru_cache(maxsize=64)
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type == "cpu":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _multiply(
    x: Tensor,
    x_scale: Tensor | None,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
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
    tiles = tiles or config(m, n, k, terms, _shared_memory(out.device))
    if tiles.warps_share:
        weights = ([packed], [scale], [global_scale], [bias])
        _multiply_few(x, x_scale, x_global_scale, *weights, [out], dtype, fmt, tiles)
        return out
    words = packed_words(packed)
    scale = scale.contiguous()
    common = dict(K=k, FMT=fmt, WORDS=tiles.words, num_stages=tiles.stages, **LAUNCH)
    whole = tiles.parts == 1
    x = arranged(x, x_scale, m, k, dtype, terms, tiles.words, fmt, tiles.releases)
    sums = out if whole else out.new_empty((tiles.parts, m, n), dtype=torch.float32)
    rows_kernel[(cdiv(m, tiles.m), cdiv(n, tiles.n), tiles.parts)](
        x, words, scale, x_global_scale, global_scale, bias, sums, m, n, TERMS=terms,
        BM=tiles.m, BN=tiles.n, PARTS=tiles.parts, num_warps=tiles.warps, **common,
        # Of whole sums, the kernel that sorts x has let this one start, which does no more.
        **overlapping(out.device, tiles.releases and not whole),
    )  # fmt: skip
    if not whole:
        _add(sums, x_global_scale, global_scale, bias, out, fmt, offset(fmt), tiles.releases)
    return out


def _add(
    sums: Tensor,
    x_global_scale: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    fmt: Format,
    shift: int,
    releases: bool,
) -> None:
    """Fill `out` [..., N] with the sum of float32 [parts, M, N], finished."""
    parts, m, n = sums.shape
    add_parts_kernel[(cdiv(n, _BLOCK), m)](
        sums, x_global_scale, global_scale, bias, out, m, n, FMT=fmt, SHIFT=shift, PARTS=parts,
        BLOCK=_BLOCK, **LAUNCH, **overlapping(out.device, releases),
    )  # fmt: skip


def _multiply_few(
    x: Tensor,
    x_scale: Tensor | None,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    out: Sequence[Tensor],
    dtype: torch.dtype | None,
    fmt: Format,
    tiles: Tiles,
) -> None:
    """Fill `out` with the products of a few rows of one x and several weights, in one launch."""
    sizes = tuple(each.shape[0] for each in packed)
    k = 2 * packed[0].shape[1]
    m = out[0].numel() // sizes[0]
    terms = 1 if dtype is None else _TERMS[dtype]
    if dtype != torch.bfloat16:
        # More rows than one took 2.5 us longer where this let their kernel start early.
        x = arranged(x, x_scale, m, k, dtype, terms, 1, fmt, releases=m == 1)
    sums = list(out)
    if tiles.parts > 1:
        # The sum of several programs is of one weight.
        sums = [out[0].new_empty((tiles.parts, m, sizes[0]), dtype=torch.float32)]
    *starts, programs = itertools.accumulate((cdiv(n, tiles.n) for n in sizes), initial=0)
    operands = (
        x.view(torch.bfloat16),
        tuple(packed_words(each) for each in packed),
        tuple(each.contiguous() for each in scale),
        x_global_scale,
        None if global_scale[0] is None else tuple(global_scale),
        None if bias[0] is None else tuple(bias),
        tuple(sums),
        sizes,
        tuple(starts),
    )
    few_rows_kernel[(programs, tiles.parts)](
        *operands, m, K=k, FMT=fmt, TERMS=terms, ROWS=1 if m == 1 else tiles.m, BM=tiles.m,
        BN=tiles.n, WORDS=tiles.words, WARPS=tiles.warps, PARTS=tiles.parts,
        num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH,
        **overlapping(out[0].device, tiles.releases),
    )  # fmt: skip
    if tiles.parts > 1:
        finishing = (x_global_scale, global_scale[0], bias[0])
        _add(sums[0], *finishing, out[0], fmt, offset(fmt), tiles.releases)
