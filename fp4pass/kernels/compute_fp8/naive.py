"""Multiply E4M3 operands with a factor for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight
from ..common.rounding import global_multiplier, in_chunks, power_of_two, scale_values
from ..dequantize.naive import dequantize_ref
from ..norm.naive import add_rms_norm_ref, rms_norm_ref
from ..quantize.naive import ACTIVATIONS

# The numbers that products of many rows are computed in: the dtype of the input, or E4M3.
COMPUTES = ("input", "fp8")

# The largest E4M3 number.
E4M3_MAX = 448.0

# Its exponent, and what is missing in the mantissa of its float32 bits to the next power of two.
EXPONENT, BELOW_MAX = 8, 0x1FFFFF

# The smallest divisor of a row: its reciprocal and its product with 448 are normal float32.
SMALLEST = 2.0**-120

# Exponents of a row's factor: beyond them rows are so small that only zeros are told apart.
MAX_SHIFT = 120


def uses_fp8(compute: str, rows: int) -> bool:
    """Return whether x [rows, K] and a weight are multiplied as E4M3: on a GPU with it faster."""
    return compute == "fp8" and rows >= 64


def quantize_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [M, K] to E4M3 [M, K], and return it with the float32 factors [M] of its rows."""
    rows = x.to(torch.float32)
    largest = rows.abs().amax(1)
    # By a tensor: by a number torch multiplies with its reciprocal on a GPU, which rounds twice.
    factor = (largest / torch.full_like(largest, E4M3_MAX)).clamp_(min=SMALLEST)
    return (rows / factor[:, None]).to(torch.float8_e4m3fn), factor


def activate_round_ref(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the activation of x [..., K] times `up`, in E4M3, and the factors [..., 1] of rows."""
    return _rounded(ACTIVATIONS[activation](x) * up)


def norm_round_ref(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + residual, [0] without one, and its RMSNorm in E4M3 with factors [..., 1]."""
    if residual is None:
        return x.new_empty(0), *_rounded(rms_norm_ref(x, weight, eps))
    total, normal = add_rms_norm_ref(x, residual, weight, eps)
    return total, *_rounded(normal)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    values, factor = quantize_rows_ref(x.reshape(-1, x.shape[-1]))
    return values.contiguous().view(x.shape), factor.view(*x.shape[:-1], 1)


def shift_of(scale: Tensor, fmt: Format) -> Tensor:
    """Return the largest exponents int32 [R] of factors that keep codes of rows within 448."""
    # Bytes ascend with the scales they stand for.
    largest = scale_values(scale.amax(1), fmt.scale) * fmt.element.max
    bits = largest.view(torch.int32) + BELOW_MAX
    return (EXPONENT + 127 - (bits >> 23)).clamp_(-MAX_SHIFT, MAX_SHIFT)


def expand_ref(rows: PackedInput | PackedWeight, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return packed rows as E4M3 [R, K], and the float32 factors [R] of the rows."""
    packed, scale, global_scale = rows[:3]
    shift = shift_of(scale, fmt)
    out = packed.new_empty((len(packed), fmt.columns(packed.shape[1])), dtype=torch.float8_e4m3fn)
    for part, codes, bits, by in in_chunks(out.shape[1], out, packed, scale, power_of_two(shift)):
        dense = dequantize_ref(codes, bits, None, fmt, torch.float32)
        part.copy_(dense.mul_(by[:, None]))
    factor = power_of_two(-shift)
    return out, factor if global_scale is None else factor * global_multiplier(global_scale, fmt)


def is_exact(packed: Tensor, scale: Tensor, fmt: Format) -> bool:
    """Return whether every packed row [R, K] is exact in E4M3 with one power of two."""
    for codes, bits in in_chunks(fmt.columns(packed.shape[1]), packed, scale):
        values, factor = expand_ref(PackedInput(codes, bits, None), fmt)
        exact = dequantize_ref(codes, bits, None, fmt, torch.float32)
        if not torch.equal(values.float() * factor[:, None], exact):
            return False
    return True


def multiply_ref(x: tuple[Tensor, Tensor], weight: PackedWeight, fmt: Format) -> Tensor:
    """Return the float32 product [M, N] of E4M3 rows with their factors and a packed weight."""
    values, factor = expand_ref(weight, fmt)
    sums = x[0].float() @ values.float().t()
    out = sums.mul_(x[1][:, None]).mul_(factor)
    return out if weight.bias is None else out.add_(weight.bias.float())
