"""Attend with few queries in plain PyTorch, and normalize, rotate and write keys first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Heads of keys of all texts together that are split over programs, at most.
COUNTERS = 264


def attention_span_ref(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last key that a mask [B, heads, T, S] lets any query read."""
    # mask: bool (True: is read) or added to the products; any size may be 1. Returns int32 [B, 2],
    # the first such key and the one behind the last, 0 and 0 if there is none; and [COUNTERS] int32
    # zeros, with which the programs of `attention` count.
    read = mask if mask.dtype == torch.bool else mask != -torch.inf
    read = read.flatten(1, 2).any(1)
    keys = torch.arange(read.shape[1], device=mask.device, dtype=torch.int32)
    end = torch.where(read, keys + 1, 0).amax(1)
    first = torch.where(read, keys, read.shape[1]).amin(1)
    span = torch.stack((torch.minimum(first, end), end), 1)
    return span, span.new_zeros(COUNTERS)


class Cache(NamedTuple):
    """Keys and values, and which of them queries read."""

    keys: Tensor  # [B, groups, S, D]
    values: Tensor  # [B, groups, S, E]
    mask: Tensor  # [B, heads, T, S], bool or added to the products; any size but S may be 1
    span: Tensor  # [B, 2] or [1, 2] int32 of `attention_span`; no other keys are read
    # The zeros of `attention_span`. A kernel may change them and leaves zeros, so calls with the
    # same counters are made on one stream.
    counters: Tensor
    scale: float  # factor of the products


class NewTokens(NamedTuple):
    """New keys and values for a cache, and what turns them and the queries."""

    k: Tensor  # [B, T, groups, D]
    v: Tensor  # [B, T, groups, E]
    q_weight: Tensor | None  # [D] of the norm, or None without one
    k_weight: Tensor | None  # the same for keys
    eps: float  # added by the norms to the mean of squares
    cos: Tensor  # [B, T, D] or [1, T, D]
    sin: Tensor  # the same
    places: Tensor  # [T] int64, positions of the tokens in the cache; or [], that of the first


def attention_ref(q: Tensor, cache: Cache) -> Tensor:
    """Return softmax(q k^T scale + mask) v of q [B, heads, T, D]: [B, T, heads, E] in its dtype."""
    # Several heads of q read one of k and v. The result is 0 where a query reads no key.
    k, v, mask, span, _, scale = cache
    count = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[2], device=k.device)
    outside = ((keys < span[:, :1]) | (keys >= span[:, 1:]))[:, None, :, None]
    k, v = (each.float().masked_fill(outside, 0).repeat_interleave(count, 1) for each in (k, v))
    logits = (q.float() @ k.mT * scale).masked_fill(outside.mT, -torch.inf)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    else:
        logits = logits + mask.float()
    weights = torch._safe_softmax(logits, -1)
    return (weights @ v).transpose(1, 2).to(q.dtype).contiguous()


def rotary_attention_ref(q: Tensor, new: NewTokens, cache: Cache) -> Tensor:
    """Write new keys and values into a cache, and return attention that reads it."""
    # q is [B, T, heads, D], the result [B, T, heads, E] in its dtype, 0 where a query reads no key.
    # Keys and queries go through an RMSNorm of each head, where there is one, and the rotary
    # embedding, whose pairs are columns j and j + D / 2. Rounds where eager PyTorch does.
    # Inputs may be wider than what they are multiplied with: the model's dtype is that of cos.
    places, cos, sin, eps = new.places, new.cos, new.sin, new.eps
    if places.ndim == 0:
        places = places + torch.arange(q.shape[1], device=places.device)
    keys = _rotated(_normed(new.k, new.k_weight, eps), cos, sin)
    cache.keys.index_copy_(2, places, keys)
    cache.values.index_copy_(2, places, new.v.transpose(1, 2))
    return attention_ref(_rotated(_normed(q, new.q_weight, eps), cos, sin), cache)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
