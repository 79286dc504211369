"""Read safetensors files by their headers: whole or not, in rows, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..core.files import parse_json

# By the names of safetensors; codes of other dtypes are read as bytes.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32},
    **{"I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
}

# Bytes of a tensor that are read at once, where a part of it is enough.
_AT_ONCE = 1 << 25

# No header is larger, by safetensors' own limit.
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its place and its shape."""

    name: str
    path: Path
    kind: str  # the safetensors dtype
    shape: tuple[int, ...]
    start: int  # of its first byte in the file
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start

    def read(self) -> Tensor:
        """Return the tensor, in memory of its own."""
        return self._part(0, self.nbytes).view(self._dtype).reshape(self.shape)

    def rows(self, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield parts [R, width] of the tensor as a matrix, each with the number of its first row.

        width: numbers in a row.
        """
        rows = math.prod(self.shape) // max(width, 1)
        if not rows:
            return
        size = self.nbytes // rows
        step = max(_AT_ONCE // max(size, 1), 1)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            part = self._part(first * size, last * size)
            yield first, part.view(self._dtype).reshape(last - first, -1)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES.get(self.kind, torch.uint8)

    def _part(self, first: int, last: int) -> Tensor:
        if first == last:
            return torch.empty(0, dtype=torch.uint8)
        found = torch.empty(last - first, dtype=torch.uint8)
        with self.path.open("rb") as stream:
            stream.seek(self.start + first)
            if stream.readinto(found.numpy().data) != last - first:
                raise OSError(f"{self.path} ends within {self.name}")
        return found


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file. Raises ValueError, which says what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise ValueError("expected weights, got a pointer of Git LFS to them")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"expected a file of safetensors, got {size} bytes of something else")
        stream.seek(8)
        try:
            header = parse_json(stream.read(length))
            header.pop("__metadata__", None)
            found = {
                name: Stored(
                    name,
                    path,
                    str(facts["dtype"]),
                    tuple(map(int, facts["shape"])),
                    *(8 + length + int(offset) for offset in facts["data_offsets"]),
                )
                for name, facts in header.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is damaged: {error!r:.100}") from error
    end = max((each.stop for each in found.values()), default=8 + length)
    if end != size:
        raise ValueError(f"expected {end} bytes, as its header says, got {size}")
    for each in found.values():
        dtype = DTYPES.get(each.kind)
        if dtype is not None and each.nbytes != math.prod(each.shape) * dtype.itemsize:
            raise ValueError(
                f"{each.name}: {each.shape} of {each.kind} are not {each.nbytes} bytes"
            )
    return found
