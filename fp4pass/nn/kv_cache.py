"""Formats of cached keys and values: their scales, and the bytes of a head's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import ops
from ..core.formats import E4M3, FP8_E4M3, NVFP4, Format, power_reaching
from ..errors import OptionError, ShapeError, as_option, expected, unknown_name

# The buffers of an attention module with the scales: of E4M3, by the names of checkpoints, and of
# blocks, which engines do not know.
_FP8_SCALES = ("k_scale", "v_scale")
_BLOCK_SCALES = ("k_global_scale", "v_global_scale")
SCALES = (*_FP8_SCALES, *_BLOCK_SCALES)

# The option, and its key in recipes.
KV_CACHE = "kv_cache"
CacheName = Literal["fp8", "fp8_tensor", "nvfp4"]


@dataclass(frozen=True)
class CacheFormat:
    """The format of the cached keys, or values, of one layer."""

    name: str  # for users, and in recipes
    per_head: bool = False  # each head has a scale, [H, 1, 1]; else a layer has one, [1]
    blocks: Format | None = None  # of blocks along a head, with scales that multiply; None for E4M3

    @property
    def scales(self) -> tuple[str, str]:
        """The names of the buffers with the scales of keys and of values."""
        return _FP8_SCALES if self.blocks is None else _BLOCK_SCALES

    @property
    def max(self) -> float:
        """The largest number at a scale of 1."""
        return FP8_E4M3.max if self.blocks is None else E4M3.max * self.blocks.element.max

    def width(self, columns: int) -> int:
        """Return the bytes of one head of one token, which has so many numbers."""
        if self.blocks is None:
            return columns
        return self.blocks.packed_columns(columns) + columns // self.blocks.block

    def require_columns(self, columns: int, where: str) -> None:
        """Raise ShapeError for heads that are no whole number of blocks."""
        if self.blocks is not None and columns % self.blocks.block:
            raise ShapeError(
                f"{where}: {columns} numbers of a head are not a multiple of {self.blocks.block}, "
                f"the block of {as_option('kv_cache', self.name)}. Choose "
                f"{as_option('kv_cache', 'fp8')}."
            )

    def scale_for(self, amax: Tensor) -> Tensor:
        """Return the scales for heads [H]: the smallest powers of two that reach amax."""
        amax = (amax if self.per_head else amax.amax().reshape(1)).to(torch.float32)
        scale = power_reaching(amax, self.max)
        return scale.view(-1, 1, 1) if self.per_head else scale


CACHE_FORMATS = {
    fmt.name: fmt
    for fmt in (
        CacheFormat("fp8", per_head=True),
        CacheFormat("fp8_tensor"),
        CacheFormat("nvfp4", blocks=NVFP4.with_multiplier()),
    )
}


def get_cache_format(name: object) -> CacheFormat:
    """Return the format of a name. Raises OptionError for another."""
    if not isinstance(name, str):
        raise OptionError(expected("kv_cache", "the name of a format, or None", repr(name)))
    if name not in CACHE_FORMATS:
        raise unknown_name("kv_cache", name, CACHE_FORMATS)
    return CACHE_FORMATS[name]


@dataclass(frozen=True)
class CacheCodec:
    """A format with the scale of one layer's keys or values."""

    fmt: CacheFormat
    scale: Tensor

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes uint8 [B, H, T, W] of keys or values [B, H, T, D], saturated."""
        blocks = self.fmt.blocks
        if blocks is None:
            quotient = x.to(torch.float32) / self.scale
            codes = quotient.clamp(-self.fmt.max, self.fmt.max).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8)
        packed, bits = ops.quantize(x.contiguous(), self.scale, blocks.key, "sse")
        return torch.cat([packed, bits], dim=-1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys or values [B, H, T, D] that bytes stand for."""
        blocks = self.fmt.blocks
        if blocks is None:
            values = stored.view(torch.float8_e4m3fn).to(torch.float32)
            return (values * self.scale).to(dtype)
        columns = stored.shape[-1] * blocks.block // self.fmt.width(blocks.block)
        packed = blocks.packed_columns(columns)
        codes, bits = stored.split([packed, stored.shape[-1] - packed], dim=-1)
        stored_blocks = (codes.contiguous(), bits.contiguous(), self.scale)
        return ops.dequantize(*stored_blocks, blocks.key, dtype)

    def empty(self, x: Tensor, length: int) -> Tensor:
        """Return zero bytes for `length` tokens of keys or values like x [B, H, T, D]."""
        heads, columns = x.shape[1], x.shape[3]
        if self.fmt.per_head and len(self.scale) != heads:
            raise ShapeError(
                f"{as_option('kv_cache', self.fmt.name)}: the scales are of {len(self.scale)} "
                f"heads, and the layer has {heads}. Of split heads, choose 'fp8_tensor'."
            )
        self.fmt.require_columns(columns, "The cache")
        return torch.zeros(
            (x.shape[0], heads, length, self.fmt.width(columns)), dtype=torch.uint8, device=x.device
        )
