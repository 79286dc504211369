"""Compute linear layers on FP8 weights (E4M3 codes) on a GPU: one row by words, more by tiles."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..._compat.torch import block_scaled_mm, has_block_scaled_mm, scaled_mm
from ...core.formats import WHOLE, Format
from ...core.packing import PackedInput, PackedWeight
from ..common import tiles as kit
from ..dequantize.triton import dequantize_e4m3
from .naive import linear_quantized_ref, linear_ref
from .tiling import shared_memory_of

_WHOLE = tl.constexpr(WHOLE)

# Columns whose sum FP8 tensor cores keep, with few bits, before it is added in float32.
_IMPRECISE = tl.constexpr(128)

# Words of four columns at a time in the kernel of one row: 16 bytes for each lane of a warp.
_ROW_WORDS = 128

# Rows of a weight from which a program of that kernel takes more of them.
_TALL = 8192

# Products from which programs take tiles of 128 x 128.
_MANY = 1 << 20

# Rows of x from which a weight that is exact in bfloat16 is expanded for a dense product.
_DENSE = 17

# Rows of x from which cuBLAS multiplies tiles of 128 x 128 faster than Triton.
_BLOCKS = 128


@dataclass(frozen=True)
class Sizes:
    """The tile of a program, and how it runs."""

    m: int  # rows of x
    n: int  # rows of the weight
    k: int  # columns at a time
    warps: int
    stages: int


def linear_fp8_weights(
    x: Tensor, x_rows: PackedInput | None, weight: PackedWeight, fmt: Format
) -> Tensor:
    """Multiply activations, or what they were quantized to, and a weight with E4M3 codes."""
    rows = x if x_rows is None else x_rows.packed
    if x.dtype not in kit.DTYPES or not rows.numel() or not len(weight.packed):
        if x_rows is None:
            return linear_ref(x, weight, fmt)
        return linear_quantized_ref(x, x_rows, weight, fmt)
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    scales = None if x_rows is None else x_rows.scale.reshape(len(flat), -1).contiguous()
    return multiply_e4m3(flat, scales, weight, x.dtype, fmt).view(*rows.shape[:-1], -1)


def multiply_e4m3(
    x: Tensor, x_scales: Tensor | None, weight: PackedWeight, dtype: torch.dtype, fmt: Format
) -> Tensor:
    """Return the product [M, N] of rows x [M, K], or of codes and their scales, in a dtype."""
    codes, scales, bias = weight.packed.contiguous(), weight.scale.contiguous(), weight.bias
    (m, k), n, quantized = x.shape, len(codes), x_scales is not None
    if m == 1 and k % 16 == 0 and (quantized or dtype.itemsize == 2):
        out = torch.empty((1, n), dtype=dtype, device=x.device)
        words = kit.wider(x, torch.int32 if quantized else torch.int64)
        rows = 8 if n >= _TALL else 4
        e4m3_row_kernel[(kit.cdiv(n, rows),)](
            words, x_scales, kit.wider(codes, torch.int32), scales, bias, out, n,
            K=k, FMT=fmt, DTYPE=tl.uint8 if quantized else kit.DTYPES[dtype],
            BN=rows, BW=_ROW_WORDS, num_warps=4, num_stages=4, **kit.launch(x.device),
        )  # fmt: skip
        return out
    native = quantized and has_tensor_cores(codes.device)
    if x_scales is not None and dtype == torch.bfloat16:
        numbers = x.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn)
        by_rows = fmt.block == WHOLE and n % 16 == 0 and k % 16 == 0
        if native and by_rows and x.is_cuda:
            # Both are rows with a factor each.
            factors = scales.expand(n, 1).flatten()
            return scaled_mm(*numbers, x_scales.flatten(), factors, bias, fast=False)
        tiled = fmt.block == fmt.rows == 128 and n % 128 == k % 512 == 0
        if bias is None and tiled and m >= _BLOCKS and m % 4 == 0 and has_block_scaled_mm(x.device):
            return block_scaled_mm(*numbers, x_scales, scales)
    exact = not fmt.has_float_scale and dtype == torch.bfloat16
    if exact and m >= _DENSE:
        dense = dequantize_e4m3(codes, scales, None, fmt, dtype)
        rows = x if x_scales is None else dequantize_e4m3(x, x_scales, None, fmt, dtype)
        return F.linear(rows, dense, None if bias is None else bias.to(dtype))
    operand = _operand(x.dtype, native, fmt)
    if operand == tl.float8e4nv:
        x, codes = (each.view(torch.float8_e4m3fn) for each in (x, codes))
    sizes = sizes_of(m, n, operand, fmt, shared_memory_of(x.device))
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    e4m3_tiles_kernel[(kit.cdiv(m, sizes.m) * kit.cdiv(n, sizes.n),)](
        x, x_scales, codes, scales, bias, out, m, n, K=k, FMT=fmt, OPERAND=operand, SIZES=sizes,
        num_warps=sizes.warps, num_stages=sizes.stages, **kit.launch(x.device),
    )  # fmt: skip
    return out


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU multiplies E4M3 numbers."""
    return bool(kit.PTX) and kit.capability(device) >= (8, 9)


