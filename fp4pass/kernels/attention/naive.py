"""Attention of few queries in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


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
