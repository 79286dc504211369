"""Normalize, rotate and write new tokens into a cache in the kernel of attention, on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import rounded


class NewTokens(NamedTuple):
    """New keys and values for a cache, and the numbers that turn them and the queries."""

    k: Tensor  # [B, T, groups, D], as `v`, of adjacent columns
    v: Tensor
    q_weight: Tensor | None  # [D] of the norms
    k_weight: Tensor | None
    eps: float
    cos: Tensor  # [B, T, D]
    sin: Tensor
    places: Tensor  # [T], positions in the cache, or [], the first of them
    # Of k and v in texts, tokens and heads; of cos and sin in texts, 0 for one of all, and tokens;
    # of places.
    strides: tuple[int, ...]


def new_tokens(
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
) -> NewTokens:
    """Return new tokens as the kernel reads them."""
    k, v, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v, cos, sin))
    weights = (None if each is None else each.contiguous() for each in (q_weight, k_weight))
    tables = ((x.stride(0) if len(x) > 1 else 0, x.stride(1)) for x in (cos, sin))
    strides = (*k.stride()[:3], *v.stride()[:3], *(stride for each in tables for stride in each))
    strides = (*strides, places.ndim)
    return NewTokens(k, v, *weights, eps, cos, sin, places.contiguous(), strides)


@triton.jit
def write_new(
    keys, values, keys_d, values_d, kept, text, group, token, new,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write a head of keys and values of some tokens to where their rows begin."""
    d, e = tl.arange(0, D), tl.arange(0, E)
    at = new.k + text * new.strides[0] + token * new.strides[1] + group * new.strides[2]
    row = turned(at, kept, new.k_weight, text, token, new, WIDTH, D)
    there = kept[:, None] & (d < WIDTH)[None, :]
    tl.store(keys[:, None] + d[None, :] * keys_d, row, mask=there)
    at = new.v + text * new.strides[3] + token * new.strides[4] + group * new.strides[5]
    there = kept[:, None] & (e < OUT_WIDTH)[None, :]
    row = tl.load(at[:, None] + e[None, :], mask=there)
    tl.store(values[:, None] + e[None, :] * values_d, row, mask=there)


@triton.jit
def turned(at, kept, weight, text, token, new, WIDTH: tl.constexpr, D: tl.constexpr):
    """Return heads of tokens, normed if there is a weight, and rotated."""
    # Pairs are columns j and j + WIDTH / 2. Rounds where eager PyTorch does.
    d = tl.arange(0, D)
    other = (d + WIDTH // 2) % WIDTH
    inside = d < WIDTH
    there = kept[:, None] & inside[None, :]
    DTYPE: tl.constexpr = at.dtype.element_ty
    cos = new.cos + text * new.strides[6] + token * new.strides[7]
    sin = new.sin + text * new.strides[8] + token * new.strides[9]
    x = tl.load(at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.load(at[:, None] + other[None, :], mask=there, other=0.0).to(tl.float32)
    cos = tl.load(cos[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sin[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    if weight is not None:
        of_x = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        of_y = tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
        mean = tl.math.div_rn(tl.sum(x * x, 1), WIDTH * 1.0)
        factor = tl.math.rsqrt(mean + new.eps)[:, None]
        x = narrow(narrow(x * factor, DTYPE) * of_x[None, :], DTYPE)
        y = narrow(narrow(y * factor, DTYPE) * of_y[None, :], DTYPE)
    y = tl.where((d < WIDTH // 2)[None, :], -y, y)
    return rounded(narrow(x * cos, DTYPE) + narrow(y * sin, DTYPE), DTYPE)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return float32 x rounded to a dtype, in float32."""
    return rounded(x, dtype).to(tl.float32)