def _operand(of_x: torch.dtype, native: bool, fmt: Format) -> tl.dtype:
    """Return the dtype of operands in which numbers of x, or its codes, and codes are exact."""
    if native and fmt.has_float_scale:
        return tl.float8e4nv
    narrow = of_x == torch.float16 and not fmt.has_float_scale
    # The interpreter multiplies float32 alone.
    if of_x == torch.float32 or narrow or not kit.PTX:
        return tl.float32
    return tl.float16 if of_x == torch.float16 else tl.bfloat16


def sizes_of(m: int, n: int, operand: tl.dtype, fmt: Format, shared_memory: int) -> Sizes:
    """Return the tile of a program of `e4m3_tiles_kernel`, which fits into shared memory."""
    # The scales of tiles of 128 columns hold for one step.
    least = fmt.block if fmt.block == 128 else 32
    if operand == tl.float32:
        return Sizes(16 if m <= 16 else 64, 32, least, 4, 1)
    few = m <= 16
    known = [Sizes(16, 64 if n >= _TALL else 32, 128, 4, 4) if few else Sizes(64, 64, 128, 4, 4)]
    if not few and m * n >= _MANY:
        columns = 128 if operand == tl.float8e4nv else max(64, least)
        known.insert(0, Sizes(128, 128, columns, 8, 4))
    fitting = (_fitted(each, operand, shared_memory) for each in known)
    return next((each for each in fitting if each.stages > 1), Sizes(16, 32, 128, 4, 4))


def _fitted(sizes: Sizes, operand: tl.dtype, shared_memory: int) -> Sizes:
    """Return a tile with as many stages as fit, if so many are wanted."""
    # A stage holds both tiles as they are loaded; decoded ones are there once.
    itemsize = operand.primitive_bitwidth // 8
    decoded = 0 if itemsize == 1 else itemsize * (sizes.m + sizes.n) * sizes.k
    stage = (itemsize * sizes.m + sizes.n) * sizes.k
    fitting = (shared_memory - decoded) // stage
    return dataclasses.replace(sizes, stages=max(1, min(sizes.stages, fitting)))


