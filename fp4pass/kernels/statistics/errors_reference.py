"""Errors of a quantized weight: of itself, and of its output by the block Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ..dequantize.reference import dequantize_ref
from .reference import HESSIAN_BLOCK

# Elements of a weight in one pass.
_TILE = 1 << 21


def errors_ref(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: Format,
) -> Tensor:
    """Return the squared errors of a quantized weight and what they relate to: float64 [4]."""
    # |W - Q|^2, |W|^2, tr (W - Q) H (W - Q)^T and tr W H W^T; the last two are 0 without Hessians.
    rows, columns = weight.shape
    sums = torch.zeros(4, dtype=torch.float64, device=weight.device)
    for start in range(0, rows, max(1, _TILE // columns)):
        part = slice(start, start + max(1, _TILE // columns))
        dense = weight[part].float()
        quantized = dequantize_ref(packed[part], scale[part], global_scale, fmt, torch.float32)
        both = torch.stack((dense - quantized, dense)).double()  # [2, R, K]
        sums[:2] += both.square().sum((1, 2))
        if hessian is not None:
            padding = hessian.shape[0] * HESSIAN_BLOCK - columns
            padded = torch.nn.functional.pad(both, (0, padding))
            blocks = padded.flatten(0, 1).view(-1, len(hessian), HESSIAN_BLOCK).transpose(0, 1)
            energy = (blocks @ hessian.double() * blocks).sum((0, 2))
            sums[2:] += energy.view(2, -1).sum(1)
    return sums
