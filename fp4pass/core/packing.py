"""Codes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DtypeError, OptionError, ShapeError, expected
from .formats import Format

# The packing of `pack_codes`, by the bits of a code.
PACKINGS = {
    4: "2 codes a byte, the first low",
    6: "4 codes in 3 bytes, the first lowest",
    8: "1 code a byte",
}


class PackedWeight(NamedTuple):
    """A weight [N, K], or a stack [E, N, K] of them, in blocks along K, as operators take it."""

    packed: Tensor  # uint8 [..., N, P], packed codes; in kernels words of them
    # [..., *scale_shape(N, K)], uint8 for the bits of 8-bit scales, else float32.
    scale: Tensor
    global_scale: Tensor | None  # float32 [1], or [E], as it is stored
    bias: Tensor | None = None  # [..., N]


class PackedInput(NamedTuple):
    """Quantized rows [..., K] in blocks along K, as operators take them."""

    packed: Tensor  # uint8 [..., P]
    scale: Tensor  # [..., scale_columns(K)], uint8 or float32 as that of a weight
    global_scale: Tensor | None  # float32 [1], or [E] for the rows of each expert


def pack_codes(codes: Tensor, bits: int = 4) -> Tensor:
    """Pack codes [..., K] below 2^bits into bytes [..., K * bits / 8], the first code lowest."""
    # `PACKINGS` says how. Raises DtypeError for codes that are not uint8, ShapeError for codes that
    # do not fill whole bytes, and OptionError for widths that have no packing.
    if codes.dtype != torch.uint8:
        raise DtypeError(f"pack_codes: expected codes of torch.uint8, got {codes.dtype}.")
    count = _codes_together(bits)
    if codes.shape[-1] % count:
        raise ShapeError(expected("codes", f"a multiple of {count} columns", codes.shape[-1]))
    if bits == 8:
        return codes.clone()
    if bits == 4:
        # A copy, because a view must start at an even byte. The even column is its low byte.
        both = codes.clone(memory_format=torch.contiguous_format).view(torch.int16)
        return both.bitwise_or(both >> 4).to(torch.uint8)
    a, b, c, d = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=-1).flatten(-2)


def unpack_codes(packed: Tensor, bits: int = 4) -> Tensor:
    """Return the codes [..., K] uint8 that `pack_codes` packed, with the same errors."""
    if packed.dtype != torch.uint8:
        raise DtypeError(f"unpack_codes: expected bytes of torch.uint8, got {packed.dtype}.")
    _codes_together(bits)
    if bits == 8:
        return packed.clone()
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    if packed.shape[-1] % 3:
        raise ShapeError(expected("packed", "a multiple of 3 bytes", packed.shape[-1]))
    x, y, z = packed.unflatten(-1, (-1, 3)).unbind(-1)
    codes = (x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2)
    return torch.stack(codes, dim=-1).flatten(-2)


def empty_blocks(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return uninitialized packed codes [..., P] and scales [..., J] for rows x [..., K]."""
    return empty_rows(x, x.shape[:-1], fmt)


def empty_weight(weight: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return uninitialized packed codes [..., N, P] and scales [..., I, J] for a weight."""
    *leading, rows, columns = weight.shape
    packed = weight.new_empty((*leading, rows, fmt.packed_columns(columns)), dtype=torch.uint8)
    shape = (*leading, *fmt.scale_shape(rows, columns))
    return packed, weight.new_empty(shape, dtype=fmt.scale.dtype)


def empty_rows(x: Tensor, leading: Sequence[int], fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the same for rows [*leading, K] in place of x."""
    columns = x.shape[-1]
    packed = x.new_empty((*leading, fmt.packed_columns(columns)), dtype=torch.uint8)
    shape = (*leading, fmt.scale_columns(columns))
    return packed, x.new_empty(shape, dtype=fmt.scale.dtype)


def _codes_together(bits: int) -> int:
    """Return how many codes fill whole bytes. Raises OptionError for other widths."""
    together = {4: 2, 6: 4, 8: 1}
    if bits not in together:
        raise OptionError(f"Codes of {bits} bits have no packing; choose 4, 6 or 8.")
    return together[bits]
