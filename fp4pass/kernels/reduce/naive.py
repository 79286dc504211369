"""Reduce a tensor over processes, through the backend of their group or memory of its GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import process_group
from .memory import LARGEST, MEMORIES


def all_reduce_ref(x: Tensor, group: str, maximum: bool) -> Tensor:
    """Return the sum or the maximum [...] of x [...] of all processes, in every one."""
    # group: its name; "" is a process that is alone.
    memory = MEMORIES.get(group)
    # A group of that name may be gone.
    if memory is not None and memory.group is process_group(group) and is_served(x):
        from .triton import all_reduce_triton

        return all_reduce_triton(x, memory, maximum)
    out = x.clone(memory_format=torch.contiguous_format)
    if group:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(out, operation, group=process_group(group))
    return out


def is_served(x: Tensor) -> bool:
    """Return whether a tensor goes through the memory of GPUs, where there is any."""
    whole_words = x.nbytes % 4 == 0 and 0 < x.nbytes <= LARGEST
    return x.is_cuda and whole_words and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
