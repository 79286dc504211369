"""Have each process read a part of the same tensors, and exchange the parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from .ranks import Ranks, as_bytes

# Smaller tensors are read whole by all: a message would take as long.
_LEAST = 1 << 20

# Bytes that a part begins at a multiple of: a page of memory.
_PAGE = 1 << 12


def own_part(group: Ranks, tensor: Tensor) -> slice:
    """Return the bytes of a contiguous tensor that this rank reads."""
    return _parts(group, tensor)[group.rank]


def exchange_parts(group: Ranks, tensors: Sequence[Tensor]) -> None:
    """Complete contiguous tensors in place. Each rank has filled its own part of each."""
    for tensor in tensors:
        if tensor.nbytes >= _LEAST:
            for source, part in enumerate(_parts(group, tensor)):
                group.fill(as_bytes(tensor)[part], source)


def _parts(group: Ranks, tensor: Tensor) -> list[slice]:
    if tensor.nbytes < _LEAST:
        return [slice(0, tensor.nbytes)] * group.size
    pages = -(-tensor.nbytes // _PAGE)
    ends = [min(tensor.nbytes, i * pages // group.size * _PAGE) for i in range(group.size)]
    ends.append(tensor.nbytes)
    return [slice(a, b) for a, b in itertools.pairwise(ends)]
