"""Products of E4M3 operands on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._compat.torch import scaled_mm
from ...core.formats import Format
from ...errors import OptionError
from ..common.tiles import LAUNCH, PTX, cdiv, overlapping
from ..dequantize.triton import packed_words
from ..linear.tiling import shared_memory_of
from ..linear.wide import Wide, multiply_wide, runs_wide
from .expand_triton import expanded
from .matmul_triton import fp8_rows_kernel
from .operands_triton import Packed, operands


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: programs of `n` weights by `m` rows of x."""

    m: int
    n: int
    words: int  # of codes of each weight at a time
    warps: int
    stages: int

    @property
    def bytes(self) -> int:
        """Shared memory of a program."""
        return self.stages * 8 * self.words * self.m + 2 * self.words * self.n * 5


# From the largest, measured on an H200.
_TILES = (
    Tiles(256, 128, 16, 8, 3),
    Tiles(256, 64, 16, 4, 3),
    Tiles(128, 128, 16, 8, 3),
    Tiles(128, 64, 16, 4, 4),
    Tiles(64, 64, 32, 4, 3),
)

# Rows of a weight that tiles of 256 rows of x cut into programs enough for 512 rows of x.
_WIDE = 12288

# Programs of which an H200 has nearly a round.
_ENOUGH = 112


def tiles_of(m: int, n: int, shared_memory: int) -> Tiles:
    """Return the largest tiles of which enough programs run."""
    fitting = [each for each in _TILES if each.bytes <= shared_memory and each.m < 2 * m]
    enough = (each for each in fitting if cdiv(m, each.m) * cdiv(n, each.n) >= _ENOUGH)
    return next(enough, _TILES[-1])


def expands(m: int, n: int) -> bool:
    """Return whether a weight is expanded first, and not decoded in the product."""
    return m > (512 if n >= _WIDE else 256)


def wide_tiles(m: int, n: int, k: int) -> Wide | None:
    """Return how a product is cut that decodes while it multiplies, or None if that is slower."""
    if m > 256 or (n >= _WIDE and m <= 128):
        return None
    rows = min(256, max(64, 1 << (m - 1).bit_length()))
    programs, parts = cdiv(m, rows) * cdiv(n, 64), 1
    most = 512 if rows == 64 else 256
    while 2 * parts * programs <= most and k >= parts * max(1536, 16 * rows):
        parts *= 2
    return Wide(rows, 4, 128, 3 if rows == 256 else 4, parts)


def multiply_fp8(
    x: Tensor | Packed, weight: Packed, bias: Tensor | None, dtype: torch.dtype, fmt: Format
) -> Tensor:
    """Return the product [M, N] of rows and a packed weight as E4M3."""
    device = weight.codes.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise OptionError(
            'compute="fp8" needs FP8 tensor cores, of compute capability 8.9 or more, which '
            f'{device} does not have. Call fp4pass.set_compute(model, "input").'
        )
    m = len(x.codes if isinstance(x, Packed) else x)
    n, k = len(weight.codes), 2 * weight.codes.shape[1]
    # cuBLAS takes factors for rows with results in bfloat16 alone.
    if expands(m, n) and dtype == torch.bfloat16 and n % 16 == 0 and device.type == "cuda":
        rows, dense = expanded(x, weight, fmt)
        return scaled_mm(rows.values, dense.values, rows.factors, dense.factors, bias)
    if runs_wide(k, device) and (wide := wide_tiles(m, n, k)):
        # Where programs are few or small, starting early took longer.
        early = wide.m == 256 and wide.parts == 1
        rows, of_weight = operands(x, weight, fmt, 8, fours=True, releases=early)
        out = torch.empty((m, n), dtype=dtype, device=device)
        return multiply_wide(
            rows.values, rows.factors, weight.codes, weight.scale, *of_weight, None, None, bias,
            out, fmt, wide,
        )  # fmt: skip
    tiles = tiles_of(m, n, shared_memory_of(device))
    rows, of_weight = operands(x, weight, fmt, tiles.words)
    out = torch.empty((m, n), dtype=dtype, device=device)
    fp8_rows_kernel[(cdiv(m, tiles.m), cdiv(n, tiles.n))](
        rows.values if PTX else rows.values.view(torch.uint8), rows.factors,
        packed_words(weight.codes), weight.scale.contiguous(), *of_weight,
        bias, out, m, n, K=k, FMT=fmt, BM=tiles.m, BN=tiles.n, WORDS=tiles.words,
        num_warps=tiles.warps, num_stages=tiles.stages, **LAUNCH, **overlapping(device, False),
    )  # fmt: skip
    return out
