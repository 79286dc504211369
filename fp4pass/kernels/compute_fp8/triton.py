"""Multiply E4M3 operands on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat.torch import has_fp8, scaled_mm
from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ...errors import OptionError
from ..common import tiles as kit
from ..dequantize.triton import packed_words
from ..linear.decode_triton import joined
from ..linear.gluon_triton import counters, in_words, multiply_wide, runs_wide
from ..linear.tiling import Tiles, shared_memory_of, wide_tiles
from .operands_triton import Rows, decode_e4m3, expanded, operand, operands, sorted_rows

# From the largest, measured on an H200.
SIZES = (
    Tiles(256, 128, 16, 8, 3),
    Tiles(256, 64, 16, 4, 3),
    Tiles(128, 128, 16, 8, 3),
    Tiles(128, 64, 16, 4, 4),
    Tiles(64, 64, 32, 4, 3),
)

# Rows of a weight that tiles of 256 rows of x cut into programs enough for 512 rows of x.
_WIDE = 12288

# Programs that nearly fill an H200 once, and its multiprocessors.
_ENOUGH, _AT_ONCE = 112, 132


def tiles_of(m: int, n: int, shared_memory: int) -> Tiles:
    """Return the largest tile size that fits and still fills the GPU."""
    fitting = [each for each in SIZES if _bytes(each) <= shared_memory and each.m < 2 * m]
    enough = (each for each in fitting if kit.cdiv(m, each.m) * kit.cdiv(n, each.n) >= _ENOUGH)
    return next(enough, SIZES[-1])


def _bytes(tiles: Tiles) -> int:
    """Return the shared memory of a program."""
    return tiles.stages * 8 * tiles.words * tiles.m + 2 * tiles.words * tiles.n * 5


def expands(m: int, n: int) -> bool:
    """Return whether a weight is expanded first, and not decoded in the product."""
    return m > (512 if n >= _WIDE else 256)


def multiplies_dense(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuBLAS multiplies rows x [m, k] in order and an expanded weight [n, k]."""
    # It takes factors for rows with results in bfloat16 alone.
    fits = dtype == torch.bfloat16 and has_dense_product(n, device)
    return fits and expands(m, n) and not (runs_wide(k, device) and wide_config(m, n, k))


def has_dense_product(n: int, device: torch.device) -> bool:
    """Return whether cuBLAS multiplies E4M3 rows and a dense weight of n rows on a device."""
    return n % 16 == 0 and has_fp8(device)


def wide_config(m: int, n: int, k: int) -> Tiles | None:
    """Return the tiles of `wide_kernel` for x [m, k] in E4M3, or None if that is slower."""
    if expands(m, n):
        # The largest tiles, one on each multiprocessor and hardly one without.
        rounds = kit.cdiv(m, 256) * kit.cdiv(n, 128) / _AT_ONCE
        return wide_tiles(256, 8, 128, 3) if 0.95 < rounds <= 1 else None
    if m > 128 and n >= 8192:
        return wide_tiles(256, 4, 128, 3)
    rows = 128 if m > 128 or (m > 64 and n >= 8192) else 64
    large = m > 128 and 0.8 < kit.cdiv(m, 128) * kit.cdiv(n, 128) / _AT_ONCE <= 1
    warps, at_once = (8, _AT_ONCE) if large else (4, 2 * _AT_ONCE)
    return wide_tiles(
        rows, warps, 128, 4, _parts(kit.cdiv(m, rows) * kit.cdiv(n, 16 * warps), at_once, k)
    )


def _parts(tiles: int, at_once: int, k: int) -> int:
    """Return how many programs share the sums of a tile, so that most multiprocessors have work."""
    found, most = 1, 0.0
    for parts in range(1, 5):
        programs = tiles * parts
        if parts > 1 and (programs > at_once or k < 512 * parts):
            break
        full = programs / (_AT_ONCE * kit.cdiv(programs, _AT_ONCE))
        # Parts that are no fuller pay where each is long.
        if full > most + 0.05 or (full >= most - 0.05 and k >= 2048 * parts):
            found, most = parts, full
    return found


