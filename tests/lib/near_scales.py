"""Scales of activations near the naive ones, as the kernels try them, and what they cost."""

from __future__ import annotations

import oracle
import torch
from torch import Tensor

from fp4pass.core.formats import Format


def candidates(x: Tensor, naive: Tensor, g: float, fmt: Format) -> list[Tensor]:
    """The bytes that compete for the blocks of rows: naive ones; those below, in nvfp4 where the
    largest magnitude stays far enough below 7 of their steps; and in nvfp4 those nearest to mapping
    it to 4, or again naive ones below the normal scales."""
    lower = (naive - 1).clamp(min=1)
    if fmt.name != "nvfp4":
        return [naive, lower]
    amax = x.float().unflatten(-1, (-1, fmt.block)).abs().amax(-1)
    quotient = amax / torch.full_like(amax, 6 * g)
    limit = oracle.scales(fmt.name).float()[lower.long() - 1] * 1.15
    lower = torch.where((quotient < limit) & (naive > 1), lower, naive)
    fields = ((quotient * 1.5).view(torch.int32) + (1 << 19) >> 20) - (120 << 3)
    return [naive, lower, fields.maximum(naive).clamp(max=fmt.scale.last)]


def errors_at(x: Tensor, byte: Tensor, g: float, fmt: Format) -> Tensor:
    """Float64 squared errors [R, J] of rows at scale bytes [R, J], rounded to nearest."""
    step = (oracle.scales(fmt.name)[byte.long() - 1] * g).repeat_interleave(fmt.block, 1)
    quotient = x.float() / step.float()
    residual = x.double() - oracle.values(oracle.codes(quotient)) * step
    return residual.square().view(len(x), -1, fmt.block).sum(-1)
