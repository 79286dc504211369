"""Scales of activations near the naive ones, as the kernels try them, and what they cost."""

from __future__ import annotations

import oracle
import torch
from torch import Tensor

from fp4pass.formats import Format

# The first byte that competes with the one below it.
FIRST = {"nvfp4": 4, "mxfp4": 2}


def candidates(x: Tensor, naive: Tensor, g: float, fmt: Format) -> list[Tensor]:
    """The bytes that compete for the blocks of rows: naive ones, those below, and in nvfp4 those
    nearest to mapping the largest magnitude to 4, or again naive ones below the normal scales."""
    found = [naive, naive - (naive >= FIRST[fmt.name]).int()]
    if fmt.name == "nvfp4":
        amax = x.float().unflatten(-1, (-1, fmt.block)).abs().amax(-1)
        quotient = amax / torch.full_like(amax, 6 * g) * 1.5
        rounded = (quotient.view(torch.int32) + (1 << 19) >> 20) - (120 << 3)
        found.append(rounded.maximum(naive).clamp(max=fmt.scale.last))
    return found


def errors_at(x: Tensor, byte: Tensor, g: float, fmt: Format) -> Tensor:
    """Float64 squared errors [R, J] of rows at scale bytes [R, J], rounded to nearest."""
    step = (oracle.scales(fmt.name)[byte.long() - 1] * g).repeat_interleave(fmt.block, 1)
    quotient = x.float() / step.float()
    residual = x.double() - oracle.values(oracle.codes(quotient)) * step
    return residual.square().view(len(x), -1, fmt.block).sum(-1)
