"""Reduce a tensor over processes, through the backend of their group or memory of its GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import process_group
from ..norm.naive import SQUARES, square_sums_ref
from .memory import LARGEST, MEMORIES, Memory


def all_reduce_ref(x: Tensor, group: str, maximum: bool) -> Tensor:
    """Return the sum or the maximum [...] of x [...] of all processes, in every one."""
    # group: its name; "" is a process that is alone.
    memory = _memory_for(x, group)
    if memory is not None:
        from .triton import all_reduce_triton

        return all_reduce_triton(x, memory, maximum)
    out = x.clone(memory_format=torch.contiguous_format)
    if group:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(out, operation, group=process_group(group))
    return out


def all_reduce_add_ref(x: Tensor, residual: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return residual + the sum of x [..., N] of all processes, and its `square_sums_ref`."""
    memory = _memory_for(x, group)
    if memory is not None and x.shape[-1] % SQUARES == 0:
        from .triton import all_reduce_add_triton

        return all_reduce_add_triton(x, residual, memory)
    total = residual + all_reduce_ref(x, group, False)
    return total, square_sums_ref(total)


def _memory_for(x: Tensor, group: str) -> Memory | None:
    """Return the memory through which a tensor goes, or None for the backend of its group."""
    memory = MEMORIES.get(group)
    # A group of that name may be gone.
    is_there = memory is not None and memory.group is process_group(group)
    return memory if is_there and is_served(x) else None


def is_served(x: Tensor) -> bool:
    """Return whether a tensor goes through the memory of GPUs, where there is any."""
    whole_words = x.nbytes % 4 == 0 and 0 < x.nbytes <= LARGEST
    return x.is_cuda and whole_words and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