def multiply_fp8(
    x: Tensor | PackedInput | Rows, weight: PackedWeight, dtype: torch.dtype, fmt: Format
) -> Tensor:
    """Return the product [M, N] of rows and a packed weight as E4M3."""
    device = weight.packed.device
    if device.type == "cuda" and not has_fp8(device):
        raise OptionError(
            'compute="fp8" needs FP8 tensor cores, of compute capability 8.9 or more, which '
            f'{device} does not have. Call fp4pass.set_compute(model, "input").'
        )
    m = len(x if isinstance(x, Tensor) else x[0])
    n, k = len(weight.packed), 2 * weight.packed.shape[1]
    if multiplies_dense(m, n, k, dtype, device):
        return multiply_dense(*expanded(x, weight, fmt), weight.bias)
    out = torch.empty((m, n), dtype=dtype, device=device)
    if runs_wide(k, device) and (wide := wide_config(m, n, k)):
        return multiply_with(wide, x, weight, out, fmt)
    tiles = tiles_of(m, n, shared_memory_of(device))
    rows, of_weight = operands(x, weight, fmt, tiles.words)
    fp8_rows_kernel[(kit.cdiv(m, tiles.m), kit.cdiv(n, tiles.n))](
        rows.values if kit.PTX else rows.values.view(torch.uint8), rows.factors,
        packed_words(weight.packed), weight.scale.contiguous(), *of_weight, weight.bias,
        out, m, n, K=k, FMT=fmt, TILES=tiles,
        num_warps=tiles.warps, num_stages=tiles.stages, **kit.launch(device),
    )  # fmt: skip
    return out


def multiply_dense(rows: Rows, dense: Rows, bias: Tensor | None) -> Tensor:
    """Return the product [M, N] of rows [M, K] in order and an expanded weight, in bfloat16."""
    return scaled_mm(rows.values, dense.values, rows.factors, dense.factors, bias)


def multiply_with(
    tiles: Tiles, x: Tensor | PackedInput | Rows, weight: PackedWeight, out: Tensor, fmt: Format
) -> Tensor:
    """Fill `out` [M, N] with a product of `wide_kernel`, and return it."""
    (m, n), k = out.shape, 2 * weight.packed.shape[1]
    weight, finished = in_words(weight), counters(m, n, tiles, out.device)
    rows = sorted_rows(x, k, tiles.m, fmt, finished)
    return multiply_wide(*rows, weight, finished, out, fmt, tiles)


@triton.jit(do_not_specialize=["M"])
def fp8_rows_kernel(
    x, x_factors, words, scales, powers, factors, bias, out, M, N,
    K: tl.constexpr, FMT: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply sorted E4M3 rows (operands_triton.py) and packed weights."""
    kit.wait(OVERLAP, RELEASES)
    BM: tl.constexpr = TILES.m
    BN: tl.constexpr = TILES.n
    WORDS: tl.constexpr = TILES.words
    SCALE: tl.constexpr = FMT.scale
    row_words: tl.constexpr = K // 8
    share: tl.constexpr = FMT.block // 8
    whole: tl.constexpr = row_words % WORDS == 0
    padded: tl.constexpr = (row_words + WORDS - 1) // WORDS * WORDS * 8
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    start_n = (tl.program_id(1) * BN).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)
    by = tl.load(powers + row)[:, None]
    x_row = tl.minimum(m, M - 1)[None, :].to(tl.int64) * padded
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, row_words, WORDS):
        k = start + tl.arange(0, WORDS)[None, :]
        k_scale = start // share + tl.arange(0, WORDS // share)[None, :]
        word_at = words + row[:, None] * row_words + k
        byte_at = scales + row[:, None] * (row_words // share) + k_scale
        word = kit.load(word_at, k < row_words, whole)
        byte = kit.load(byte_at, k_scale < row_words // share, whole)
        step = kit.decode_scale(byte, SCALE) * by
        step = tl.broadcast_to(step[:, :, None], (BN, WORDS // share, share))
        bits = decode_e4m3(word, tl.reshape(step, (BN, WORDS)), FMT)
        weights = tl.permute(joined(bits), (0, 2, 3, 4, 1))
        weights = operand(tl.reshape(weights, (BN, 8 * WORDS)))
        x_tile = tl.load(x + x_row + (start * 8 + tl.arange(0, 8 * WORDS))[:, None])
        # Float8 as it is loaded: converted tiles take the way through shared memory twice.
        acc = tl.dot(weights, x_tile if kit.PTX else operand(x_tile), acc)
    start_m = (tl.program_id(0) * BM).to(tl.int64)
    at = tl.arange(0, BM)[None, :] * N + n[:, None]
    inside = (n < N - start_n)[:, None] & (m < M)[None, :]
    out += start_m * N + start_n
    y = acc * tl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
    y *= tl.load(factors + row)[:, None]
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(out + at, kit.rounded(y, out.dtype.element_ty), mask=inside)
