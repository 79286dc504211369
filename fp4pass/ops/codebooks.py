"""Operators on tensors in codebooks, whose blocks run over the flattened elements."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.codebooks import Codebook
from ..kernels.codebook.reference import dequantize_codebook_ref, quantize_codebook_ref
from .checks import require_float, require_packed
from .registration import operator


def _codes_and_absmax(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    count = x.numel()
    return (
        x.new_empty(codebook.packed_bytes(count), dtype=torch.uint8),
        x.new_empty(codebook.blocks_of(count), dtype=torch.float32),
    )


quantize_codebook = operator(
    quantize_codebook_ref,
    triton="kernels.codebook.triton:quantize_codebook_triton",
    shapes=_codes_and_absmax,
    checks=(require_float,),
)
dequantize_codebook = operator(
    dequantize_codebook_ref,
    triton="kernels.codebook.triton:dequantize_codebook_triton",
    shapes=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
    checks=(require_packed,),
)
