"""Multiply a mixture's experts on a GPU, or compute all of it, decoded in the kernels.

Pairs of tokens and experts are sorted by expert first, last in this file (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import WHOLE, Format, get_format
from ...core.packing import PackedInput, PackedWeight, empty_rows
from ..common import tiles as common
from ..dequantize.triton import dequantize_triton, packed_words
from ..linear.decode_triton import LARGE, InputRows, arrange_words, arranged, offset, small_scales
from ..linear.matmul_triton import few_rows_sums, finish, halves, padded_columns, rows_sums
from ..linear.tiling import Tiles, fitted, shared_memory_of
from ..quantize.tiles import load_global_scale, quantize_block, store_block, word_count
from ..quantize.triton import activate
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
        programs = pairs * common.cdiv(n, 16)
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
    tiles = fitted(tiles, terms, shared_memory)
    return replace(tiles, rest=min(tiles.rest, tiles.m // 2))


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
    x: Tensor, x_rows: PackedInput, ids: Tensor, weight: PackedWeight, fmt: Format, inputs: str = ""
) -> Tensor:
    """Multiply quantized rows and packed weights (`experts_linear_quantized_ref`)."""
    if x.dtype == torch.float64:
        return experts_linear_quantized_ref(x, x_rows, ids, weight, fmt, inputs)
    if inputs:
        return _linear_fp8_inputs(x, x_rows, ids, weight, fmt, get_format(inputs))
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


def _linear_fp8_inputs(
    x: Tensor, x_rows: PackedInput, ids: Tensor, weight: PackedWeight, fmt: Format, of_x: Format
) -> Tensor:
    """Multiply rows in FP8 and packed weights: as bfloat16, in which numbers of E4M3 are exact."""
    codes, scales = x_rows.packed, x_rows.scale
    if of_x.block != WHOLE or weight.bias is not None:
        numbers = dequantize_triton(codes, scales, None, of_x, torch.float32)
        return experts_linear_triton(numbers, ids, weight, fmt).to(x.dtype)
    numbers = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    sums = x.new_empty((*ids.shape, weight.packed.shape[1]), dtype=torch.float32)
    tokens = tokens_at_once(ids, weight.packed)
    for rows, chosen, y in zip(*(each.split(tokens) for each in (numbers, ids, sums)), strict=True):
        multiply(InputRows.of_numbers(rows), chosen, weight, y, numbers.ndim == 2, fmt)
    return sums.mul_(scales if scales.ndim == 3 else scales.unsqueeze(1)).to(x.dtype)


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
    routing = None if tiles.m == 1 else route(ids, experts, tiles.m)[0]
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
    columns = common.cdiv(n if gate is None else 2 * out.shape[-1], tiles.n)
    sizes = (tokens if shared else tokens * fan, experts, n)
    options = dict(
        FAN=fan if shared else 1, K=2 * words, FMT=fmt, TERMS=terms, TILES=tiles, GATE=gate,
        GROUP=group, num_warps=tiles.warps, num_stages=tiles.stages,
        **common.launch(out.device, tiles.releases),
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
    rows, routing = common.as_words(x).view(torch.bfloat16).view(x.shape), None
    if not few:
        sorting = () if one.warps_share else (rows, group_of(one), fmt)
        routing, found = route(ids, experts, one.m, *sorting)
        rows = rows if found is None else found
    # Products of numbers have no global scale of x.
    h = x.new_empty((tokens * fan, inner))
    launch(rows, None, weight, h, ids, routing, True, 1, fmt, one, gate, group)
    if few and fan <= _FAN:
        sum_products(h, ids, weights, down_weight, out, fmt)
        return
    y = x.new_empty((tokens * fan, out.shape[1]))
    launch(h, None, down_weight, y, ids, routing, False, 1, fmt, two)
    sum_pairs_kernel[(tokens, common.cdiv(out.shape[1], _BLOCK))](
        y, weights, out, out.shape[1], FAN=fan, BLOCK=_BLOCK, **common.launch(out.device),
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
    summed_pairs_kernel[(tokens, common.cdiv(n, _ROWS))](
        h, stored, out, ids, weights, tokens * fan, experts, n, FAN=fan, K=2 * words, FMT=fmt,
        TILES=Tiles(8, _ROWS, _WORDS, warps, stages), num_warps=warps, num_stages=stages,
        **common.launch(out.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "E"])
def summed_pairs_kernel(
    x, weight, out, ids, weights, M, E, N, FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr,
    TILES: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Add the products of some columns of all pairs of a token, times their weights."""
    # A warp takes a pair.
    common.wait(OVERLAP, RELEASES)
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
    y = acc * common.power(-offset(FMT))
    if weight.global_scale is not None:
        y *= common.global_multiplier(weight.global_scale + expert, FMT)[:, None, None]
    if weight.bias is not None:
        y += tl.load(weight.bias + row, mask=(n < N)[None, :, None], other=0.0).to(tl.float32)
    factor = tl.load(weights + pair, mask=live, other=0.0).to(tl.float32)
    y = tl.where(live[:, None, None], y * factor[:, None, None], 0.0)
    m = tl.arange(0, TILES.m)
    at = out + token.to(tl.int64) * N + n[:, None] + 0 * m[None, :]
    total = common.rounded(tl.sum(y, axis=0), out.dtype.element_ty)
    tl.store(at, total, mask=(n < N)[:, None] & (m < 1)[None, :])


