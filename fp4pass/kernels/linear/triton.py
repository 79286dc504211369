"""Compute linear layers on packed weights on a GPU, decoded in the kernel or dense.

`linear_group_triton` decides where a launch of products computes what is around them too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat.torch import has_fp8
from ...core.formats import WHOLE, Format, get_format
from ...core.packing import PackedInput, PackedWeight
from ..common import tiles as kit
from ..common.rounding import global_multiplier
from ..compute_fp8.naive import uses_fp8
from ..compute_fp8.operands_triton import Rows, expand
from ..compute_fp8.triton import has_dense_product, multiply_dense, multiply_fp8
from ..dequantize.triton import dequantize_all_triton, dequantize_triton, packed_words
from ..norm.naive import sums_of_squares
from ..norm.triton import rms_norm_triton
from . import gluon_triton as gluon
from . import tiling
from .decode_triton import InputRows, arranged, offset
from .fp8_weights_triton import linear_fp8_weights, multiply_e4m3
from .matmul_triton import add_parts, few_rows_kernel, gate_kernel, rows_kernel
from .naive import ALONE, Around, linear_group_ref, linear_quantized_ref, linear_ref
from .tiling import MAX_ROWS, TERMS, Tiles, config, fuses, shared_memory_of

# The operators of this file ask for it by this name: E4M3 codes have kernels here, too.
supports = kit.supports_any


# Rows of quantized x up to which decoding beats two dense operands for results not in bfloat16.
_FUSED_QUANTIZED = 768

# Columns of a program that multiplies a gate and its factor: measured on an H200.
_BLOCK = 1024


def linear_triton(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Multiply activations and a packed weight (`linear_ref`)."""
    # A weight enters as code * scale, exactly; the global scale multiplies the float32 sum, and the
    # bias is added before the one rounding. Many rows multiply a dense weight of x's dtype.
    if fmt.element.bits == 8:
        return linear_fp8_weights(x, None, weight, fmt)
    if x.dtype == torch.float64:
        return linear_ref(x, weight, fmt, compute)
    n, k = weight.packed.shape[0], x.shape[-1]
    rows = x.numel() // k
    if uses_fp8(compute, rows):
        y = multiply_fp8(x.reshape(rows, -1).contiguous(), weight, x.dtype, fmt)
        return y.view(*x.shape[:-1], n)
    if x.dtype == torch.bfloat16 and gluon.runs_wide(k, x.device):
        if tiles := tiling.wide_config(rows, n, k, fmt):
            # Where programs are few, starting early took longer.
            early = n > 8192 and tiles.parts == 1
            weight, finished = gluon.in_words(weight), gluon.counters(rows, n, tiles, x.device)
            x_sorted = arranged(
                InputRows.of_numbers(x), rows, k, tiles.words, fmt, early, finished, tiles.m
            )[0]
            y = x.new_empty((rows, n))
            gluon.multiply_wide(x_sorted, None, weight, finished, y, fmt, tiles)
            return y.view(*x.shape[:-1], n)
    if not fuses(rows, n, x.dtype, fmt):
        dense = dequantize_triton(*weight[:3], fmt, x.dtype)
        return F.linear(x, dense, None if weight.bias is None else weight.bias.to(x.dtype))
    out = x.new_empty((*x.shape[:-1], n))
    return multiply(InputRows.of_numbers(x), weight, out, fmt)


def linear_quantized_triton(
    x: Tensor, x_rows: PackedInput, weight: PackedWeight, fmt: Format, rotation: int = 0,
    compute: str = "input", inputs: str = "",
) -> Tensor:  # fmt: skip
    """Multiply quantized activations and a packed weight (`linear_quantized_ref`)."""
    dtype = x.dtype
    if fmt.element.bits == 8:
        return linear_fp8_weights(x, x_rows, weight, fmt)
    if inputs:
        return linear_fp8_inputs(x, x_rows, weight, fmt, inputs)
    if dtype == torch.float64:
        return linear_quantized_ref(x, x_rows, weight, fmt, compute=compute)
    x_packed, x_scale, x_global_scale = x_rows
    rows, n = x_packed.numel() // x_packed.shape[-1], len(weight.packed)
    if uses_fp8(compute, rows):
        codes, bits = (each.reshape(rows, each.shape[-1]) for each in (x_packed, x_scale))
        y = multiply_fp8(PackedInput(codes, bits, x_global_scale), weight, dtype, fmt)
        return y.view(*x_packed.shape[:-1], n)
    if dtype == torch.bfloat16 and not fuses(rows, n, dtype, fmt):
        rounded, dense = dequantize_all_triton((x_rows, weight[:3]), fmt, dtype)
        return F.linear(rounded, dense, None if weight.bias is None else weight.bias.to(dtype))
    dense = None
    if rows > _FUSED_QUANTIZED:
        dense = dequantize_triton(weight.packed, weight.scale, None, fmt, torch.bfloat16).t()
    out = x_packed.new_empty((rows, n), dtype=dtype)
    flat = (each.reshape(rows, each.shape[-1]) for each in (x_packed, x_scale, out))
    for codes, scales, part in zip(*(each.split(MAX_ROWS) for each in flat), strict=True):
        if dense is None:
            multiply(InputRows.of_codes(codes, scales, x_global_scale), weight, part, fmt)
        else:
            # Code times block scale is exact in bfloat16, whatever the global scales are.
            numbers = dequantize_triton(codes, scales, None, fmt, torch.bfloat16)
            sums = torch.mm(numbers, dense, out_dtype=torch.float32)[None]
            add_parts(sums, x_global_scale, weight, part, fmt, 0)
    return out.view(*x_packed.shape[:-1], n)


