"""Codes in bytes, and the record that holds a quantized tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DtypeError, OptionError, ShapeError
from .formats import Format


def pack_codes(codes: Tensor, bits: int = 4) -> Tensor:
    """Pack codes along the last dimension into bytes, the first one lowest.

    codes: [..., K] uint8, each below 2^bits. bits: 4, so that the even column is the low half of a
    byte; 6, four codes in three bytes; or 8. Returns [..., K * bits / 8] uint8.
    Raises ShapeError if the codes fill no whole bytes, DtypeError if they are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes are {codes.dtype}; torch.uint8 is wanted.")
    count = _codes_together(bits)
    if codes.shape[-1] % count:
        raise ShapeError(
            f"codes have {codes.shape[-1]} columns; {count} codes of {bits} bits fill whole bytes, "
            f"so a multiple of {count} is wanted."
        )
    if bits == 8:
        return codes.clone()
    if bits == 4:
        # A copy, because a view must start at an even byte. The even column is its low byte.
        both = codes.clone(memory_format=torch.contiguous_format).view(torch.int16)
        return both.bitwise_or(both >> 4).to(torch.uint8)
    a, b, c, d = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=-1).flatten(-2)


def unpack_codes(packed: Tensor, bits: int = 4) -> Tensor:
    """The inverse of `pack_codes`: [..., K * bits / 8] uint8 to [..., K] uint8."""
    if packed.dtype != torch.uint8:
        raise DtypeError(f"packed codes are {packed.dtype}; torch.uint8 is wanted.")
    count = _codes_together(bits)
    if bits == 8:
        return packed.clone()
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    if packed.shape[-1] % 3:
        raise ShapeError(f"packed codes have {packed.shape[-1]} bytes; {count} codes are 3 bytes.")
    x, y, z = packed.unflatten(-1, (-1, 3)).unbind(-1)
    codes = (x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2)
    return torch.stack(codes, dim=-1).flatten(-2)


def _codes_together(bits: int) -> int:
    """How many codes fill whole bytes. Raises OptionError for widths that are not packed."""
    together = {4: 2, 6: 4, 8: 1}
    if bits not in together:
        raise OptionError(f"Codes of {bits} bits have no packing; choose 4, 6 or 8.")
    return together[bits]


@dataclass(frozen=True, eq=False)
class QuantState:
    """A quantized tensor: `value = element(code) * scale * global_scale`.

    packed: uint8 [N, P], P = K * bits / 8; scale: uint8 bits [N, K / block]; global_scale: the
    multiplier, 1.0 for formats without one; shape: (N, K) of the tensor it stands for.
    """

    packed: Tensor
    scale: Tensor
    global_scale: float
    format: Format
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        wanted = {
            "packed": (rows, self.format.packed_columns(columns)),
            "scale": (rows, columns // self.format.block),
        }
        for name, shape in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != torch.uint8:
                raise ShapeError(
                    f"QuantState.{name} is {tuple(tensor.shape)} {tensor.dtype}; a {rows} x "
                    f"{columns} tensor in {self.format.key} has {shape} torch.uint8."
                )

    def to(self, device: torch.device | str) -> QuantState:
        """The same tensor on another device."""
        return dataclasses.replace(self, packed=self.packed.to(device), scale=self.scale.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and the global scale."""
        return self.packed.nbytes + self.scale.nbytes + 4 * self.format.has_global_scale

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"QuantState({rows} x {columns}, {self.format.key}, global_scale={self.global_scale}, "
            f"{self.packed.device})"
        )
