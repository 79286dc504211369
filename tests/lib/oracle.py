"""The numerics once more, in float64 and by brute force, sharing no code with the library."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4pass.core.formats import Format

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def scales(name: str) -> Tensor:
    """The positive scales of a format, float64, ascending; index + 1 is the byte."""
    if name.startswith("nvfp4"):
        return torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return 2.0 ** (torch.arange(1, 255, dtype=torch.float64) - 127)


def codes(quotient: Tensor) -> Tensor:
    """Round-to-nearest codes of float32 quotients, ties to the even code, by seven comparisons."""
    y = quotient.abs().double()
    index = torch.zeros(y.shape, dtype=torch.int64)
    for lower in range(7):
        middle = (MAGNITUDES[lower] + MAGNITUDES[lower + 1]) / 2
        index += (y > middle) if lower % 2 == 0 else (y >= middle)
    return index + 8 * torch.signbit(quotient)


def values(code: Tensor) -> Tensor:
    """Element values of codes, float64."""
    magnitude = MAGNITUDES[(code & 7).long()]
    return torch.where(code >= 8, -magnitude, magnitude)


def residuals(x: Tensor, name: str, global_scale: float) -> Tensor:
    """x - RTN(x) in float64 [S, *x.shape] of x float32 at every scale of the format."""
    steps = (scales(name) * global_scale).float().view(-1, *(1,) * x.ndim)
    return x.double() - values(codes(x / steps)) * steps.double()


def errors(residual: Tensor, hessian: Tensor | None) -> Tensor:
    """Float64 errors [S, R, J] of residuals [S, R, J, n] of R rows of J blocks.

    hessian: [J, n, n] or None for the sum of squares.
    """
    if hessian is None:
        return residual.square().sum(-1)
    scale, row, column, n = residual.shape
    grouped = residual.permute(2, 0, 1, 3).reshape(column, scale * row, n)
    energy = ((grouped @ hessian.double()) * grouped).sum(-1)
    return energy.view(column, scale, row).permute(1, 2, 0)


def block_hessians(hessian: Tensor, columns: int, block: int) -> Tensor:
    """The Hessian of every block of a row: [ceil(K / 32), 32, 32] to float64 [K / block, b, b]."""
    parts = []
    for start in range(0, columns, block):
        inside = slice(start % 32, start % 32 + block)
        parts.append(hessian[start // 32, inside, inside])
    return torch.stack(parts).double()


def dequantize(packed: Tensor, scale: Tensor, global_scale: float, name: str, block: int) -> Tensor:
    """The float64 tensor that packed codes and scale bits stand for."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    step = scales(name)[scale.long() - 1] * global_scale
    return values(code) * step.repeat_interleave(block, dim=-1)


def power_of_two_for(amax: float) -> float:
    """The smallest 2^k with 2^k * 448 * 6 >= amax, by trying them; k in [-126, 126]."""
    k = -126
    while k < 126 and 2.0**k * 448 * 6 < amax:
        k += 1
    return 2.0**k if amax else 1.0


def activations(x: Tensor, name: str, block: int, global_scale: float) -> tuple[Tensor, Tensor]:
    """Codes [..., K] and scale bytes [..., K / block] of activations, block by block in float64.

    The E4M3 scale is the nearest of all 127, the even byte of two that are as near; the E8M0
    exponent is that of amax with mantissas from 1.75 on rounded up.
    """
    flat = x.to(torch.float32).reshape(-1, block)
    found, chosen = torch.zeros(flat.shape, dtype=torch.uint8), torch.zeros(len(flat)).byte()
    table = scales(name)
    with_zero = torch.cat((torch.zeros(1, dtype=torch.float64), table))
    for i, values_ in enumerate(flat):
        amax = values_.abs().max()
        if not amax.isfinite():
            chosen[i] = 127 if name.startswith("nvfp4") else 255
            continue
        if name.startswith("nvfp4"):
            wanted = (amax / (6 * global_scale)).double()
            distance = (with_zero - wanted).abs()
            nearest = (distance == distance.min()).nonzero().flatten().tolist()
            byte = next(b for b in nearest if len(nearest) == 1 or b % 2 == 0)
        else:
            mantissa, exponent = torch.frexp(amax.double())
            byte = int(exponent) - 1 + (2 * mantissa >= 1.75) - 2 + 127 if amax else 1
        chosen[i] = min(max(int(byte), 1), len(table))
        if not (name.startswith("nvfp4") and byte == 0):
            step = (table[int(chosen[i]) - 1] * global_scale).float()
            found[i] = codes(values_ / step).byte()
    shape = (*x.shape[:-1], x.shape[-1] // block)
    return found.view(x.shape), chosen.view(shape)


def near_scales(x: Tensor, naive: Tensor, g: float, fmt: Format) -> list[Tensor]:
    """The bytes that compete for the blocks of rows: naive ones; those below, in nvfp4 where the
    largest magnitude stays far enough below 7 of their steps; and in nvfp4 those nearest to mapping
    it to 4, or again naive ones below the normal scales."""
    lower = (naive - 1).clamp(min=1)
    if fmt.name != "nvfp4":
        return [naive, lower]
    amax = x.float().unflatten(-1, (-1, fmt.block)).abs().amax(-1)
    quotient = amax / torch.full_like(amax, 6 * g)
    limit = scales(fmt.name).float()[lower.long() - 1] * 1.15
    lower = torch.where((quotient < limit) & (naive > 1), lower, naive)
    fields = ((quotient * 1.5).view(torch.int32) + (1 << 19) >> 20) - (120 << 3)
    return [naive, lower, fields.maximum(naive).clamp(max=fmt.scale.last)]


def errors_at(x: Tensor, byte: Tensor, g: float, fmt: Format) -> Tensor:
    """Float64 squared errors [R, J] of rows at scale bytes [R, J], rounded to nearest."""
    step = (scales(fmt.name)[byte.long() - 1] * g).repeat_interleave(fmt.block, 1)
    quotient = x.float() / step.float()
    residual = x.double() - values(codes(quotient)) * step
    return residual.square().view(len(x), -1, fmt.block).sum(-1)
