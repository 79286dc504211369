"""Cut products into programs by their shape, as measured on an H200."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ...core.elements import Record
from ...core.formats import Format
from ..common.tiles import cdiv

# Bfloat16 numbers that hold one of x exactly.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# Rows of a product, so that the offsets of x fit 32 bits.
MAX_ROWS = 8192

# Rows of x up to which decoding in the kernel always beats a dense weight and cuBLAS on an H200.
# Dense float32 is slower still.
_FUSED = {torch.bfloat16: 128, torch.float16: 64, torch.float32: MAX_ROWS}

# Weights beyond which enough programs run for few rows, whatever else is chosen.
_MANY = 8192

# Columns of a row that programs norm before they multiply it, which are in registers, and weights
# of such products: each program norms the row again. Chosen, not measured.
MOST_NORMED, MOST_OF_NORM = 8192, 32768


@dataclass(frozen=True, repr=False)
class Tiles(Record):
    """Sizes of programs: `n` weights by `m` rows of x. Kernels read them as TILES."""

    __hash__ = Record.__hash__

    m: int
    n: int
    words: int  # of eight codes of each weight at a time
    warps: int  # of a program
    stages: int  # loads that are under way at a time
    parts: int = 1  # programs that share one sum over K
    warps_share: bool = False  # whether the warps of a program share that sum
    # Whether the next kernel may be launched while this one runs, to wait for it. Its programs take
    # room from those of this one that still have to start: the shape tells if it pays.
    releases: bool = False
    # Whether the kernel in Gluon takes them, whose `stages` are steps that are loaded ahead.
    in_gluon: bool = False


_Tiles = TypeVar("_Tiles", bound=Tiles)


def fuses(m: int, n: int, dtype: torch.dtype, fmt: Format) -> bool:
    """Return whether x [m, K] and a weight [n, K] are multiplied without a dense weight."""
    if m <= _FUSED[dtype] or dtype != torch.bfloat16 or m > 256:
        return m <= _FUSED[dtype]
    # Of the largest tiles 264 run at a time; a last round that is half empty costs a whole one.
    rounds = cdiv(n, 64) * cdiv(m, 128) / 264
    # Powers of two, far apart, take one more product a weight.
    return (rounds < 1 or rounds % 1 > 0.5) and fmt.scale.mantissa_bits > 0


@lru_cache(maxsize=1024)
def config(
    m: int, n: int, k: int, terms: int, shared_memory: int,
    together: int | None = None, step: int = 0,
) -> Tiles:  # fmt: skip
    """Return the tiles of x [m, k] times a weight [n, k]; an H200 runs 132 programs at a time."""
    # terms: bfloat16 numbers that hold one of x. shared_memory: bytes that a program can have.
    # together: weights in one launch, if of several tensors; it changes no order of sums.
    # step: columns that a warp takes at a time in Gluon (`step_of_warps`).
    together = together or n
    if step:
        warps, ahead = (4, 2) if k <= 8192 else (8, 2)
        if step <= 128:
            warps, ahead = (4, 4) if k < 4096 else (8, 2) if k <= 8192 else (8, 3)
        return Tiles(1, 16, step // 8, warps, ahead, warps_share=True, releases=True, in_gluon=True)
    if m == 1:
        # Whole steps of four warps, if they can be.
        words = 32 if k % 1024 == 0 else 16
        return Tiles(8, 16, words, 4, 3, warps_share=True, releases=together <= _MANY)
    if m <= 8 and terms == 1 and k % 512 == 0:
        # Whole steps of all warps.
        if n > _MANY:
            warps, stages = (1, 3) if k >= 4096 else (2, 4)
            return Tiles(8, 16, 32, warps, stages, warps_share=True, releases=True)
        if k % 1024 == 0:
            return Tiles(8, 16, 32, 4, 3, warps_share=True, releases=together <= 4096)
        return Tiles(8, 16, 16, 4, 4 if together <= 4096 else 3, warps_share=True, releases=True)
    if 8 < m <= 16 and terms == 1:
        parts = 8
        while parts > 1 and (cdiv(n, 32) * parts > 512 or k % (256 * parts)):
            parts //= 2
        if n <= _MANY and k % 256 == 0 and cdiv(n, 32) * parts >= 256:
            # Programs of one warp, which wait for no other.
            return Tiles(16, 32, 32, 1, 3, parts, warps_share=True, releases=True)
        if k % 512 == 0 and k <= 4096 and n * k <= 1 << 25:
            # Each reads all of x, which pays for weights of 25 million elements and not for 59.
            return Tiles(16, 16, 32, 2, 3, warps_share=True, releases=True)
        if n <= _MANY and k > 4096:
            # Two warps, so that more programs are under way.
            return Tiles(16, 32, 32, 2, 4, parts=4)
    rows = min(128, max(8, 1 << (m - 1).bit_length()))
    while rows > 64 and cdiv(n, 64) * cdiv(m, rows) < 128:
        rows //= 2
    tiles = Tiles(rows, 64, 32 if rows <= 32 else 16, 4, 4 if rows == 64 else 3)
    tiles, parts = fitted(tiles, terms, shared_memory), 1
    if m <= 64:
        programs = cdiv(n, 64) * cdiv(m, tiles.m)
        while parts < 4 and 2 * parts * programs <= 256 and k >= 64 * tiles.words * parts:
            parts *= 2
    return replace(tiles, parts=parts, releases=m <= 16 or 32 < m <= 64)


def fitted(tiles: _Tiles, terms: int, shared_memory: int) -> _Tiles:
    """Return tiles like these whose loads fit into the bytes that a program can have."""
    while tiles.stages * tiles.words * (16 * terms * tiles.m + 5 * tiles.n) > shared_memory:
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.words > 16:
            tiles = replace(tiles, words=16, stages=3)
        else:
            tiles = replace(tiles, m=tiles.m // 2, stages=3)
    return tiles


def wide_config(m: int, n: int, k: int, fmt: Format) -> Tiles | None:
    """Return the tiles of `wide_kernel` for x [m, k] in bfloat16, or None if that is slower."""
    if not 32 < m <= 512:
        return None
    if m > 256:
        # 132 programs run at a time, and a last round that is half empty costs a whole one.
        rounds = cdiv(m, 256) * cdiv(n, 128) / 132
        return wide_tiles(256, 8, 64, 6) if m > 448 and rounds > 0.8 * math.ceil(rounds) else None
    if m <= 64:
        # Where programs are few, Triton's product decodes scales with a mantissa as fast.
        if n <= 8192 and fmt.scale.mantissa_bits > 0:
            return None
        if k > 8192:
            return wide_tiles(64, 4, 64, 3, split(cdiv(n, 64), 512, k, 1024))
        return wide_tiles(64, 4, 128, 4, split(cdiv(n, 64), 128, k, 2048))
    if m > 128 and n > 12288:
        return wide_tiles(256, 8, 64, 6)
    if m > 128 and max(n, k) > 8192:
        return wide_tiles(256, 4, 64, 3, split(cdiv(n, 64), 128, k, 2048))
    return wide_tiles(128, 4, 128, 3, split(cdiv(m, 128) * cdiv(n, 64), 128, k, 2048))


def wide_tiles(m: int, warps: int, columns: int, stages: int, parts: int = 1) -> Tiles:
    """Return tiles of `wide_kernel`: 16 weights for each warp, `columns` of each row at a time."""
    return Tiles(m, 16 * warps, columns // 8, warps, stages, parts)


def split(programs: int, most: int, k: int, columns: int) -> int:
    """Return how many programs share a sum: a power of two, up to `most` with enough columns."""
    parts = 1
    while 2 * parts * programs <= most and k >= columns * parts:
        parts *= 2
    return parts


@lru_cache(maxsize=64)
def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have."""
    if device.type == "cpu":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin
