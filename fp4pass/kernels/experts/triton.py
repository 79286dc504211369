"""Multiply a mixture's experts on a GPU, or compute all of it, decoded in the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight, empty_rows
from ..common.tiles import (
    DTYPES,
    LAUNCH,
    as_words,
    cdiv,
    global_multiplier,
    load_block,
    overlapping,
    power,
    rounded,
    wait,
)
from ..dequantize.triton import packed_words
from ..linear.decode_triton import InputRows, arranged, offset, small_scales
from ..linear.matmul_triton import padded_columns
from ..linear.tiling import Tiles, shared_memory_of
from ..quantize.tiles import load_global_scale, quantize_block, store_block, word_count
from .matmul_triton import (
    exact_few_rows_sums,
    experts_kernel,
    pairs_kernel,
    route,
    route_and_arrange,
)
from .naive import Gate, experts_linear_quantized_ref, experts_linear_ref, experts_mixture_ref

# Offsets in x and in results are 32 bits.
_MOST = 2**31 - 1

# Rows of a tile up to which decoding is what takes the time.
_FEW = 8


@dataclass(frozen=True, repr=False)
class ExpertTiles(Tiles):
    """Tiles of rows of one expert."""

    __hash__ = Tiles.__hash__

    rest: int = 0  # rows up to which a tile takes less time than one of m
    # Whether programs of the same rows follow each other, or those of the same columns of experts.
    rows_stay: bool = False


def config(pairs: int, experts: int, n: int, terms: int, shared_memory: int) -> ExpertTiles:
    """Return the tiles of so many rows times weights [experts, n, K]; of one row: each alone."""
    # terms, shared_memory: as the config of linear layers takes them.
    if 2 * pairs <= experts or pairs <= 8:
        programs = pairs * cdiv(n, 16)
        words, warps = (32, 2) if programs <= 768 else (16, 2) if programs <= 2048 else (32, 1)
        return ExpertTiles(1, 16, words, warps, 3, warps_share=True)
    mean = pairs / experts
    if mean <= 4 and terms == 1:
        return ExpertTiles(8, 64, 32, 4, 3)
    if mean <= 4:
        return ExpertTiles(8, 32, 16, 2, 3, warps_share=True)
    # Most experts should have no more rows than a tile, and those of many no more than a few.
    if mean <= 10:
        tiles = ExpertTiles(16, 64, 32, 4, 3, rest=8)
    elif mean <= 24:
        tiles = ExpertTiles(32, 128, 16, 4, 3, rest=16, rows_stay=True)
    elif mean <= 48:
        tiles = ExpertTiles(64, 128, 8, 4, 4, rest=32, rows_stay=True)
    else:
        tiles = ExpertTiles(128, 128, 8, 4, 3, rest=32, rows_stay=True)
    return _fitted(tiles, terms, shared_memory)


def _fitted(tiles: ExpertTiles, terms: int, shared_memory: int) -> ExpertTiles:
    """Return tiles like these whose loads fit into the bytes that a program can have."""
    while tiles.stages * _bytes(tiles, terms) > shared_memory:
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.words > 16:
            tiles = replace(tiles, words=16, stages=3)
        else:
            rest = min(tiles.rest, tiles.m // 4)
            tiles = replace(tiles, m=tiles.m // 2, rest=rest, stages=3)
    return tiles


def _bytes(tiles: ExpertTiles, terms: int) -> int:
    """Return the bytes of the loads of a step."""
    return tiles.words * (16 * terms * tiles.m + 5 * tiles.n)


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


# Columns of a program that adds rows, and of one that multiplies them before; words of these.
_BLOCK, _ROWS, _WORDS = 1024, 16, 32

# Experts of a token up to which a program multiplies the rows of all of them.
_FAN = 16


def experts_mixture_triton(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    weight: PackedWeight,
    down_weight: PackedWeight,
    gate: Gate,
    fmt: Format,
) -> Tensor:
    """Return the weighted sums of the chosen experts (`experts_mixture_ref`)."""
    stacks = (weight, down_weight)
    if x.dtype != torch.bfloat16:
        return experts_mixture_ref(
            x, ids, weights, *stacks, gate, fmt, linear=experts_linear_triton
        )
    out = x.new_empty((len(x), down_weight.packed.shape[1]))
    tokens = min(tokens_at_once(ids, each.packed) for each in stacks)
    parts = (each.split(tokens) for each in (x, ids.contiguous(), weights.contiguous(), out))
    for each in zip(*parts, strict=True):
        if each[-1].numel():
            mix(*each, *stacks, gate, fmt)
    return out


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    weight: PackedWeight,
    down_weight: PackedWeight,
    gate: Gate,
    fmt: Format,
    tiles: tuple[ExpertTiles, ExpertTiles] | None = None,
) -> None:
    """Fill `out` [T, H] with the weighted sums for bfloat16 x [T, H]."""
    # tiles: of both products, of as many rows.
    (tokens, fan), experts = ids.shape, len(weight.packed)
    one, two = tiles or (
        config(tokens * fan, experts, each.packed.shape[1], 1, shared_memory_of(x.device))
        for each in (weight, down_weight)
    )
    few = one.m == 1
    group = group_of(two)
    inner = padded_columns(2 * down_weight.packed.shape[2], group)
    rows, routing = as_words(x).view(torch.bfloat16).view(x.shape), None
    if not few:
        cut = (ids, experts, one.m)
        if one.warps_share:
            routing = route(*cut)
        else:
            routing, rows = route_and_arrange(*cut, rows, group_of(one), fmt)
    # Products of numbers have no global scale of x.
    h = x.new_empty((tokens * fan, inner))
    launch(rows, None, weight, h, ids, routing, True, 1, fmt, one, gate, group)
    if few and fan <= _FAN:
        sum_products(h, ids, weights, down_weight, out, fmt)
        return
    y = x.new_empty((tokens * fan, out.shape[1]))
    launch(h, None, down_weight, y, ids, routing, False, 1, fmt, two)
    sum_pairs_kernel[(tokens, cdiv(out.shape[1], _BLOCK))](
        y, weights, out, out.shape[1], FAN=fan, BLOCK=_BLOCK,
        **LAUNCH, **overlapping(out.device, False),
    )  # fmt: skip


def sum_products(
    h: Tensor, ids: Tensor, weights: Tensor, weight: PackedWeight, out: Tensor, fmt: Format
) -> None:
    """Fill `out` with the weighted sums of the products of h [T * k, K]."""
    (tokens, fan), (experts, n, words) = ids.shape, weight.packed.shape
    warps = triton.next_power_of_2(fan)
    step = warps * _WORDS * (16 + 5 * _ROWS)
    stages = 3 if 3 * step <= shared_memory_of(h.device) else 2
    stored = weight._replace(packed=packed_words(weight.packed), scale=weight.scale.contiguous())
    summed_pairs_kernel[(tokens, cdiv(n, _ROWS))](
        h, stored, out, ids, weights, tokens * fan, experts, n, FAN=fan, K=2 * words, FMT=fmt,
        TILES=Tiles(8, _ROWS, _WORDS, warps, stages), num_warps=warps, num_stages=stages,
        **LAUNCH, **overlapping(out.device, False),
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "E"])
def summed_pairs_kernel(
    x, weight, out, ids, weights, M, E, N, FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr,
    TILES: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Add the products of some columns of all pairs of a token, times their weights."""
    # A warp takes a pair.
    wait(OVERLAP, RELEASES)
    token = tl.program_id(0)
    warp = tl.arange(0, TILES.warps)
    pair = token * FAN + warp
    expert = tl.load(ids + pair, mask=warp < FAN, other=-1)
    live = (expert >= 0) & (expert < E)
    expert = tl.where(live, expert, 0)
    n = tl.program_id(1) * TILES.n + tl.arange(0, TILES.n)
    row = (expert * N)[:, None, None] + tl.minimum(n, N - 1)[None, :, None]
    acc = exact_few_rows_sums(
        x, weight.packed, weight.scale, row, pair[:, None, None], live[:, None, None], M,
        K, FMT, 1, 1, TILES.m, TILES, 1,
    )  # fmt: skip
    y = acc * power(-offset(FMT))
    if weight.global_scale is not None:
        y *= global_multiplier(weight.global_scale + expert, FMT)[:, None, None]
    if weight.bias is not None:
        y += tl.load(weight.bias + row, mask=(n < N)[None, :, None], other=0.0).to(tl.float32)
    factor = tl.load(weights + pair, mask=live, other=0.0).to(tl.float32)
    y = tl.where(live[:, None, None], y * factor[:, None, None], 0.0)
    m = tl.arange(0, TILES.m)
    at = out + token.to(tl.int64) * N + n[:, None] + 0 * m[None, :]
    total = rounded(tl.sum(y, axis=0), out.dtype.element_ty)
    tl.store(at, total, mask=(n < N)[:, None] & (m < 1)[None, :])


