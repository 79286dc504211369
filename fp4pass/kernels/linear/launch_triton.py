"""Launches of the kernels of products (matmul_triton.py), for given tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, cdiv, overlapping
from ..dequantize.triton import packed_words
from .decode_triton import arranged, offset
from .matmul_triton import add_parts_kernel, few_rows_kernel, rows_kernel
from .tiling import TERMS, Tiles, config, shared_memory_of

# Words to a thread block of the kernels without a product.
_BLOCK = 512


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
    tiles = tiles or config(m, n, k, terms, shared_memory_of(out.device))
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
        add_parts(sums[0], *finishing, out[0], fmt, offset(fmt), tiles.releases)
