"""Memory of each GPU of a group that the others write to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
