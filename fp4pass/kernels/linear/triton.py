"""Linear layers on packed weights on a GPU, decoded in the kernel or dense (docs/kernels.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, as_words, cdiv, overlapping
from ..dequantize.triton import dequantize_all_triton, dequantize_triton, packed_words
from ..fp8.naive import uses_fp8
from ..fp8.operands_triton import Packed
from ..fp8.triton import multiply_fp8
from .decode_triton import arranged
from .gluon import multiply_row, step_of_warps
from .matmul_triton import add_parts_kernel, few_rows_kernel, rows_kernel
from .naive import linear_quantized_ref, linear_ref
from .ptx_triton import offset
from .tiling import MAX_ROWS, TERMS, Tiles, config, fuses, shared_memory_of
from .wide import Wide, bfloat16_tiles, multiply_wide, runs_wide

# Rows of quantized x up to which decoding beats two dense operands for results not in bfloat16.
_FUSED_QUANTIZED = 768

# Words to a thread block of the kernels without a product.
_BLOCK = 512


def linear_triton(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Multiply activations and a packed weight (`linear_ref`)."""
    # A weight enters as code * scale, exactly; the global scale multiplies the float32 sum, and the
    # bias is added before the one rounding. Many rows multiply a dense weight of x's dtype.
    if x.dtype == torch.float64:
        return linear_ref(x, packed, scale, global_scale, bias, fmt, compute)
    rows, n = x.numel() // x.shape[-1], packed.shape[0]
    if uses_fp8(compute, rows, n):
        weight = Packed(packed, scale, global_scale)
        y = multiply_fp8(x.reshape(rows, -1).contiguous(), weight, bias, x.dtype, fmt)
        return y.view(*x.shape[:-1], n)
    if x.dtype == torch.bfloat16 and runs_wide(x.shape[-1], x.device):
        if wide := bfloat16_tiles(rows, n, x.shape[-1], fmt):
            return _multiply_bfloat16(x, packed, scale, global_scale, bias, fmt, wide)
    if not fuses(rows, n, x.dtype, fmt):
        weight = dequantize_triton(packed, scale, global_scale, fmt, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = x.new_empty((*x.shape[:-1], n))
    return multiply(as_words(x), None, None, packed, scale, global_scale, bias, out, x.dtype, fmt)


def _multiply_bfloat16(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    wide: Wide,
) -> Tensor:
    """Return the product of x in bfloat16 and a weight that is decoded meanwhile."""
    (n, k), m = (packed.shape[0], x.shape[-1]), x.numel() // x.shape[-1]
    # Where programs are few, starting early took longer.
    early = n > 8192 and wide.parts == 1
    rows = arranged(as_words(x), None, m, k, x.dtype, 1, wide.group, fmt, early)[0]
    out = x.new_empty((m, n))
    weight = (packed, scale, None, None, None, global_scale)
    multiply_wide(rows, None, *weight, bias, out, fmt, wide)
    return out.view(*x.shape[:-1], n)


def linear_quantized_triton(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    rotation: int = 0,
    compute: str = "input",
) -> Tensor:
    """Multiply quantized activations and a packed weight (`linear_quantized_ref`)."""
    activations, weight = (x_packed, x_scale, x_global_scale), (packed, scale, global_scale)
    dtype = x.dtype
    if dtype == torch.float64:
        return linear_quantized_ref(x, *activations, *weight, bias, fmt, compute=compute)
    rows = x_packed.numel() // x_packed.shape[-1]
    if uses_fp8(compute, rows, packed.shape[0]):
        codes, bits = (each.reshape(rows, each.shape[-1]) for each in (x_packed, x_scale))
        x_rows = Packed(codes, bits, x_global_scale)
        y = multiply_fp8(x_rows, Packed(*weight), bias, dtype, fmt)
        return y.view(*x_packed.shape[:-1], packed.shape[0])
    if dtype == torch.bfloat16 and not fuses(rows, packed.shape[0], dtype, fmt):
        rounded, dense = dequantize_all_triton((activations, weight), fmt, dtype)
        return F.linear(rounded, dense, None if bias is None else bias.to(dtype))
    dense = None
    if rows > _FUSED_QUANTIZED:
        dense = dequantize_triton(packed, scale, None, fmt, torch.bfloat16).t()
    out = x_packed.new_empty((rows, packed.shape[0]), dtype=dtype)
    codes = x_packed.reshape(rows, x_packed.shape[-1]).split(MAX_ROWS)
    scales = x_scale.reshape(rows, x_scale.shape[-1]).split(MAX_ROWS)
    finishing = (x_global_scale, global_scale, bias)
    for c, s, part in zip(codes, scales, out.split(MAX_ROWS), strict=True):
        if dense is None:
            c, s = packed_words(c), s.contiguous()
            multiply(c, s, finishing[0], packed, scale, *finishing[1:], part, None, fmt)
        else:
            # Code times block scale is exact in bfloat16, whatever the global scales are.
            c = dequantize_triton(c, s, None, fmt, torch.bfloat16)
            sums = torch.mm(c, dense, out_dtype=torch.float32)[None]
            add_parts(sums, *finishing, part, fmt, 0, False)
    return out.view(*x_packed.shape[:-1], packed.shape[0])


def linear_group_triton(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    compute: str = "input",
) -> list[Tensor]:
    """Multiply activations and several packed weights: the bits of one each, maybe at once."""
    weights = (packed, scale, global_scale, bias)
    if (tiles := _group_tiles(x, x.dtype, *weights, fmt)) is None:
        return [linear_triton(x, *each, fmt, compute) for each in zip(*weights, strict=True)]
    out = [x.new_empty((*x.shape[:-1], each.shape[0])) for each in packed]
    multiply_few(as_words(x), None, None, *weights, out, x.dtype, fmt, tiles)
    return out


def linear_quantized_group_triton(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
    compute: str = "input",
) -> list[Tensor]:
    """Multiply quantized activations and several packed weights, in one launch if few rows."""
    activations = (x, x_packed, x_scale, x_global_scale)
    weights = (packed, scale, global_scale, bias)
    if x.dtype == torch.float64 or (tiles := _group_tiles(x_packed, None, *weights, fmt)) is None:
        each_of = zip(*weights, strict=True)
        return [
            linear_quantized_triton(*activations, *each, fmt, compute=compute) for each in each_of
        ]
    shapes = [(*x_packed.shape[:-1], each.shape[0]) for each in packed]
    out = [x_packed.new_empty(shape, dtype=x.dtype) for shape in shapes]
    c, s = packed_words(x_packed), x_scale.contiguous()
    multiply_few(c, s, x_global_scale, *weights, out, None, fmt, tiles)
    return out


def _group_tiles(
    x: Tensor,
    dtype: torch.dtype | None,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    global_scale: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    fmt: Format,
) -> Tiles | None:
    """Return the tiles for several weights in one launch, or None if each is multiplied alone."""
    # That is so where sums would be in another order, or weights differ in what they have, and of
    # all rows that `uses_fp8` knows.
    m, k = x.numel() // x.shape[-1], 2 * packed[0].shape[1]
    sizes = [each.shape[0] for each in packed]
    alike = all(len({each is None for each in some}) == 1 for some in (global_scale, bias))
    if dtype == torch.float64 or not 0 < m <= 8 or not alike or not all(sizes):
        return None
    terms = 1 if dtype is None else TERMS[dtype]
    shared_memory = shared_memory_of(x.device)
    step = step_of_warps(x, dtype, m, k, fmt)
    first, *rest = (config(m, n, k, terms, shared_memory, sum(sizes), step) for n in sizes)
    return first if first.warps_share and all(each == first for each in rest) else None


def multiply(
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
    """Fill `out` [..., N] with a product, and return it."""
    # x are words of numbers of `dtype`, or of codes if it is None, which have scales x_scale.
    if not out.numel():
        return out
    n, k = packed.shape[0], 2 * packed.shape[1]
    m = out.numel() // n
    terms = 1 if dtype is None else TERMS[dtype]
    step = step_of_warps(out, dtype, m, k, fmt)
    tiles = tiles or config(m, n, k, terms, shared_memory_of(out.device), step=step)
    if tiles.warps_share:
        weights = ([packed], [scale], [global_scale], [bias])
        multiply_few(x, x_scale, x_global_scale, *weights, [out], dtype, fmt, tiles)
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
        add_parts(sums, x_global_scale, global_scale, bias, out, fmt, offset(fmt), tiles.releases)
    return out


def add_parts(
    sums: Tensor,
    x_global_scale: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    fmt: Format,
    shift: int,
    releases: bool,
) -> None:
    """Fill `out` [..., N] with the sum of float32 [parts, M, N], times 2^-shift, finished."""
    parts, m, n = sums.shape
    add_parts_kernel[(cdiv(n, _BLOCK), m)](
        sums, x_global_scale, global_scale, bias, out, m, n, FMT=fmt, SHIFT=shift, PARTS=parts,
        BLOCK=_BLOCK, **LAUNCH, **overlapping(out.device, releases),
    )  # fmt: skip


def multiply_few(
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
    terms = 1 if dtype is None else TERMS[dtype]
    if dtype != torch.bfloat16:
        # More rows than one took 2.5 us longer where this let their kernel start early.
        x = arranged(x, x_scale, m, k, dtype, terms, 1, fmt, releases=m == 1)
    sums = list(out)
    if tiles.parts > 1:
        # The sum of several programs is of one weight.
        sums = [out[0].new_empty((tiles.parts, m, sizes[0]), dtype=torch.float32)]
    *starts, programs = itertools.accumulate((cdiv(n, tiles.n) for n in sizes), initial=0)
    words, scales = map(packed_words, packed), (each.contiguous() for each in scale)
    global_scales = None if global_scale[0] is None else tuple(global_scale)
    biases = None if bias[0] is None else tuple(bias)
    if tiles.in_gluon:
        row = x.view(torch.bfloat16)
        rest = (global_scales, biases, tuple(out), tuple(starts), programs, fmt, tiles)
        multiply_row(row, tuple(words), tuple(scales), *rest)
        return
    few_rows_kernel[(programs, tiles.parts)](
        x.view(torch.bfloat16), tuple(words), tuple(scales), x_global_scale, global_scales, biases,
        tuple(sums), sizes, tuple(starts), m, K=k, FMT=fmt, TERMS=terms,
        ROWS=1 if m == 1 else tiles.m, BM=tiles.m, BN=tiles.n, WORDS=tiles.words,
        WARPS=tiles.warps, PARTS=tiles.parts,
        num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH,
        **overlapping(out[0].device, tiles.releases),
    )  # fmt: skip
    if tiles.parts > 1:
        finishing = (x_global_scale, global_scale[0], bias[0])
        add_parts(sums[0], *finishing, out[0], fmt, offset(fmt), tiles.releases)