def one_row(
    codes: Tensor, scales: Tensor, weights: Sequence[PackedWeight], fmt: Format
) -> tuple[Tensor, list[PackedWeight], Format]:
    """Return an E4M3 row as bfloat16 numbers, and weights that are multiplied by its factor."""
    # Which is a global scale, of a format where these multiply. The numbers are exact.
    factor, found = scales.view(1), []
    for each in weights:
        own = None if each.global_scale is None else global_multiplier(each.global_scale, fmt)
        found.append(each._replace(global_scale=factor if own is None else factor * own))
    numbers = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return numbers, found, fmt.with_multiplier()


def linear_fp8_inputs(
    x: Tensor, x_rows: PackedInput, weight: PackedWeight, fmt: Format, inputs: str
) -> Tensor:
    """Multiply activations in a format in FP8 and a packed weight (`linear_quantized_ref`)."""
    codes, scales = (each.reshape(-1, each.shape[-1]).contiguous() for each in x_rows[:2])
    (rows, n), of_x, device = (len(codes), len(weight.packed)), get_format(inputs), codes.device
    shape = (*x_rows.packed.shape[:-1], n)
    if x.dtype == torch.float64 or not rows or not n:
        return linear_quantized_ref(x, x_rows, weight, fmt, inputs=inputs)
    if rows == 1 and of_x.block == WHOLE and x.dtype == torch.bfloat16:
        one, (weight,), fmt = one_row(codes, scales, [weight], fmt)
        return linear_triton(one, weight, fmt).view(shape)
    in_fp8 = uses_fp8("fp8", rows) and (device.type != "cuda" or has_fp8(device))
    if of_x.block == WHOLE:
        factors = scales.flatten()
        if in_fp8:
            of_rows = Rows(codes.view(torch.float8_e4m3fn), factors)
            return multiply_fp8(of_rows, weight, x.dtype, fmt).view(shape)
        out = codes.new_empty((rows, n), dtype=x.dtype)
        parts = (each.split(MAX_ROWS) for each in (codes, factors, out))
        for values, by, part in zip(*parts, strict=True):
            multiply(InputRows.of_e4m3(values, by), weight, part, fmt)
        return out.view(shape)
    if not in_fp8:
        numbers = dequantize_triton(codes, scales, None, of_x, torch.float32)
        return linear_triton(numbers, weight, fmt).to(x.dtype).view(shape)
    # Rows of the weight have factors, which multiply their sums.
    dense = expand(weight, fmt)
    ones = scales.new_ones(of_x.scale_shape(n, codes.shape[1]))
    values = PackedWeight(dense.values.view(torch.uint8), ones, None)
    y = multiply_e4m3(codes, scales, values, torch.float32, of_x).mul_(dense.factors)
    y = y if weight.bias is None else y.add_(weight.bias)
    return y.to(x.dtype).view(shape)