@triton.jit
def sum_pairs_kernel(
    y, weights, out, N, FAN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    """Add the rows of the pairs of a token, times their weights, in their order."""
    common.wait(OVERLAP, RELEASES)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(FAN):
        pair = token * FAN + i
        term = tl.load(y + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += term * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * N + n, common.rounded(total, out.dtype.element_ty), mask=n < N)


_LANES, _WARPS = 64, 2


def experts_quantize_triton(
    x: Tensor, ids: Tensor, global_scale: Tensor, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of pairs by the scales of their experts (`experts_quantize_ref`)."""
    packed, scale = empty_rows(x, ids.shape, fmt)
    if scale.numel():
        blocks = scale.shape[-1]
        _experts_quantize_kernel[(ids.numel(), common.cdiv(blocks, _LANES))](
            common.as_words(x), ids.contiguous(), global_scale, packed.view(torch.int64), scale,
            blocks, len(global_scale), FAN=ids.shape[1] if x.ndim == 2 else 1,
            DTYPE=common.DTYPES.get(x.dtype, tl.float32), FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=_LANES, num_warps=_WARPS, **common.LAUNCH,
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
    tile = common.load_block(words, block, read, word_count(FMT.block, DTYPE))
    byte, codes = quantize_block(tile, global_scale, DTYPE, FMT, SEARCHES)
    codes = [tl.where(live, each, 0) for each in codes]
    store_block(packed, scale, pair * blocks + at, mask, tl.where(live, byte, 0), codes)


# Sums are decoded faster where the scales of a tile allow it, which is checked with them.


@triton.jit
def exact_few_rows_sums(
    x, words, scales, row, x_row, live_rows, M, K: tl.constexpr, FMT: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Return `few_rows_sums` over K, whose lanes own blocks."""
    SMALL: tl.constexpr = small_scales(FMT)
    RUN: tl.constexpr = FMT.block // 8
    acc, seen = few_rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0,
        K, FMT, TERMS, ROWS, BM, TILES, RUN, SHARE, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = few_rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, ROWS, BM, TILES, RUN, SHARE, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def exact_rows_sums(
    x, words, scales, row, x_row, live_rows, M, K: tl.constexpr, FMT: tl.constexpr,
    TERMS: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Return `rows_sums` over K, decoded faster only if SMALL."""
    acc, seen = rows_sums(
        x, words, scales, row, x_row, live_rows, M, 0, K, FMT, TERMS, BM, TILES, SMALL,
    )  # fmt: skip
    if SMALL:
        most = tl.max(seen.to(tl.int32))
        if most >= LARGE:
            zero = unknown_zero(most)
            acc, _ = rows_sums(
                x + zero, words + zero, scales + zero, row, x_row, live_rows, M, 0,
                K, FMT, TERMS, BM, TILES, False, 1,
            )  # fmt: skip
    return acc


@triton.jit
def unknown_zero(most):
    """Return 0. The compiler knows only that it is a multiple of 16."""
    # Else what both loops compute would be kept in registers through the first one.
    if common.PTX:
        zero = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 31;", "=r,r", [most], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        zero = most >> 31
    return tl.multiple_of(zero, 16)


@triton.jit
def finish_of(y, x_global_scale, weight, expert, n, N, FMT: tl.constexpr, SHIFT: tl.constexpr):
    """Return the float32 result for sums y [BN, BM] of the weights n of an expert (int64)."""
    global_scale = None if weight.global_scale is None else weight.global_scale + expert
    bias = None if weight.bias is None else weight.bias + expert * N
    return finish(y, x_global_scale, global_scale, bias, n, N, FMT, SHIFT)


@triton.jit
def gated(y, BN: tl.constexpr, BM: tl.constexpr, GATE: tl.constexpr):
    """Return the gate [BN / 2, BM] of float32 sums, in eights of gates and of their factors."""
    gate, up = halves(y, BN, BM)
    if GATE.limit is not None:
        gate = tl.minimum(gate, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -GATE.limit, propagate_nan=tl.PropagateNan.ALL)
    ACTIVATION: tl.constexpr = GATE.activation
    active = activate((gate * GATE.slope,), ACTIVATION, tl.float32)[0]
    return active * (1.0 / GATE.slope) * (up + GATE.shift)


@triton.jit
def tile_weights(tile, N, BN: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr):
    """Return the weights [BN] of a tile, of an expert that has N; N for those that are not."""
    i = tl.arange(0, BN)
    if GATE is None:
        n = tile * BN + i
    else:
        # Eight of gates and the eight of their factors are of one thread. Results follow the codes
        # of the next product (`arranged`) in groups of words.
        span: tl.constexpr = 8 * GROUP
        place = tile * (BN // 2) + i // 16 * 8 + i % 8
        column = place // span * span + place % GROUP * 8 + place % span // GROUP
        half = i // 8 % 2
        n = 2 * column + half if GATE.interleaved else column + half * (N // 2)
        n = tl.where(2 * column < N, n, N)
    return n


@triton.jit
def store_tile(
    y, out, pair, live, tile, n, N, BN: tl.constexpr, BM: tl.constexpr, GATE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store float32 results [BN, BM] of the weights n of a tile, for the `live` of pairs [BM]."""
    if GATE is None:
        columns = N
        place = n
    else:
        span: tl.constexpr = 8 * GROUP
        columns = (N // 2 + span - 1) // span * span
        place = tile * (BN // 2) + tl.arange(0, BN // 2)
        y = gated(tl.where((n < N)[:, None], y, 0.0), BN, BM, GATE)
    at = (pair * columns)[None, :] + place[:, None]
    inside = (place < columns)[:, None] & live[None, :]
    tl.store(out + at, common.rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "E"])
def pairs_kernel(
    x, x_global_scale, weight, out, ids, M, E, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply the row of one pair and weights of its expert; FAN pairs share a row."""
    # M: rows of x. Tensor cores get a row BM times.
    BN: tl.constexpr = TILES.n
    common.wait(OVERLAP, RELEASES)
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    tile = tl.program_id(1)
    n = tile_weights(tile, N, BN, GATE, GROUP)
    m = tl.arange(0, BM)
    pairs = pair.to(tl.int64) + 0 * m
    if (expert < 0) | (expert >= E):
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pairs, m < 1, tile, n, N, BN, BM, GATE, GROUP)
        return
    row = (expert * N + tl.minimum(n, N - 1))[None, :, None]
    x_row = tl.arange(0, 1)[None, :, None]
    acc = exact_few_rows_sums(
        x + (pair // FAN).to(tl.int64) * K, weight.packed, weight.scale, row, x_row, x_row < 1, M,
        K, FMT, TERMS, 1, BM, TILES, TILES.warps,
    )  # fmt: skip
    y = tl.sum(acc, axis=0)
    y = finish_of(y, x_global_scale, weight, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pairs, m < 1, tile, n, N, BN, BM, GATE, GROUP)


@triton.jit
def rows_tile(
    x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Multiply the rows from start to end, up to BM, and a tile of weights of an expert."""
    # expert: int64.
    n = tile_weights(column, N, TILES.n, GATE, GROUP)
    row = expert * N + tl.minimum(n, N - 1)
    m = start + tl.arange(0, BM)
    pair = tl.load(order + m, mask=m < end, other=0)
    if TILES.warps_share:
        x_m = start + tl.arange(0, BM)[None, :, None]
        x_row = tl.load(order + x_m, mask=x_m < end, other=0) // FAN
        acc = exact_few_rows_sums(
            x, weight.packed, weight.scale, row[None, :, None], x_row, x_m < end, M,
            K, FMT, TERMS, BM, BM, TILES, TILES.warps,
        )  # fmt: skip
        y = tl.sum(acc, axis=0)
    else:
        columns: tl.constexpr = padded_columns(K, TILES.words)
        x_row, live = (pair // FAN)[None, :] * columns, (m < end)[None, :]
        y = exact_rows_sums(
            x, weight.packed, weight.scale, row[:, None], x_row, live, M,
            K, FMT, TERMS, BM, TILES, SMALL,
        )  # fmt: skip
    y = finish_of(y, x_global_scale, weight, expert, n, N, FMT, offset(FMT))
    store_tile(y, out, pair, m < end, column, n, N, TILES.n, BM, GATE, GROUP)


@triton.jit(do_not_specialize=["M", "E"])
def experts_kernel(
    x, x_global_scale, weight, out, order, tiles, M, E, N,
    FAN: tl.constexpr, K: tl.constexpr, FMT: tl.constexpr, TERMS: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr, SMALL: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows and weights of their expert; the warps share K, or x is sorted."""
    BN: tl.constexpr = TILES.n
    BM: tl.constexpr = TILES.m
    common.wait(OVERLAP, RELEASES)
    tile = tiles + 3 * tl.program_id(1 if TILES.rows_stay else 0)
    start, end = tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    expert = tl.load(tile).to(tl.int64)
    if expert == E:
        column = tl.program_id(0 if TILES.rows_stay else 1)
        n = tile_weights(column, N, BN, GATE, GROUP)
        m = start + tl.arange(0, BM)
        pair = tl.load(order + m, mask=m < end, other=0)
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(zeros, out, pair, m < end, column, n, N, BN, BM, GATE, GROUP)
        return
    column = tl.program_id(0 if TILES.rows_stay else 1)
    # The last rows of an expert are often few, and their tile takes as long as a full one.
    if TILES.rest > 0:
        if end - start <= TILES.rest:
            rows_tile(
                x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
                FAN, K, FMT, TERMS, TILES.rest, TILES, GATE, GROUP, SMALL,
            )  # fmt: skip
            return
    rows_tile(
        x, x_global_scale, weight, out, order, expert, start, end, column, M, N,
        FAN, K, FMT, TERMS, BM, TILES, GATE, GROUP, SMALL,
    )  # fmt: skip


# Pairs to a step of a program, at most, and to one of its lanes.
_PAIRS, _WAYS = 16384, 8


def route(
    ids: Tensor, experts: int, rows: int, x: Tensor | None = None, group: int = 1,
    fmt: Format | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:  # fmt: skip
    """Sort the pairs of ids [T, k] by expert, in tiles of up to `rows`, and bfloat16 x [T, K]."""
    # Returned are order, int32 [T * k], the pairs, those of an expert in their own order, and those
    # of no expert last, as of expert E; tiles, int32 [T * k // rows + E + 1, 3], expert, start and
    # end in `order`, of no more rows where start is not before end; and x as `arranged` has it.
    # A program counts the pairs of smaller experts itself, so that none waits for another. Tiles
    # of expert e begin at start // rows + e, which leaves room for those of all before.
    pairs = ids.numel()
    order = ids.new_empty(pairs, dtype=torch.int32)
    tiles = ids.new_empty((pairs // rows + experts + 1, 3), dtype=torch.int32)
    block = min(_PAIRS, max(1024, triton.next_power_of_2(pairs)))
    warps = min(16, max(4, block // 256))
    programs, words, columns, count, out = experts + 1, None, None, None, None
    if x is not None:
        columns, words = x.shape[1], common.wider(x, torch.int64)
        padded = common.cdiv(columns // 8, group) * group
        out, count = x.new_empty((1, len(x), 8 * padded)), len(x) * padded
        programs += common.cdiv(count, 32 * warps)
    route_kernel[(programs,)](
        ids, order, tiles, pairs, experts, words, out, count, K=columns, FMT=fmt,
        DTYPE=None if x is None else common.DTYPES[x.dtype], GROUP=group, WORDS=32 * warps,
        ROWS=rows, BLOCK=block, WAYS=_WAYS, STEPS=min(2, common.cdiv(pairs, block)),
        num_warps=warps, **common.launch(ids.device, True),
    )  # fmt: skip
    return (order, tiles), out


@triton.jit(do_not_specialize=["S", "E", "count"])
def route_kernel(
    ids, order, tiles, S, E, x, out, count,
    K: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Write where the pairs of one expert are, and its tiles, or sort some words of x."""
    common.wait(OVERLAP, RELEASES)
    program = tl.program_id(0)
    if x is None:
        route_expert(program, ids, order, tiles, S, E, ROWS, BLOCK, WAYS, STEPS)
    elif program <= E:
        route_expert(program, ids, order, tiles, S, E, ROWS, BLOCK, WAYS, STEPS)
    else:
        i = (program - E - 1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
        arrange_words(x, None, out, i, count, K, FMT, DTYPE, 1, GROUP)


@triton.jit
def route_expert(
    expert, ids, order, tiles, S, E, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write where the pairs of an expert are, and its tiles. STEPS: 1, or 2 for any more."""
    # Pairs that follow each other are one lane's, so that few numbers are summed up.
    lane = tl.arange(0, BLOCK // WAYS)
    pair = lane[:, None] * WAYS + tl.arange(0, WAYS)[None, :]
    if STEPS == 1:
        chosen = expert_at(ids, pair, S, E)
        mine = (chosen == expert).to(tl.int32)
        first = tl.sum(tl.sum((chosen < expert).to(tl.int32), axis=1))
        count = write_order(order, mine, pair, first)
    else:
        before = tl.zeros((BLOCK // WAYS,), tl.int32)
        for start in range(0, S, BLOCK):
            chosen = expert_at(ids, start + pair, S, E)
            before += tl.sum((chosen < expert).to(tl.int32), axis=1)
        first = tl.sum(before)
        count = first - first
        for start in range(0, S, BLOCK):
            mine = (expert_at(ids, start + pair, S, E) == expert).to(tl.int32)
            count += write_order(order, mine, start + pair, first + count)
    end = first + count
    slot = first // ROWS + expert
    last = end // ROWS + expert + 1
    for start in range(slot, last, BLOCK // WAYS):
        at = first + (start - slot + lane) * ROWS
        tile = tiles + 3 * (start + lane)
        inside = start + lane < last
        tl.store(tile, tl.zeros((BLOCK // WAYS,), tl.int32) + expert, mask=inside)
        tl.store(tile + 1, at, mask=inside)
        tl.store(tile + 2, tl.minimum(at + ROWS, end), mask=inside)


@triton.jit
def write_order(order, mine, pair, first):
    """Write those of pairs that are an expert's from `first` on; return how many there are."""
    own = tl.sum(mine, axis=1)
    place = first + (tl.cumsum(own) - own)[:, None] + tl.cumsum(mine, axis=1) - mine
    tl.store(order + place, pair, mask=mine > 0)
    return tl.sum(own)


@triton.jit
def expert_at(ids, pair, S, E):
    """Return the experts of pairs as int32: E for those of none, E + 1 beyond the last pair."""
    chosen = tl.load(ids + pair, mask=pair < S, other=0)
    chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E).to(tl.int32)
    return tl.where(pair < S, chosen, E + 1)