@triton.jit
def sum_pairs_kernel(
    y, weights, out, N, FAN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    """Add the rows of the pairs of a token, times their weights, in their order."""
    wait(OVERLAP, RELEASES)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(FAN):
        pair = token * FAN + i
        term = tl.load(y + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += term * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * N + n, rounded(total, out.dtype.element_ty), mask=n < N)


_LANES, _WARPS = 64, 2


def experts_quantize_triton(
    x: Tensor, ids: Tensor, global_scale: Tensor, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of pairs by the scales of their experts (`experts_quantize_ref`)."""
    packed, scale = empty_rows(x, ids.shape, fmt)
    if scale.numel():
        blocks = scale.shape[-1]
        _experts_quantize_kernel[(ids.numel(), cdiv(blocks, _LANES))](
            as_words(x), ids.contiguous(), global_scale, packed.view(torch.int64), scale, blocks,
            len(global_scale), FAN=ids.shape[1] if x.ndim == 2 else 1,
            DTYPE=DTYPES.get(x.dtype, tl.float32), FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=_LANES, num_warps=_WARPS, **LAUNCH,
        )  # fmt: skip
    return packed, scale


@triton.jit(do_not_specialize=["blocks", "E"])
def _experts_quantize_kernel(
    words, ids, stored, packed, scale, blocks, E, FAN: tl.constexpr, DTYPE: tl.constexpr,
    FMT: tl.constexpr, SEARCHES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of one pair; FAN pairs read one row of x."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair)
    live = (expert >= 0) & (expert < E)
    global_scale = load_global_scale(stored + tl.where(live, expert, 0), FMT)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = at < blocks
    block = (pair // FAN) * blocks + at
    read = tl.where(live, at, blocks) < blocks
    tile = load_block(words, block, read, word_count(FMT.block, DTYPE))
    byte, codes = quantize_block(tile, global_scale, DTYPE, FMT, SEARCHES)
    codes = [tl.where(live, each, 0) for each in codes]
    store_block(packed, scale, pair * blocks + at, mask, tl.where(live, byte, 0), codes)
