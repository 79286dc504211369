"""Multiply E4M3 operands on a GPU: in `wide_kernel`, or an expanded weight in cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._compat.torch import has_fp8, scaled_mm
from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ...errors import OptionError
from ..common.tiles import cdiv
from ..linear.gluon_triton import counters, in_words, multiply_wide, runs_wide
from ..linear.tiling import Tiles, wide_tiles
from .naive import multiply_rows_ref
from .operands_triton import Rows, expanded, sorted_rows

# Rows of a weight that tiles of 256 rows of x cut into programs enough for 512 rows of x.
_WIDE = 12288

# The multiprocessors of an H200.
_AT_ONCE = 132


def multiplies_dense(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuBLAS multiplies rows x [m, k] in order and an expanded weight [n, k]."""
    # It takes factors for rows with results in bfloat16 alone.
    fits = dtype == torch.bfloat16 and has_dense_product(n, device)
    return fits and not (runs_wide(k, device) and wide_config(m, n, k))


def has_dense_product(n: int, device: torch.device) -> bool:
    """Return whether cuBLAS multiplies E4M3 rows and a dense weight of n rows on a device."""
    return n % 16 == 0 and has_fp8(device)


def wide_config(m: int, n: int, k: int) -> Tiles | None:
    """Return the tiles of `wide_kernel` for x [m, k] in E4M3, or None if that is slower."""
    if m > (512 if n >= _WIDE else 256):
        # The largest tiles, one on each multiprocessor and hardly one without.
        rounds = cdiv(m, 256) * cdiv(n, 128) / _AT_ONCE
        return wide_tiles(256, 8, 128, 3) if 0.95 < rounds <= 1 else None
    if m > 128 and n >= 8192:
        return wide_tiles(256, 4, 128, 3)
    rows = 128 if m > 128 or (m > 64 and n >= 8192) else 64
    large = rows == 128 and 0.8 < cdiv(m, 128) * cdiv(n, 128) / _AT_ONCE <= 1
    warps, at_once = (8, _AT_ONCE) if large else (4, 2 * _AT_ONCE)
    return wide_tiles(rows, warps, 128, 4, _parts(cdiv(m, rows) * cdiv(n, 16 * warps), at_once, k))


def _parts(tiles: int, at_once: int, k: int) -> int:
    """Return how many programs share the sums of a tile, so that most multiprocessors have work."""
    found, most = 1, 0.0
    for parts in range(1, 5):
        programs = tiles * parts
        if parts > 1 and (programs > at_once or k < 512 * parts):
            break
        full = programs / (_AT_ONCE * cdiv(programs, _AT_ONCE))
        # Parts that are no fuller pay where each is long.
        if full > most + 0.05 or (full >= most - 0.05 and k >= 2048 * parts):
            found, most = parts, full
    return found


def multiply_fp8(
    x: Tensor | PackedInput, weight: PackedWeight, dtype: torch.dtype, fmt: Format
) -> Tensor:
    """Return the product [M, N] of rows and a packed weight as E4M3."""
    device = weight.packed.device
    if device.type == "cuda" and not has_fp8(device):
        raise OptionError(
            'compute="fp8" needs FP8 tensor cores, of compute capability 8.9 or more, which '
            f'{device} does not have. Call fp4pass.set_compute(model, "input").'
        )
    n, k = len(weight.packed), 2 * weight.packed.shape[1]
    if not isinstance(x, PackedInput) and runs_wide(k, device):
        if tiles := wide_config(len(x), n, k):
            out = torch.empty((len(x), n), dtype=dtype, device=device)
            return multiply_with(tiles, x, weight, out, fmt)
    return multiply_dense(*expanded(x, weight, fmt), weight.bias, dtype)


def multiply_dense(rows: Rows, dense: Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product [M, N] of rows [M, K] in order and an expanded weight."""
    if dtype == torch.bfloat16 and has_dense_product(len(dense.values), rows.values.device):
        return scaled_mm(rows.values, dense.values, rows.factors, dense.factors, bias)
    return multiply_rows_ref(rows, dense, bias).to(dtype)


def multiply_with(
    tiles: Tiles, x: Tensor, weight: PackedWeight, out: Tensor, fmt: Format
) -> Tensor:
    """Fill `out` [M, N] with a product of `wide_kernel`, and return it."""
    weight, finished = in_words(weight), counters(*out.shape, tiles, out.device)
    rows = sorted_rows(x, tiles.m, finished)
    return multiply_wide(*rows, weight, finished, out, fmt, tiles)
