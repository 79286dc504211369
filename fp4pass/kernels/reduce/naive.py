"""Reduce a tensor over the processes of a group, through its backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import process_group
from ..norm.naive import square_sums_ref

# Bytes of a tensor that goes through memory of GPUs: 32 rows of 4096 numbers in bfloat16. Larger
# ones wait for the links, which NCCL shares better.
LARGEST = 1 << 18


def all_reduce_ref(x: Tensor, group: str, maximum: bool) -> Tensor:
    """Return the sum or the maximum [...] of x [...] of all processes, in every one."""
    # group: its name; "" is a process that is alone.
    out = x.clone(memory_format=torch.contiguous_format)
    if group:
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(out, operation, group=process_group(group))
    return out


def all_reduce_add_ref(
    x: Tensor, residual: Tensor, group: str, *, reduce: Callable[..., Tensor] = all_reduce_ref
) -> tuple[Tensor, Tensor]:
    """Return residual + the sum of x [..., N] of all processes, and its `square_sums_ref`."""
    total = residual + reduce(x, group, False)
    return total, square_sums_ref(total)
