"""Products of a mixture's experts on a GPU, weights decoded in the kernels (docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, as_words, cdiv, overlapping
from ..dequantize.triton import packed_words
from ..linear.decode_triton import arranged
from ..linear.ptx_triton import small_scales
from ..linear.tiling import TERMS, shared_memory_of
from .matmul_triton import few_rows_experts_kernel, pairs_kernel, rows_experts_kernel
from .naive import Gate, experts_linear_quantized_ref, experts_linear_ref
from .routing_triton import route
from .tiling import ExpertTiles, config

# Offsets in x and in results are 32 bits.
_MOST = 2**31 - 1

# Rows of a tile up to which decoding is what takes the time.
_FEW = 8


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
    tokens = tokens_at_once(ids, packed)
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
    if x_global_scale is not None and global_scale is not None and len(x_global_scale) > 1:
        # Both are of the expert, and only their product is asked for.
        x_global_scale, stack = None, (packed, scale, global_scale * x_global_scale, bias)
    out = x.new_empty((*ids.shape, packed.shape[1]))
    tokens = tokens_at_once(ids, packed)
    parts = (each.split(tokens) for each in (x_packed, x_scale, ids, out))
    for codes, scales, chosen, y in zip(*parts, strict=True):
        rows = (packed_words(codes), scales.contiguous(), x_global_scale)
        multiply(*rows, chosen, *stack, y, x_packed.ndim == 2, None, fmt)
    return out


def tokens_at_once(ids: Tensor, packed: Tensor) -> int:
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
    tiles: ExpertTiles | None = None,
) -> None:
    """Fill `out` [T, k, N]; shared: a row of x is that of all k experts of a token."""
    # x are words of numbers of `dtype`, or of codes if it is None, which have scales x_scale.
    if not out.numel():
        return
    (tokens, fan), (experts, n, _) = ids.shape, packed.shape
    terms = 1 if dtype is None else TERMS[dtype]
    tiles = tiles or config(tokens * fan, experts, n, terms, shared_memory_of(out.device))
    rows, k = tokens if shared else tokens * fan, 2 * packed.shape[2]
    if not tiles.warps_share or dtype != torch.bfloat16:
        x = arranged(x, x_scale, rows, k, dtype, terms, group_of(tiles), fmt, True)
    ids = ids.contiguous()
    routing = None if tiles.m == 1 else route(ids, experts, tiles.m)
    stack = (packed, scale, x_global_scale, global_scale, bias)
    launch(x.view(torch.bfloat16), stack, out, ids, routing, shared, terms, fmt, tiles)


def group_of(tiles: ExpertTiles) -> int:
    """Return the words whose columns are sorted by their place in a word (`arranged`)."""
    return 1 if tiles.warps_share else tiles.words


def launch(
    x: Tensor,
    stack: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
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
    # stack: packed codes, scales, the global scale of x and those of experts, the bias.
    packed, scale, x_global_scale, global_scale, bias = stack
    (tokens, fan), (experts, n, _) = ids.shape, packed.shape
    rows = tokens if shared else tokens * fan
    stored = (packed_words(packed), scale.contiguous(), x_global_scale, global_scale, bias, out)
    sizes = (rows, experts, n)
    options = dict(
        FAN=fan if shared else 1, K=2 * packed.shape[2], FMT=fmt, TERMS=terms, BN=tiles.n,
        WORDS=tiles.words, GATE=gate, GROUP=group,
        num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH,
        **overlapping(out.device, tiles.releases),
    )  # fmt: skip
    columns = n if gate is None else 2 * out.shape[-1]
    if routing is None:
        grid = (tokens * fan, cdiv(columns, tiles.n))
        pairs_kernel[grid](x, *stored, ids, *sizes, BM=8, WARPS=tiles.warps, **options)
        return
    grid = (len(routing[1]), cdiv(columns, tiles.n))
    if tiles.warps_share:
        few_rows_experts_kernel[grid](
            x, *stored, *routing, *sizes, BM=tiles.m, WARPS=tiles.warps, **options
        )
        return
    small = tiles.m <= _FEW and small_scales(fmt)
    if small:
        # With two loops the compiler takes more, and fewer programs are under way.
        options["maxnreg"] = 104
    rows_experts_kernel[grid[::-1] if tiles.rows_stay else grid](
        x, *stored, *routing, *sizes,
        BM=tiles.m, REST=tiles.rest, SMALL=small, ROWS_STAY=tiles.rows_stay, **options,
    )  # fmt: skip
