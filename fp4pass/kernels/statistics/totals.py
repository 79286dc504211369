"""Totals that observers add to: zeros that take no memory, until a device adds to them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros on the CPU, in memory that the system gives once they are read or written."""
    # A whole Hessian on its way to a GPU would otherwise be written here first.
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def moved_totals(totals: Sequence[Tensor], device: torch.device, has_seen: bool) -> list[Tensor]:
    """Return totals on a device; made there, and not copied, before anything was added."""
    # A compiler would merge those that two observers make in one graph.
    if has_seen or torch.compiler.is_compiling():
        return [total.to(device) for total in totals]
    return [torch.zeros(total.shape, dtype=total.dtype, device=device) for total in totals]
