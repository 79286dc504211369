"""Multiply a mixture's experts on a GPU, decoded in the kernels (docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..common.tiles import LAUNCH, cdiv, overlapping
from ..dequantize.triton import packed_words
from ..linear.decode_triton import InputRows, arranged
from ..linear.ptx_triton import small_scales
from ..linear.tiling import shared_memory_of
from .matmul_triton import experts_kernel, pairs_kernel
from .naive import Gate, experts_linear_quantized_ref, experts_linear_ref
from .routing_triton import route
from .tiling import ExpertTiles, config

# Offsets in x and in results are 32 bits.
_MOST = 2**31 - 1

# Rows of a tile up to which decoding is what takes the time.
_FEW = 8


def experts_linear_triton(x: Tensor, ids: Tensor, weight: PackedWeight, fmt: Format) -> Tensor:
    """Multiply rows and the packed weights of their experts (`experts_linear_ref`)."""
    if x.dtype == torch.float64:
        return experts_linear_ref(x, ids, weight, fmt)
    out = x.new_empty((*ids.shape, weight.packed.shape[1]))
    tokens = tokens_at_once(ids, weight.packed)
    for rows, chosen, y in zip(x.split(tokens), ids.split(tokens), out.split(tokens), strict=True):
        multiply(InputRows.of_numbers(rows), chosen, weight, y, x.ndim == 2, fmt)
    return out


def experts_linear_quantized_triton(
    x: Tensor, x_rows: PackedInput, ids: Tensor, weight: PackedWeight, fmt: Format
) -> Tensor:
    """Multiply quantized rows and packed weights (`experts_linear_quantized_ref`)."""
    if x.dtype == torch.float64:
        return experts_linear_quantized_ref(x, x_rows, ids, weight, fmt)
    x_packed, x_scale, x_global_scale = x_rows
    out = x.new_empty((*ids.shape, weight.packed.shape[1]))
    tokens = tokens_at_once(ids, weight.packed)
    if x_global_scale is not None and weight.global_scale is not None and len(x_global_scale) > 1:
        # Both are of the expert, and only their product is asked for.
        weight = weight._replace(global_scale=weight.global_scale * x_global_scale)
        x_global_scale = None
    parts = (each.split(tokens) for each in (x_packed, x_scale, ids, out))
    for codes, scales, chosen, y in zip(*parts, strict=True):
        rows = InputRows.of_codes(codes, scales, x_global_scale)
        multiply(rows, chosen, weight, y, x_packed.ndim == 2, fmt)
    return out


def tokens_at_once(ids: Tensor, packed: Tensor) -> int:
    """Return how many tokens are multiplied at a time."""
    # Sorted columns of x are more than K by less than 1024.
    columns = max(packed.shape[1], 2 * packed.shape[2] + 1024)
    return max(1, _MOST // (max(1, ids.shape[1]) * columns))


def multiply(
    x: InputRows,
    ids: Tensor,
    weight: PackedWeight,
    out: Tensor,
    shared: bool,
    fmt: Format,
    tiles: ExpertTiles | None = None,
) -> None:
    """Fill `out` [T, k, N]; shared: a row of x is that of all k experts of a token."""
    if not out.numel():
        return
    (tokens, fan), (experts, n, _) = ids.shape, weight.packed.shape
    tiles = tiles or config(tokens * fan, experts, n, x.terms, shared_memory_of(out.device))
    rows, k = tokens if shared else tokens * fan, 2 * weight.packed.shape[2]
    numbers = x.words
    if not tiles.warps_share or x.dtype != torch.bfloat16:
        numbers = arranged(x, rows, k, group_of(tiles), fmt, True)
    ids = ids.contiguous()
    routing = None if tiles.m == 1 else route(ids, experts, tiles.m)
    numbers = numbers.view(torch.bfloat16)
    launch(numbers, x.global_scale, weight, out, ids, routing, shared, x.terms, fmt, tiles)


def group_of(tiles: ExpertTiles) -> int:
    """Return the words whose columns are sorted by their place in a word (`arranged`)."""
    return 1 if tiles.warps_share else tiles.words


def launch(
    x: Tensor,
    x_global_scale: Tensor | None,
    weight: PackedWeight,
    out: Tensor,
    ids: Tensor,
    routing: tuple[Tensor, Tensor] | None,
    shared: bool,
    terms: int,
    fmt: Format,
    tiles: ExpertTiles,
    gate: Gate | None = None,
    group: int = 1,
) -> None:
    """Fill `out` with products, or with the gates of products, sorted in groups of words."""
    (tokens, fan), (experts, n, words) = ids.shape, weight.packed.shape
    stored = weight._replace(packed=packed_words(weight.packed), scale=weight.scale.contiguous())
    columns = cdiv(n if gate is None else 2 * out.shape[-1], tiles.n)
    sizes = (tokens if shared else tokens * fan, experts, n)
    options = dict(
        FAN=fan if shared else 1, K=2 * words, FMT=fmt, TERMS=terms, TILES=tiles, GATE=gate,
        GROUP=group, num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH,
        **overlapping(out.device, tiles.releases),
    )  # fmt: skip
    if routing is None:
        grid = (tokens * fan, columns)
        pairs_kernel[grid](x, x_global_scale, stored, out, ids, *sizes, BM=8, **options)
        return
    small = not tiles.warps_share and tiles.m <= _FEW and small_scales(fmt)
    if small:
        # With two loops the compiler takes more, and fewer programs are under way.
        options["maxnreg"] = 104
    grid = (len(routing[1]), columns)
    experts_kernel[grid[::-1] if tiles.rows_stay else grid](
        x, x_global_scale, stored, out, *routing, *sizes, SMALL=small, **options
    )
