"""Rotation of blocks of columns, alone and with quantization: a product of tiles by 1 and -1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common import tiles
from ..quantize import tiles as quantizing
from ..search.triton import normalization
from .naive import rotate_ref

# Rows of a tile, warps of a program, and programs: enough to fill any GPU.
_ROWS, _WARPS, _PROGRAMS = 32, 4, 1056


def rotate_triton(x: Tensor, rotation: int) -> Tensor:
    """Multiply by D, rounded once to the dtype of x (`rotate_ref`)."""
    if x.dtype == torch.float64:
        return rotate_ref(x, rotation)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows := x.numel() // rotation:
        _rotate_kernel[(_programs(rows),)](
            x.contiguous(),
            out,
            rows,
            ROTATION=rotation,
            ROWS=_ROWS,
            num_warps=_WARPS,
            **tiles.LAUNCH,
        )
    return out


def rotate_quantize_triton(
    x: Tensor, rotation: int, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize x D (`rotate_quantize_ref`), which is summed in another order."""
    packed, scale = empty_blocks(x, fmt)
    if rows := x.numel() // rotation:
        _rotate_quantize_kernel[(_programs(rows),)](
            (x.float() if x.dtype == torch.float64 else x).contiguous(),
            *(global_scale, packed, scale, rows), ROTATION=rotation, FMT=fmt,
            SEARCHES=scale_method == "sse", ROWS=_ROWS, num_warps=_WARPS, **tiles.LAUNCH,
        )  # fmt: skip
    return packed, scale


def _programs(rows: int) -> int:
    return min(tiles.cdiv(rows, _ROWS), _PROGRAMS)


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(x, out, rows, ROTATION: tl.constexpr, ROWS: tl.constexpr):
    signs = hadamard(ROTATION, x.dtype.element_ty)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        y = rotate_tile(x, row, rows, signs, ROTATION)
        at = row[:, None] * ROTATION + tl.arange(0, ROTATION)[None, :]
        tl.store(out + at, tiles.rounded(y, out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _rotate_quantize_kernel(
    x, stored, packed, scale, rows, ROTATION: tl.constexpr, FMT: tl.constexpr,
    SEARCHES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate and quantize; a row is one rotated block of columns."""
    BLOCKS: tl.constexpr = ROTATION // FMT.block
    global_scale = quantizing.load_global_scale(stored, FMT)
    signs = hadamard(ROTATION, x.dtype.element_ty)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None]
        y = rotate_tile(x, row, rows, signs, ROTATION)
        blocks = tl.reshape(y, (ROWS, BLOCKS, FMT.block))
        byte, codes = quantize_tile(blocks, global_scale, FMT, SEARCHES)
        even, odd = tl.split(tl.reshape(codes, (ROWS, ROTATION // 2, 2)))
        at = row[:, None] * (ROTATION // 2) + tl.arange(0, ROTATION // 2)[None, :]
        tl.store(packed + at, (even | (odd << 4)).to(tl.uint8), mask=mask)
        at = row[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        tl.store(scale + at, byte.to(tl.uint8), mask=mask)


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
    return signs.to(DTYPE) if tiles.PTX else signs


@triton.jit
def rotate_tile(x, row, rows, signs, ROTATION: tl.constexpr):
    """Return rows of x times D, float32 [ROWS, ROTATION]; zeros beyond the last row."""
    at = row[:, None] * ROTATION + tl.arange(0, ROTATION)[None, :]
    tile = tl.load(x + at, mask=(row < rows)[:, None], other=0.0)
    # The interpreter's product takes no bfloat16.
    tile = tile if tiles.PTX else tile.to(tl.float32)
    return tl.dot(tile, signs, input_precision="tf32x3") * (ROTATION**-0.5)


@triton.jit
def quantize_tile(x, global_scale, FMT: tl.constexpr, SEARCHES: tl.constexpr):
    """Return scale bytes (int32) [R, J] and codes (int32) of float32 blocks x [R, J, n]."""
    SCALE: tl.constexpr = FMT.scale
    bits = tl.max(tiles.bits_of(x) & 0x7FFFFFFF, axis=2)
    finite = bits < 0x7F800000
    amax = tiles.float_of(tl.where(finite, bits, 0))
    byte, quotient, vanishes = quantizing.input_byte(amax, global_scale, FMT)
    if SEARCHES:
        byte = near_byte_of_tile(x, amax, byte, quotient, global_scale, FMT)
        vanishes = ~finite
    else:
        vanishes = vanishes | ~finite
    step = tiles.scale_value(byte, SCALE) * global_scale
    codes = quantizing.signed_code(x, tl.math.div_rn(x, step[:, :, None]), FMT)
    codes = tl.where(vanishes[:, :, None], 0, codes)
    return tl.where(finite, byte, SCALE.nan), codes


@triton.jit
def near_byte_of_tile(x, amax, byte, quotient, global_scale, FMT: tl.constexpr):
    """Return the bytes (int32) of least squared error near naive ones, which win a tie."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    first, second = normalization(amax, global_scale, -4)
    unit = global_scale * first * second
    x = tl.abs(x) * first[:, :, None] * second[:, :, None]
    least = tl.full(amax.shape, float("inf"), tl.float32)
    best = byte
    for i in tl.static_range(quantizing.candidates(SCALE)):
        candidate = quantizing.candidate_byte(byte, quotient, FMT, i)
        # At a scale of 1 all rounds to zero, as at larger ones.
        step = tl.minimum(
            tl.maximum(tiles.scale_value(candidate, SCALE) * unit, tiles.power(-100)), 1.0
        )
        code = tiles.round_to_codes(x * tiles.reciprocal(step)[:, :, None], ELEMENT)
        rest = tl.fma(tiles.code_value(code, ELEMENT), -step[:, :, None], x)
        error = tl.sum(rest * rest, axis=2)
        better = (error < least) & quantizing.competes(candidate, quotient, SCALE, i)
        least = tl.where(better, error, least)
        best = tl.where(better, candidate, best)
    return best
