"""The numerics once more, in float64 and by brute force, sharing no code with the library."""

from __future__ import annotations

import torch
from torch import Tensor

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


def all_errors(x: Tensor, name: str, global_scale: float, hessian: Tensor | None) -> Tensor:
    """Float64 errors [S, B] of blocks x float32 [B, n] at every scale of the format.

    hessian: [B, n, n] or None for the sum of squares.
    """
    errors = []
    for scale in scales(name):
        step = (scale * global_scale).float()
        residual = x.double() - values(codes(x / step)) * step.double()
        weighted = (
            residual if hessian is None else (hessian.double() @ residual.unsqueeze(-1))[..., 0]
        )
        errors.append((residual * weighted).sum(-1))
    return torch.stack(errors)


def dequantize(packed: Tensor, scale: Tensor, global_scale: float, name: str, block: int) -> Tensor:
    """The float64 tensor that packed codes and scale bits stand for."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    step = scales(name)[scale.long() - 1] * global_scale
    return values(code) * step.repeat_interleave(block, dim=-1)
