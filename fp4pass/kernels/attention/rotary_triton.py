"""Normalize and rotate heads, and write them into a cache, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import LAUNCH, cdiv, overlapping, rounded, wait
from .naive import rotary_write_ref

# Heads of a program.
_HEADS = 4


def rotary_write_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Write keys and values into a cache and return queries (`rotary_write_ref`)."""
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return rotary_write_ref(q, k, v, q_weight, k_weight, eps, cos, sin, places, keys, values)
    batch, tokens, heads, width = q.shape
    groups, value_width = v.shape[2:]
    out = q.new_empty((batch, heads, tokens, width))
    blocks = (cdiv(heads, _HEADS), cdiv(groups, _HEADS))
    q, k, v, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, cos, sin))
    weights = (None if each is None else each.contiguous() for each in (q_weight, k_weight))
    rotary_write_kernel[(blocks[0] + 2 * blocks[1], batch * tokens)](
        q, k, v, *weights, eps, cos, sin, places.contiguous(), keys, values, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        # One text's tables are those of all.
        *(cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        *(sin.stride(0) if len(sin) > 1 else 0, sin.stride(1)),
        *keys.stride()[:3], *values.stride()[:3], tokens, heads, groups, *blocks,
        WIDTH=width, VALUE_WIDTH=value_width, HALF=triton.next_power_of_2(width // 2),
        VALUES=triton.next_power_of_2(value_width), HEADS=_HEADS,
        num_warps=4, **overlapping(q.device, True), **LAUNCH,
    )  # fmt: skip
    return out


_LOOSE = ["tokens", "heads", "groups", "query_blocks", "key_blocks", "c_b", "s_b"]


@triton.jit(do_not_specialize=_LOOSE)
def rotary_write_kernel(
    q, k, v, q_weight, k_weight, eps, cos, sin, places, keys, values, out,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, c_b, c_t, s_b, s_t,
    keys_b, keys_h, keys_s, values_b, values_h, values_s,
    tokens, heads, groups, query_blocks, key_blocks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Take HEADS heads of a token: first the programs of queries, then of keys, then of values."""
    block, row = tl.program_id(0), tl.program_id(1)
    text, token = (row // tokens).to(tl.int64), row % tokens
    wait(OVERLAP, RELEASES)
    cos += text * c_b + token * c_t
    sin += text * s_b + token * s_t
    if block < query_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        at = q + text * q_b + token * q_t + head * q_h
        to = out + ((text * heads + head) * tokens + token) * WIDTH
        turn(at, to, q_weight, eps, cos, sin, head < heads, WIDTH, HALF)
    elif block < query_blocks + key_blocks:
        head = (block - query_blocks) * HEADS + tl.arange(0, HEADS)
        at = k + text * k_b + token * k_t + head * k_h
        to = keys + text * keys_b + head * keys_h + tl.load(places + token) * keys_s
        turn(at, to, k_weight, eps, cos, sin, head < groups, WIDTH, HALF)
    else:
        head = (block - query_blocks - key_blocks) * HEADS + tl.arange(0, HEADS)
        e = tl.arange(0, VALUES)
        kept = (head < groups)[:, None] & (e < VALUE_WIDTH)[None, :]
        at = v + text * v_b + token * v_t + head * v_h
        to = values + text * values_b + head * values_h + tl.load(places + token) * values_s
        tl.store(to[:, None] + e[None, :], tl.load(at[:, None] + e[None, :], mask=kept), mask=kept)


@triton.jit
def turn(at, to, weight, eps, cos, sin, kept, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Norm heads, if there is a weight, and rotate pairs of columns j and j + WIDTH / 2."""
    j = tl.arange(0, HALF)
    inside = j < WIDTH // 2
    there = kept[:, None] & inside[None, :]
    dtype: tl.constexpr = to.dtype.element_ty
    a, b = halves(at[:, None] + j[None, :], there, WIDTH)
    cos_a, cos_b = halves((cos + j)[None, :], inside[None, :], WIDTH)
    sin_a, sin_b = halves((sin + j)[None, :], inside[None, :], WIDTH)
    if weight is not None:
        of_a, of_b = halves((weight + j)[None, :], inside[None, :], WIDTH)
        mean = tl.math.div_rn(tl.sum(a * a + b * b, 1), WIDTH * 1.0)
        factor = tl.math.rsqrt(mean + eps)[:, None]
        a = narrow(narrow(a * factor, dtype) * of_a, dtype)
        b = narrow(narrow(b * factor, dtype) * of_b, dtype)
    first = narrow(a * cos_a, dtype) - narrow(b * sin_a, dtype)
    second = narrow(b * cos_b, dtype) + narrow(a * sin_b, dtype)
    tl.store(to[:, None] + j[None, :], rounded(first, dtype), mask=there)
    tl.store(to[:, None] + WIDTH // 2 + j[None, :], rounded(second, dtype), mask=there)


@triton.jit
def halves(at, mask, WIDTH: tl.constexpr):
    """Load a tile and the one WIDTH / 2 columns behind it, in float32."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(at + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return float32 x rounded to a dtype, in float32."""
    return rounded(x, dtype).to(tl.float32)
