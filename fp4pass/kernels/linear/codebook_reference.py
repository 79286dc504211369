"""Linear layers on weights in codebooks: dequantize, then one dense product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...core.codebooks import Codebook
from ..codebook.reference import dequantize_codebook_ref


def linear_codebook_ref(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, rows: int, codebook: Codebook
) -> Tensor:
    """Return x [..., K] times a weight [rows, K] in a codebook, dequantized to the dtype of x."""
    weight = dequantize_codebook_ref(packed, absmax, codebook, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
