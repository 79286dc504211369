"""Norms of heads, rotary embedding and the write into a cache in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_write_ref(
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
    """Write new keys and values into a cache, and return the queries, all as attention reads them.

    Keys and queries go through an RMSNorm of each head, where there is one, and the rotary
    embedding, whose pairs are columns j and j + D / 2. Rounds where eager PyTorch does.

    Args:
        q: [B, T, heads, D].
        k: [B, T, groups, D].
        v: [B, T, groups, E].
        q_weight: [D] of the norm, or None without one.
        k_weight: the same for keys.
        eps: what the norms add to the mean of squares.
        cos: [B, T, D] or [1, T, D].
        sin: the same.
        places: [T] int64: where the tokens stand in the cache.
        keys: [B, groups, S, D]; rows `places` are written.
        values: [B, groups, S, E], the same.

    Returns:
        [B, heads, T, D] in the dtype of q.
    """
    # Inputs may be wider than what they are multiplied with: the model's dtype is that of cos.
    keys.index_copy_(2, places, _rotated(_normed(k, k_weight, eps), cos, sin))
    values.index_copy_(2, places, v.transpose(1, 2))
    return _rotated(_normed(q, q_weight, eps), cos, sin).contiguous()


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
