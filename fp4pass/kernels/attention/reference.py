"""Attention of few queries in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# Queries of a tile of `attention_many`.
QUERIES = 128


def attention_span_ref(mask: Tensor) -> Tensor:
    """Return where the keys begin and end that a mask lets any query read.

    Args:
        mask: [B, heads, T, S], bool (True: is read) or added to the products; any size may be 1.

    Returns:
        [B, 2] int32: the first such key and the one behind the last; 0 and 0 if there is none.
    """
    read = mask if mask.dtype == torch.bool else mask != -torch.inf
    read = read.flatten(1, 2).any(1)
    keys = torch.arange(read.shape[1], device=mask.device, dtype=torch.int32)
    end = torch.where(read, keys + 1, 0).amax(1)
    first = torch.where(read, keys, read.shape[1]).amin(1)
    return torch.stack((torch.minimum(first, end), end), 1)


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, span: Tensor, scale: float
) -> Tensor:
    """Return softmax(q k^T scale + mask) v, where several heads of q read one of k and v.

    Args:
        q: [B, heads, T, D].
        k: [B, groups, S, D]; heads is a multiple of groups.
        v: [B, groups, S, E].
        mask: [B, heads, T, S], bool or added to the products; any size but S may be 1.
        span: [B, 2] or [1, 2] int32 of `attention_span`; no other keys are read.
        scale: what multiplies the products.

    Returns:
        [B, T, heads, E] in the dtype of q, 0 where a query reads no key.
    """
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


def attention_ranges_ref(mask: Tensor) -> Tensor:
    """Return which keys each tile of QUERIES queries reads, and reads freely.

    Args:
        mask: [B, heads, T, S], bool (True: is read) or added to the products; any size may be 1.

    Returns:
        [B, heads, T / QUERIES, 4] int32: the first key that any query of the tile reads, and the
        one behind the last; the longest run of keys that all of them read with nothing added, from
        and to. Of several the first; none begins and ends at the first number.
    """
    size = mask.shape[3]
    read = mask if mask.dtype == torch.bool else mask != -torch.inf
    free = mask if mask.dtype == torch.bool else mask == 0
    keys = torch.arange(size, device=mask.device)
    found = []
    for of_tile, free_of_tile in zip(read.split(QUERIES, 2), free.split(QUERIES, 2), strict=True):
        any_reads, all_free = of_tile.any(2), free_of_tile.all(2)
        end = torch.where(any_reads, keys + 1, 0).amax(2)
        first = torch.minimum(torch.where(any_reads, keys, size).amin(2), end)
        run = keys - torch.where(all_free, -1, keys).cummax(2).values
        most = run.amax(2)
        stop = torch.where(run == most[..., None], keys + 1, size).amin(2)
        stop = torch.where(most > 0, stop, first)
        found.append(torch.stack((first, end, stop - most, stop), 2))
    return torch.stack(found, 2).int()


def attention_many_ref(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ranges: Tensor, scale: float
) -> Tensor:
    """Return softmax(q k^T scale + mask) v, as `attention_ref` does, of many queries.

    Args:
        q: [B, heads, T, D].
        k: [B, groups, S, D]; heads is a multiple of groups.
        v: [B, groups, S, E].
        mask: [B, heads, T, S], bool or added to the products; any size but T and S may be 1.
        ranges: [B, heads, T / QUERIES, 4] int32 of `attention_ranges`; sizes of 1 as in the mask.
        scale: what multiplies the products, above 0.

    Returns:
        [B, T, heads, E] in the dtype of q, 0 where a query reads no key.
    """
    whole = torch.tensor([[0, k.shape[2]]], dtype=torch.int32, device=q.device)
    return attention_ref(q, k, v, mask, whole, scale)
