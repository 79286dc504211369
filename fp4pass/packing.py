"""Codes in bytes, and the record that holds a quantized tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError
from .formats import Format


def pack_codes(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes into a byte along the last dimension, the even column low.

    codes: [..., K] uint8, each below 16, K even. Returns [..., K / 2] uint8.
    Raises ShapeError if K is odd, DtypeError if codes are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes are {codes.dtype}; torch.uint8 is wanted.")
    if codes.shape[-1] % 2:
        raise ShapeError(f"codes have {codes.shape[-1]} columns; two make a byte, so K is even.")
    # A copy, because a view must start at an even byte. The even column is its low byte.
    both = codes.clone(memory_format=torch.contiguous_format).view(torch.int16)
    return both.bitwise_or(both >> 4).to(torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`: [..., K / 2] uint8 to [..., K] uint8."""
    if packed.dtype != torch.uint8:
        raise DtypeError(f"packed codes are {packed.dtype}; torch.uint8 is wanted.")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, eq=False)
class QuantState:
    """A quantized tensor: `value = element(code) * scale * global_scale`.

    packed: uint8 [N, K / 2]; scale: uint8 bits [N, K / block]; global_scale: the multiplier, 1.0
    for formats without one; shape: (N, K) of the tensor it stands for.
    """

    packed: Tensor
    scale: Tensor
    global_scale: float
    format: Format
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        wanted = {
            "packed": (rows, columns * self.format.element.bits // 8),
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
