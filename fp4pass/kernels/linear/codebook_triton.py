"""Linear layers on weights in codebooks, on a GPU: dequantize, then one dense product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...core.codebooks import Codebook
from ..codebook.triton import dequantize_codebook_triton


def linear_codebook_triton(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, rows: int, codebook: Codebook
) -> Tensor:
    """Multiply activations and a weight in a codebook (`linear_codebook_ref`)."""
    weight = dequantize_codebook_triton(packed, absmax, codebook, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
