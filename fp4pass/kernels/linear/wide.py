"""How products of many rows on Hopper are cut, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, PTX, cdiv, overlapping, wider
from .matmul_triton import add_parts_kernel
from .ptx_triton import offset

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .wide_triton import wide_kernel
except ImportError:
    # Gluon is experimental: what it has differs between versions of Triton.
    wide_kernel = None

# Columns to a thread block of the kernel that adds parts.
_BLOCK = 512


@dataclass(frozen=True)
class Wide:
    """How a product is cut: programs of 16 weights for each warp, by `m` rows of x."""

    m: int
    warps: int
    columns: int  # of each row at a time
    stages: int  # tiles of x that are under way at a time
    parts: int = 1  # programs that share one sum over K

    @property
    def group(self) -> int:
        """Words of eight columns that bfloat16 x is sorted by."""
        return self.columns // 8


def bfloat16_tiles(m: int, n: int, k: int, fmt: Format) -> Wide | None:
    """Return how x [m, k] in bfloat16 and a weight [n, k] are cut, or None if that is slower."""
    if not 48 < m <= 512:
        return None
    if m > 256:
        # 132 programs run at a time, and a last round that is half empty costs a whole one.
        rounds = cdiv(m, 256) * cdiv(n, 128) / 132
        return Wide(256, 8, 64, 6) if m > 448 and rounds > 0.8 * ceil(rounds) else None
    if m <= 64:
        # Where programs are few, Triton's product decodes scales with a mantissa as fast.
        if n <= 8192 and fmt.scale.mantissa_bits > 0:
            return None
        programs, parts = cdiv(n, 64), 1
        while 2 * parts * programs <= 256 and k >= 2048 * parts:
            parts *= 2
        return Wide(64, 4, 128, 4, parts)
    if m > 128 and n > 8192:
        return Wide(256, 8, 64, 6)
    programs, parts = cdiv(m, 128) * cdiv(n, 64), 1
    while 2 * parts * programs <= (256 if k > 8192 else 128) and k >= 2048 * parts:
        parts *= 2
    return Wide(128, 4, 128, 3, parts)


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return device.type != "cpu" and torch.cuda.get_device_properties(device).major == 9


def runs_wide(k: int, device: torch.device) -> bool:
    """Return whether products over K columns can run on this device."""
    return wide_kernel is not None and bool(PTX) and k % 256 == 0 and _is_hopper(device)


def blocks_of(codes: Tensor) -> Tensor:
    """Return codes as int64 words of sixteen, copied unless contiguous and aligned."""
    return wider(codes, torch.int64)


def multiply_wide(
    x: Tensor,
    x_factors: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    powers: Tensor | None,
    factors: Tensor | None,
    x_global_scale: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    fmt: Format,
    wide: Wide,
    releases: bool = False,
) -> Tensor:
    """Fill `out` [M, N] with the product of sorted rows x [M, K] and a weight, and return it."""
    # x of E4M3 has factors, as the weight then has powers and factors; else it is bfloat16.
    (m, k), n = x.shape, len(codes)
    whole = wide.parts == 1
    sums = out if whole else out.new_empty((wide.parts, m, n), dtype=torch.float32)
    fp8 = powers is not None
    block = [wide.m, wide.columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv if fp8 else gl.bfloat16)
    tiles = TensorDescriptor.from_tensor(x, block, layout)
    wide_kernel[(cdiv(m, wide.m), cdiv(n, 16 * wide.warps), wide.parts)](
        tiles, x_factors, blocks_of(codes), scale.contiguous(), powers, factors,
        x_global_scale, global_scale, bias, sums, m, n, K=k, FMT=fmt, FP8=fp8, BM=wide.m,
        BN=16 * wide.warps, COLUMNS=wide.columns, STAGES=wide.stages, PARTS=wide.parts,
        WARPS=wide.warps, num_warps=wide.warps, **LAUNCH, **overlapping(x.device, releases),
    )  # fmt: skip
    if not whole:
        add_parts_kernel[(cdiv(n, _BLOCK), m)](
            sums, x_global_scale, global_scale, bias, out, m, n, FMT=fmt,
            SHIFT=0 if fp8 else offset(fmt), PARTS=wide.parts, BLOCK=_BLOCK, **LAUNCH,
            **overlapping(x.device, releases),
        )  # fmt: skip
    return out
