"""Codes in bytes, and the record that holds a quantized tensor."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, DtypeError, OptionError, ShapeError
from .codebooks import Codebook, get_scheme
from .formats import Format

# Of the formats, by the bits of a code: what `pack_codes` makes.
_PACKINGS = {
    4: "2 codes a byte, the first low",
    6: "4 codes in 3 bytes, the first lowest",
    8: "1 code a byte",
}

# The entry of a safetensors file's metadata that holds what a QuantState is beside its tensors.
_METADATA = "quant_state"


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

    qdata: packed codes, uint8. scheme: what they mean. shape and dtype: of the tensor that
    `fp4pass.dequantize` gives back.
    In a format, blocks run along the last dimension, K, filled up with zeros to whole ones: qdata
    [..., P], scale the bits uint8 [..., ceil(K / block)], global_scale the multiplier, 1.0 for
    formats without one. In a codebook they run over the flattened tensor, of n elements: qdata
    [ceil(n * bits / 8)], scale the largest magnitudes float32 [ceil(n / block)].
    Raises ShapeError if the tensors do not fit together.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: float
    scheme: Format | Codebook
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.scheme, Codebook):
            count = math.prod(self.shape)
            qdata: tuple[int, ...] = (self.scheme.packed_bytes(count),)
            scale: tuple[int, ...] = (self.scheme.blocks_of(count),)
            kind = torch.float32
        else:
            *leading, columns = self.shape or (1,)
            blocks = -(-columns // self.scheme.block)
            qdata = (*leading, self.scheme.packed_columns(blocks * self.scheme.block))
            scale, kind = (*leading, blocks), torch.uint8
        for name, shape, dtype in (("qdata", qdata, torch.uint8), ("scale", scale, kind)):
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ShapeError(
                    f"QuantState.{name} is {tuple(tensor.shape)} {tensor.dtype}; a "
                    f"{self._size()} tensor in {self.scheme.key} has {shape} {dtype}."
                )

    @property
    def format(self) -> Format:
        """The format of the codes. Raises OptionError if they are those of a codebook."""
        if isinstance(self.scheme, Codebook):
            raise OptionError(
                f"A tensor in {self.scheme.key} is no tensor in a format; its table is `codebook`."
            )
        return self.scheme

    @property
    def codebook(self) -> Codebook | None:
        """The table of the codes, None for formats."""
        return self.scheme if isinstance(self.scheme, Codebook) else None

    @property
    def absmax(self) -> Tensor | None:
        """The largest magnitude of each block of a codebook, float32 [blocks]; None for formats."""
        return self.scale if isinstance(self.scheme, Codebook) else None

    @property
    def packing(self) -> str:
        """How codes lie in the bytes of `qdata`."""
        if isinstance(self.scheme, Codebook):
            return "2 codes a byte, the first high" if self.scheme.bits == 4 else "1 code a byte"
        return _PACKINGS[self.scheme.element.bits]

    def to(self, device: torch.device | str) -> QuantState:
        """The same tensor on another device."""
        return dataclasses.replace(self, qdata=self.qdata.to(device), scale=self.scale.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: `qdata`, `scale`, and in its metadata what they stand for."""
        facts = {
            "scheme": self.scheme.key,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "global_scale": self.global_scale,
            "packing": self.packing,
        }
        tensors = {"qdata": self.qdata.cpu().contiguous(), "scale": self.scale.cpu().contiguous()}
        save_file(tensors, path, metadata={_METADATA: json.dumps(facts)})

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> QuantState:
        """Read what `save` wrote. Raises CheckpointError for any other file."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()[_METADATA])
                qdata, scale = file.get_tensor("qdata"), file.get_tensor("scale")
            state = QuantState(
                qdata,
                scale,
                float(facts["global_scale"]),
                get_scheme(facts["scheme"]),
                tuple(facts["shape"]),
                getattr(torch, facts["dtype"]),
            )
            if not (isinstance(state.dtype, torch.dtype) and state.dtype.is_floating_point):
                raise TypeError(f"its tensor was {facts['dtype']}")
            if not all(isinstance(size, int) and size > 0 for size in state.shape):
                raise ValueError(f"its tensor was of shape {facts['shape']}")
        except (
            OSError,
            SafetensorError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise CheckpointError(
                f"{os.fspath(path)} is no file of QuantState.save: {error}. Save it again."
            ) from error
        return state.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and the global scale."""
        has_global = not isinstance(self.scheme, Codebook) and self.scheme.has_global_scale
        return self.qdata.nbytes + self.scale.nbytes + 4 * has_global

    def _size(self) -> str:
        return " x ".join(map(str, self.shape)) or "scalar"

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        factor = "" if self.global_scale == 1.0 else f", global_scale={self.global_scale}"
        return (
            f"QuantState({self._size()} {dtype} in {self.scheme.key}, blocks of "
            f"{self.scheme.block}{factor}, {self.nbytes} bytes on {self.qdata.device})"
        )