def linear_group_triton(
    x: Tensor, weights: Sequence[PackedWeight], fmt: Format, compute: str = "input",
    around: Around = ALONE,
) -> list[Tensor]:  # fmt: skip
    """Multiply activations and several packed weights, maybe at once (`linear_group_ref`)."""
    if around.factors is not None:
        if not all(has_dense_product(len(each.packed), x.device) for each in weights):
            return linear_group_ref(x, weights, fmt, around=around)
        factors = around.factors.reshape(-1).contiguous()
        rows = Rows(x.reshape(-1, x.shape[-1]).contiguous(), factors)
        found = (multiply_dense(rows, expand(each, fmt), each.bias) for each in weights)
        return [each.view(*x.shape[:-1], -1) for each in found]
    if fmt.element.bits == 8 or x.dtype not in TERMS:
        return linear_group_ref(x, weights, fmt, compute, around, linear=linear_triton)
    if around.residual is not None:
        step = gluon.step_of_warps(x, x.dtype, x.numel() // x.shape[-1], x.shape[-1], fmt)
        if not step:
            return linear_group_ref(x, weights, fmt, compute, around, linear=linear_triton)
        n = len(weights[0].packed)
        tiles = config(1, n, x.shape[-1], 1, shared_memory_of(x.device), step=step)
        total = x.new_empty((*x.shape[:-1], n))
        squares = sums_of_squares(total)
        beside = Around(residual=around.residual.contiguous())
        multiply_few(InputRows.of_numbers(x), weights, [total], fmt, tiles, beside, squares)
        return [total, squares]
    gated, parts = around.gate is not None, weights
    if gated and len(weights) == 1:
        # Halves of its rows; a global scale is that of both.
        split = (
            (each, each) if each is None or each.numel() == 1 else each.chunk(2)
            for each in weights[0]
        )
        parts = [PackedWeight(*half) for half in zip(*split, strict=True)]
    tiles = group_tiles(x, x.dtype, parts, fmt)
    if gated and any(read.data_ptr() % 16 for each in parts for read in each[:2]):
        # Programs read the codes and scales of both from one address each.
        tiles = None
    norm = around.norm
    if norm is not None and (tiles is None or not norms_row(x, 0, fmt)):
        x, norm = rms_norm_triton(x, *norm[1:]), None
    elif norm is not None:
        norm = norm._replace(weight=norm.weight.contiguous())
    if tiles is None and not gated:
        return [linear_triton(x, each, fmt, compute) for each in weights]
    if tiles is None:
        products = linear_group_triton(x, weights, fmt, compute)
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        y, n = gate.new_empty(gate.shape), gate.shape[-1]
        if count := gate.numel() // max(n, 1):
            gate_kernel[(count, kit.cdiv(n, _BLOCK))](
                gate, up, y, n, gate.reshape(count, n).stride(0), up.reshape(count, n).stride(0),
                ACTIVATION=around.gate, BLOCK=_BLOCK, **kit.launch(gate.device),
            )  # fmt: skip
        return [y]
    shapes = [(*x.shape[:-1], each.packed.shape[0]) for each in (parts[:1] if gated else parts)]
    out = [x.new_empty(shape) for shape in shapes]
    if gated:
        # Launched early, the programs of the next product would not be spread evenly.
        tiles = replace(tiles, releases=tiles.in_gluon)
    beside = Around(around.gate, None, *(norm or ())) if gated or norm else ALONE
    multiply_few(InputRows.of_numbers(x), parts, out, fmt, tiles, beside)
    return out


def multiplies_row(x: Tensor, fmt: Format) -> bool:
    """Return whether products of x are by the kernel for one row, with what is around them."""
    return bool(gluon.step_of_warps(x, x.dtype, x.numel() // x.shape[-1], x.shape[-1], fmt))


def norms_row(x: Tensor, weights: int, fmt: Format) -> bool:
    """Return whether the launch of products of x and so many weights computes a norm of it."""
    fits = x.shape[-1] <= tiling.MOST_NORMED and weights <= tiling.MOST_OF_NORM
    return fits and multiplies_row(x, fmt)


def linear_quantized_group_triton(
    x: Tensor, x_rows: PackedInput, weights: Sequence[PackedWeight], fmt: Format,
    compute: str = "input", inputs: str = "",
) -> list[Tensor]:  # fmt: skip
    """Multiply quantized activations and several packed weights, in one launch if few rows."""
    packed = x_rows.packed
    others = x.dtype == torch.float64 or fmt.element.bits == 8
    others |= bool(inputs) and get_format(inputs).block != WHOLE
    if inputs and not others and x.dtype == torch.bfloat16 and packed[..., 0].numel() == 1:
        return linear_group_triton(*one_row(packed, x_rows.scale, weights, fmt))
    if others or (tiles := group_tiles(packed, None, weights, fmt)) is None:
        one = partial(linear_quantized_triton, x, x_rows, fmt=fmt, compute=compute, inputs=inputs)
        return [one(weight=each) for each in weights]
    shapes = [(*packed.shape[:-1], each.packed.shape[0]) for each in weights]
    out = [packed.new_empty(shape, dtype=x.dtype) for shape in shapes]
    rows = InputRows.of_codes(*x_rows) if not inputs else InputRows.of_e4m3(*x_rows[:2])
    multiply_few(rows, weights, out, fmt, tiles)
    return out


def group_tiles(
    x: Tensor, dtype: torch.dtype | None, weights: Sequence[PackedWeight], fmt: Format
) -> Tiles | None:
    """Return the tiles for several weights in one launch, or None if each is multiplied alone."""
    # That is so where sums would be in another order, or weights differ in what they have, and of
    # all rows that `uses_fp8` knows.
    m, k = x.numel() // x.shape[-1], 2 * weights[0].packed.shape[1]
    sizes = [each.packed.shape[0] for each in weights]
    alike = len({(each.global_scale is None, each.bias is None) for each in weights}) == 1
    if dtype == torch.float64 or not 0 < m <= 8 or not alike or not all(sizes):
        return None
    terms = 1 if dtype is None else TERMS[dtype]
    shared_memory = shared_memory_of(x.device)
    step = gluon.step_of_warps(x, dtype, m, k, fmt)
    first, *rest = (config(m, n, k, terms, shared_memory, sum(sizes), step) for n in sizes)
    return first if first.warps_share and all(each == first for each in rest) else None


def multiply(
    x: InputRows, weight: PackedWeight, out: Tensor, fmt: Format, tiles: Tiles | None = None
) -> Tensor:
    """Fill `out` [..., N] with a product, and return it."""
    if not out.numel():
        return out
    n, k = weight.packed.shape[0], 2 * weight.packed.shape[1]
    m = out.numel() // n
    step = gluon.step_of_warps(out, x.dtype, m, k, fmt)
    tiles = tiles or config(m, n, k, x.terms, shared_memory_of(out.device), step=step)
    if tiles.warps_share:
        multiply_few(x, [weight], [out], fmt, tiles)
        return out
    weight = weight._replace(packed=packed_words(weight.packed), scale=weight.scale.contiguous())
    whole = tiles.parts == 1
    x_sorted = arranged(x, m, k, tiles.words, fmt, tiles.releases)
    sums = out if whole else out.new_empty((tiles.parts, m, n), dtype=torch.float32)
    rows_kernel[(kit.cdiv(m, tiles.m), kit.cdiv(n, tiles.n), tiles.parts)](
        x_sorted, x.global_scale, x.factors, weight, sums, m, n,
        K=k, FMT=fmt, TERMS=x.terms, TILES=tiles, num_warps=tiles.warps, num_stages=tiles.stages,
        # Of whole sums, the kernel that sorts x has let this one start, which does no more.
        **kit.launch(out.device, tiles.releases and not whole),
    )  # fmt: skip
    if not whole:
        shift = offset(fmt)
        add_parts(sums, x.global_scale, weight, out, fmt, shift, tiles.releases, x.factors)
    return out


def multiply_few(
    x: InputRows, weights: Sequence[PackedWeight], out: Sequence[Tensor], fmt: Format, tiles: Tiles,
    around: Around = ALONE, squares: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` with the products of a few rows of one x and several weights, in one launch."""
    # A gate and its factor have one result. More rows than one have no norm and no residual, whose
    # sums of squares fill `squares`.
    packed, scale, global_scale, bias = zip(*weights, strict=True)
    gated = around.gate is not None
    sizes = tuple(each.shape[0] for each in packed)[: len(out)]
    k = 2 * packed[0].shape[1]
    m = out[0].numel() // sizes[0]
    rows = x.words
    if x.dtype != torch.bfloat16:
        # More rows than one took 2.5 us longer where this let their kernel start early.
        rows = arranged(x, m, k, 1, fmt, releases=m == 1)
    rows = rows.view(torch.bfloat16)
    columns = tiles.n // 2 if gated else tiles.n
    *starts, programs = itertools.accumulate((kit.cdiv(n, columns) for n in sizes), initial=0)
    stored = PackedWeight(
        tuple(map(packed_words, packed)),
        tuple(each.contiguous() for each in scale),
        None if global_scale[0] is None else global_scale,
        None if bias[0] is None else bias,
    )
    if tiles.in_gluon:
        gluon.one_row_kernel[(programs,)](
            rows, around.norm, stored, around.residual, tuple(out), squares, sizes, tuple(starts),
            K=k, FMT=fmt, TILES=tiles, ACTIVATION=around.gate, num_warps=tiles.warps,
            **kit.launch(rows.device, tiles.releases),
        )  # fmt: skip
        return
    sums = tuple(out)
    if tiles.parts > 1:
        # The sum of several programs is of one weight.
        sums = (out[0].new_empty((tiles.parts, m, sizes[0]), dtype=torch.float32),)
    few_rows_kernel[(programs, tiles.parts)](
        rows, x.global_scale, x.factors, stored, sums, sizes, tuple(starts), m, K=k, FMT=fmt,
        TERMS=x.terms, ROWS=1 if m == 1 else tiles.m, TILES=tiles, ACTIVATION=around.gate,
        num_warps=tiles.warps, num_stages=tiles.stages, **kit.launch(out[0].device, tiles.releases),
    )  # fmt: skip
    if tiles.parts > 1:
        add_parts(
            sums[0], x.global_scale, weights[0], out[0], fmt, offset(fmt), tiles.releases, x.factors
        )