@triton.jit
def e4m3_row_kernel(
    x, x_scales, words, scales, bias, out, N,
    K: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply one row x [K] and a weight [N, K], in words of four columns; BN rows a program."""
    kit.wait(OVERLAP, RELEASES)
    WORDS: tl.constexpr = K // 4
    start_n = tl.program_id(0).to(tl.int64) * BN
    n = tl.arange(0, BN)
    row = tl.minimum(start_n + n, N - 1)
    acc = tl.zeros((BN, BW), tl.float32)
    for start in range(0, WORDS, BW):
        at = start + tl.arange(0, BW)
        inside = at < WORDS
        word = tl.load(words + row[:, None] * WORDS + at[None, :], mask=inside[None, :], other=0)
        given = tl.load(x + at, mask=inside, other=0)
        if DTYPE == tl.uint8:
            a, b = kit.value_at(given, 0), kit.value_at(given, 1)
            c, d = kit.value_at(given, 2), kit.value_at(given, 3)
        else:
            a, b, c, d = kit.unpack_word(given, DTYPE)
        part = kit.value_at(word, 0) * a[None, :]
        part = tl.fma(kit.value_at(word, 1), tl.broadcast_to(b[None, :], (BN, BW)), part)
        part = tl.fma(kit.value_at(word, 2), tl.broadcast_to(c[None, :], (BN, BW)), part)
        part = tl.fma(kit.value_at(word, 3), tl.broadcast_to(d[None, :], (BN, BW)), part)
        if FMT.block == _WHOLE:
            acc += part
        else:
            SHARE: tl.constexpr = FMT.block // 4
            SCALES: tl.constexpr = (K + FMT.block - 1) // FMT.block
            if FMT.rows == 1:
                own = scales + row[:, None] * SCALES + (at // SHARE)[None, :]
                step = kit.power_of_byte(tl.load(own, mask=inside[None, :], other=0))
            else:
                own = scales + start_n // FMT.rows * SCALES + at // SHARE
                step = tl.load(own, mask=inside, other=0.0)[None, :]
            if x_scales is not None:
                given = tl.load(x_scales + at // SHARE, mask=inside, other=0)
                step *= (kit.power_of_byte(given) if FMT.rows == 1 else given)[None, :]
            acc = tl.fma(part, tl.broadcast_to(step, (BN, BW)), acc)
    y = tl.sum(acc, 1)
    if FMT.block == _WHOLE:
        y *= tl.load(scales + row if FMT.rows == 1 else scales + row * 0)
        if x_scales is not None:
            y *= tl.load(x_scales)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + start_n + n, kit.rounded(y, out.dtype.element_ty), mask=start_n + n < N)


@triton.jit
def times_powers(values, scales, start, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply float32 columns from `start` on by the powers of two of their blocks in each row."""
    ROWS: tl.constexpr = values.shape[0]
    COUNT: tl.constexpr = values.shape[1] // BLOCK
    at = start // BLOCK + tl.arange(0, COUNT)
    byte = tl.load(scales[:, None] + at[None, :], mask=(at < SCALES)[None, :], other=0)
    blocks = tl.reshape(values, (ROWS, COUNT, BLOCK)) * kit.power_of_byte(byte)[:, :, None]
    return tl.reshape(blocks, (ROWS, COUNT * BLOCK))


@triton.jit(do_not_specialize=["M"])
def e4m3_tiles_kernel(
    x, x_scales, codes, scales, bias, out, M, N,
    K: tl.constexpr, FMT: tl.constexpr, OPERAND: tl.constexpr, SIZES: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply rows x [M, K] and a weight [N, K]."""
    # x_scales: of the codes of x, else None. OPERAND: the dtype in which the tiles are multiplied,
    # in which both are exact; if it is E4M3 they are so in memory.
    kit.wait(OVERLAP, RELEASES)
    BM: tl.constexpr = SIZES.m
    BN: tl.constexpr = SIZES.n
    BK: tl.constexpr = SIZES.k
    BLOCK: tl.constexpr = FMT.block
    SCALES: tl.constexpr = 1 if BLOCK == _WHOLE else (K + BLOCK - 1) // BLOCK
    # Programs of eight tiles of rows go together over the weight, which stays in the cache.
    of_m = tl.cdiv(M, BM)
    of_n = tl.cdiv(N, BN)
    program = tl.program_id(0)
    group = program // (8 * of_n)
    height = tl.minimum(of_m - group * 8, 8)
    inner = program % (8 * of_n)
    m = (group * 8 + inner % height) * BM + tl.arange(0, BM)
    n = (inner // height) * BN + tl.arange(0, BN)
    x_row = tl.minimum(m, M - 1).to(tl.int64)
    row = tl.minimum(n, N - 1).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (k < K)[None, :]
        x_at = x + x_row[:, None] * K + k[None, :]
        at = codes + row[:, None] * K + k[None, :]
        left = kit.load(x_at, inside, K % BK == 0)
        right = kit.load(at, inside, K % BK == 0)
        if left.dtype == tl.uint8:
            left = kit.value_of(left)
        if right.dtype == tl.uint8:
            right = kit.value_of(right)
        if BLOCK != _WHOLE and FMT.rows == 1:
            right = times_powers(right, scales + row * SCALES, start, SCALES, BLOCK)
            if x_scales is not None:
                left = times_powers(left, x_scales + x_row * SCALES, start, SCALES, BLOCK)
        left = left.to(OPERAND)
        right = tl.trans(right.to(OPERAND))
        if BLOCK == _WHOLE or FMT.rows == 1:
            acc = tl.dot(left, right, acc, input_precision="ieee", max_num_imprecise_acc=_IMPRECISE)
        else:
            tl.static_assert(BK == BLOCK)
            step = tl.load(scales + row // FMT.rows * SCALES + start // BK)[None, :]
            if x_scales is not None:
                step = step * tl.load(x_scales + x_row * SCALES + start // BK)[:, None]
            part = tl.dot(left, right, input_precision="ieee")
            acc += part * tl.broadcast_to(step, (BM, BN))
    if BLOCK == _WHOLE:
        if FMT.rows == 1:
            acc *= tl.load(scales + row)[None, :]
        else:
            acc *= tl.load(scales)
        if x_scales is not None:
            acc *= tl.load(x_scales + x_row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(
        place, kit.rounded(acc, out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :]
    )
