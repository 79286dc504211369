"""Block Hessians of a layer's input, accumulated over calibration."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of a block Hessian, whatever the format: a block of 16 reads the diagonal quarters.
HESSIAN_BLOCK = 32

# Elements of x in float32 at a time, so that a long batch does not double its memory.
_CHUNK = 1 << 22


def observe_ref(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add the tokens of `x` to the statistics of a linear's input, in place.

    x: [..., K] float; hessian: float32 [ceil(K / 32), 32, 32], += sum over tokens of x x^T, or
    empty if it is not wanted; count: int64 [1], += tokens; amax: float32 [1].
    """
    tokens = x.reshape(-1, x.shape[-1])
    count += len(tokens)
    if not tokens.numel():
        return
    padding = len(hessian) * HESSIAN_BLOCK - x.shape[-1]
    for chunk in tokens.split(max(1, _CHUNK // x.shape[-1])):
        chunk = chunk.to(torch.float32)
        torch.maximum(amax, chunk.abs().amax(), out=amax)
        if len(hessian):
            padded = torch.nn.functional.pad(chunk, (0, padding))
            blocks = padded.view(len(chunk), -1, HESSIAN_BLOCK).transpose(0, 1)  # [J, T, 32]
            hessian.baddbmm_(blocks.mT, blocks)
