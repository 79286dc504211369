"""Reduce a tensor over processes, through the backend of their group or memory of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import process_group
from ..norm.naive import SQUARES, square_sums_ref

# Bytes of a tensor that goes through it: 32 rows of 4096 numbers in bfloat16. Larger
# ones wait for the links, which NCCL shares better.
LARGEST = 1 << 18

# Words of a program, one for each of its threads.
WORDS = 128


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of all processes of a group, as this one reaches it.

    Attributes:
        words: int64 [2, size, LARGEST / 4], of this process: what each rank sent in even and in
            odd calls, its 32 bits below the number of the call.
        addresses: int64 [size], of `words` of each process.
        calls: int32 [LARGEST / 4 / WORDS], how often each program ran.
        rank: that of this process.
        group: its process group.
    """

    words: Tensor
    addresses: Tensor
    calls: Tensor
    rank: int
    group: Any

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.addresses)

    @staticmethod
    def of(words: Tensor, addresses: list[int], rank: int, group: Any = None) -> Memory:
        """Return the memory of a group, given the words [2 x size x LARGEST / 4] of each, zero."""
        there = torch.tensor(addresses, dtype=torch.int64, device=words.device)
        calls = torch.zeros(LARGEST // 4 // WORDS, dtype=torch.int32, device=words.device)
        return Memory(words, there, calls, rank, group)


def count_of_words(size: int) -> int:
    """Return the number of words that a process of a group has."""
    return 2 * size * LARGEST // 4


# That of each group, by its name.
MEMORIES: dict[str, Memory] = {}


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
