"""Compute all experts of a mixture, with one launch for each dependent step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedWeight
from ..common.tiles import (
    LAUNCH,
    as_words,
    cdiv,
    global_multiplier,
    overlapping,
    power,
    rounded,
    wait,
)
from ..dequantize.triton import packed_words
from ..linear.matmul_triton import padded_columns
from ..linear.ptx_triton import offset
from ..linear.tiling import Tiles, shared_memory_of
from .matmul_triton import exact_few_rows_sums
from .naive import Gate, experts_mixture_ref
from .routing_triton import route, route_and_arrange
from .tiling import ExpertTiles, config
from .triton import experts_linear_triton, group_of, launch, tokens_at_once

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
