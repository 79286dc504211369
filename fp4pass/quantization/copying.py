"""Copies between memory and a GPU beside what it computes."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of pinned memory of a copy, without which it does not overlap kernels.
_STAGED = 1 << 26


def copy_beside(source: Tensor, target: Tensor, mark: torch.cuda.Event) -> torch.cuda.Event:
    """Copy a tensor to or from a GPU, on a stream of its own behind a mark.

    Returns the mark of the end. The thread that calls it waits for the copy, so call it in one
    beside that which computes.
    """
    gpu = source.device if source.is_cuda else target.device
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream), torch.no_grad():
        stream.wait_event(mark)
        if source.is_contiguous() and target.is_contiguous() and source.numel():
            _copy_staged(source, target, stream)
        else:
            target.copy_(source)
        return stream.record_event()


def _copy_staged(source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> None:
    staged = torch.empty(min(source.nbytes, _STAGED), dtype=torch.uint8, pin_memory=True)
    parts = (x.detach().reshape(-1).view(torch.uint8).split(len(staged)) for x in (source, target))
    for part, there in zip(*parts, strict=True):
        between = staged[: len(part)]
        between.copy_(part, non_blocking=True)
        if part.is_cuda:
            stream.synchronize()
        there.copy_(between, non_blocking=True)
        stream.synchronize()
