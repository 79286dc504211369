"""Rotation of blocks of columns: a product of tiles by 1 and -1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, PTX, cdiv, rounded
from ..quantize.triton import quantize_triton
from .naive import rotate_ref

# Rows of a tile, warps of a program, and programs: enough to fill any GPU.
_ROWS, _WARPS, _PROGRAMS = 32, 4, 1056


def rotate_triton(x: Tensor, rotation: int, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply by D, rounded once to a dtype, that of x by default (`rotate_ref`)."""
    if x.dtype == torch.float64:
        return rotate_ref(x, rotation)
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if rows := x.numel() // rotation:
        _rotate_kernel[(min(cdiv(rows, _ROWS), _PROGRAMS),)](
            x.contiguous(), out, rows, ROTATION=rotation, ROWS=_ROWS, num_warps=_WARPS, **LAUNCH
        )
    return out


def rotate_quantize_triton(
    x: Tensor, rotation: int, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize x D (`rotate_quantize_ref`), which is summed in another order."""
    wide = rotate_triton(x.float() if x.dtype == torch.float64 else x, rotation, torch.float32)
    return quantize_triton(wide, global_scale, fmt, scale_method)


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(x, out, rows, ROTATION: tl.constexpr, ROWS: tl.constexpr):
    signs = hadamard(ROTATION, x.dtype.element_ty)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * ROTATION + tl.arange(0, ROTATION)[None, :]
        tile = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
        # The interpreter's product takes no bfloat16.
        tile = tile if PTX else tile.to(tl.float32)
        y = tl.dot(tile, signs, input_precision="tf32x3") * (ROTATION**-0.5)
        tl.store(out + at, rounded(y, out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def hadamard(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the Hadamard matrix [SIZE, SIZE] of 1 and -1."""
    # An entry is -1 where the two indices have an odd number of bits in common.
    index = tl.arange(0, SIZE)
    common = index[:, None] & index[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    signs = (1 - 2 * (common & 1)).to(tl.float32)
    return signs.to(DTYPE) if PTX else signs
