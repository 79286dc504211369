"""Products of a mixture's experts on a GPU, weights decoded in the kernels (docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, as_words, cdiv, overlapping
from ..dequantize.triton import packed_words
from ..linear.decode_triton import arranged
from ..linear.tiling import TERMS, Tiles, shared_memory_of
from .matmul_triton import few_rows_experts_kernel, pairs_kernel, rows_experts_kernel
from .reference import experts_linear_quantized_ref, experts_linear_ref
from .routing_triton import route
from .tiling import config

# Rows of a tile of what is left of an expert.
_REST = 32

# Offsets in x and in results are 32 bits.
_MOST = 2**31 - 1


def experts_linear_triton(
    x: Tensor,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Multiply rows and the packed weights of their experts (`experts_linear_ref`)."""
    stack = (packed, scale, global_scale, bias)
    if x.dtype == torch.float64:
        return experts_linear_ref(x, ids, *stack, fmt)
    out = x.new_empty((*ids.shape, packed.shape[1]))
    tokens = _tokens_at_once(ids, packed)
    for rows, chosen, y in zip(x.split(tokens), ids.split(tokens), out.split(tokens), strict=True):
        multiply(as_words(rows), None, None, chosen, *stack, y, x.ndim == 2, x.dtype, fmt)
    return out


def experts_linear_quantized_triton(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor | None,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Multiply quantized rows and packed weights (`experts_linear_quantized_ref`)."""
    stack = (packed, scale, global_scale, bias)
    if x.dtype == torch.float64:
        activations = (x, x_packed, x_scale, x_global_scale)
        return experts_linear_quantized_ref(*activations, ids, *stack, fmt)
    out = x.new_empty((*ids.shape, packed.shape[1]))
    tokens = _tokens_at_once(ids, packed)
    parts = (each.split(tokens) for each in (x_packed, x_scale, ids, out))
    for codes, scales, chosen, y in zip(*parts, strict=True):
        rows = (packed_words(codes), scales.contiguous(), x_global_scale)
        multiply(*rows, chosen, *stack, y, x_packed.ndim == 2, None, fmt)
    return out


def _tokens_at_once(ids: Tensor, packed: Tensor) -> int:
    """Return how many tokens are multiplied at a time."""
    # Sorted columns of x are more than K by less than 1024.
    columns = max(packed.shape[1], 2 * packed.shape[2] + 1024)
    return max(1, _MOST // (max(1, ids.shape[1]) * columns))


def multiply(
    x: Tensor,
    x_scale: Tensor | None,
    x_global_scale: Tensor | None,
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    shared: bool,
    dtype: torch.dtype | None,
    fmt: Format,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [T, k, N]; shared: a row of x is that of all k experts of a token."""
    # x are words of numbers of `dtype`, or of codes if it is None, which have scales x_scale.
    if not out.numel():
        return
    (tokens, fan), (experts, n, _) = ids.shape, packed.shape
    k, pairs, rows = 2 * packed.shape[2], tokens * fan, tokens if shared else tokens * fan
    terms = 1 if dtype is None else TERMS[dtype]
    tiles = tiles or config(pairs, experts, n, terms, shared_memory_of(out.device))
    group = 1 if tiles.warps_share else tiles.words
    if not tiles.warps_share or dtype != torch.bfloat16:
        x = arranged(x, x_scale, rows, k, dtype, terms, group, fmt, True)
    stored = (packed_words(packed), scale.contiguous(), x_global_scale, global_scale, bias, out)
    sizes = (rows, experts, n)
    options = dict(
        FAN=fan if shared else 1, K=k, FMT=fmt, TERMS=terms, BN=tiles.n, WORDS=tiles.words,
        num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH,
    )  # fmt: skip
    x, ids = x.view(torch.bfloat16), ids.contiguous()
    launch = overlapping(out.device, tiles.releases)
    if tiles.m == 1:
        pairs_kernel[(pairs, cdiv(n, tiles.n))](
            x, *stored, ids, *sizes, BM=8, WARPS=tiles.warps, **options, **launch
        )
        return
    order, slots = route(ids, experts, tiles.m)
    grid = (len(slots), cdiv(n, tiles.n))
    if tiles.warps_share:
        few_rows_experts_kernel[grid](
            x, *stored, order, slots, *sizes, BM=tiles.m, WARPS=tiles.warps, **options, **launch
        )
    else:
        rows_experts_kernel[grid](
            x, *stored, order, slots, *sizes, BM=tiles.m, REST=min(tiles.m, _REST),
            **options, **launch,
        )  # fmt: skip
