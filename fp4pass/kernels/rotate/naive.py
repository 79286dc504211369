"""Rotation of blocks of columns by a Hadamard matrix, before they are quantized.

D is block-diagonal, each block a Hadamard matrix of Sylvester's over the root of its size: it is
orthogonal and symmetric, so that (x D) (W D)^T = x W^T. One outlier of x becomes many small parts.
Source: MR-GPTQ, arXiv 2509.23202.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...core.formats import Format
from ..quantize.naive import Quantize, quantize_ref
from ..statistics.naive import HESSIAN_BLOCK, diagonal_blocks, ieee_products

# Columns of a block; 0 stands for none. Blocks of a format divide them.
ROTATIONS = (0, 32, 64, 128)

# Elements of a weight in float64 at a time.
_CHUNK = 1 << 22


@lru_cache(maxsize=16)
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix [size, size] of 1 and -1; size: a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def rotate_wide(x: Tensor, rotation: int) -> Tensor:
    """Return x D of x [..., K] in float32, or float64 if x is: there is no other rounding."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    blocks = wide.reshape(-1, rotation)
    with ieee_products():
        rotated = blocks @ hadamard(rotation, wide.dtype, wide.device)
    return rotated.mul_(1 / math.sqrt(rotation)).view(x.shape)


def rotate_ref(x: Tensor, rotation: int) -> Tensor:
    """Return x D of x [..., K], rounded once to its dtype; `rotation` is one of ROTATIONS."""
    return rotate_wide(x, rotation).to(x.dtype)


def rotate_quantize_ref(
    x: Tensor,
    rotation: int,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
    *,
    quantize: Quantize = quantize_ref,
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scale bits of x D, which is not rounded to x's dtype before."""
    return quantize(rotate_wide(x, rotation), global_scale, fmt, scale_method)


def rotate_weight(weight: Tensor, rotation: int) -> Tensor:
    """Return W D for a weight [N, K], in float32."""
    # Sums are float64, so that every device gives the same bits.
    rows = weight.split(max(1, _CHUNK // weight.shape[1]))
    return torch.cat([rotate_wide(each.double(), rotation).float() for each in rows])


def rotate_hessian(hessian: Tensor, rotation: int) -> Tensor:
    """Return D H D, the Hessian [K, K] of rotated inputs."""
    return rotate_wide(rotate_wide(hessian, rotation).mT, rotation).mT


def rotate_blocks(hessian: Tensor, rotation: int) -> Tensor:
    """Return the block Hessians [K / 32, 32, 32] of rotated inputs."""
    # Other blocks of columns are taken for uncorrelated; those of a rotation by 32 need not be.
    parts = hessian.view(-1, rotation // HESSIAN_BLOCK, HESSIAN_BLOCK, HESSIAN_BLOCK)
    rotated = [rotate_hessian(torch.block_diag(*blocks), rotation) for blocks in parts]
    return torch.cat([diagonal_blocks(each) for each in rotated])
