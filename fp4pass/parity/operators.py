"""The operators of codebooks and of 8-bit integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from ..ops.checks import require_float
from ..ops.linears import gradients_of
from ..ops.registration import READERS, operator
from .codebook_reference import dequantize_codebook_ref, linear_codebook_ref, quantize_codebook_ref
from .codebooks import Codebook, get_codebook
from .int8_reference import dequantize_rows_ref, linear_int8_ref

READERS[Codebook] = get_codebook


def _require_packed(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int]
) -> None:
    """Raise ShapeError unless packed codes and absmax are those of a tensor of `shape`."""
    count = math.prod(shape)
    expected = (codebook.packed_bytes(count), codebook.blocks_of(count))
    found = (packed.numel(), absmax.numel())
    if found != expected:
        raise ShapeError(
            f"A tensor of shape {tuple(shape)} in {codebook.key}: expected {expected[0]} bytes of "
            f"codes and {expected[1]} absmax, got {found[0]} and {found[1]}."
        )


def _require_packed_weight(
    x: Tensor, packed: Tensor, absmax: Tensor, rows: int, codebook: Codebook
) -> None:
    _require_packed(packed, absmax, codebook, (rows, x.shape[-1]))


def _codes_and_absmax(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    count = x.numel()
    return (
        x.new_empty(codebook.packed_bytes(count), dtype=torch.uint8),
        x.new_empty(codebook.blocks_of(count), dtype=torch.float32),
    )


def _save_codebook(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, packed, absmax, _, rows, codebook = inputs
    ctx.weight = codebook, (rows, x.shape[-1])
    return packed, absmax


quantize_codebook = operator(
    quantize_codebook_ref,
    triton="parity.codebook_triton:quantize_codebook_triton",
    shapes=_codes_and_absmax,
    checks=(require_float,),
)
dequantize_codebook = operator(
    dequantize_codebook_ref,
    triton="parity.codebook_triton:dequantize_codebook_triton",
    shapes=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
    checks=(_require_packed,),
)
linear_codebook = operator(
    linear_codebook_ref,
    triton="parity.codebook_triton:linear_codebook_triton",
    shapes=lambda x, rows: x.new_empty((*x.shape[:-1], rows)),
    checks=(require_float, _require_packed_weight),
    backward=gradients_of(
        3,
        _save_codebook,
        lambda ctx, stored, dtype: dequantize_codebook(*stored, *ctx.weight, dtype),
    ),
)
# Products of integers, which PyTorch has for GPUs too.
linear_int8 = operator(
    linear_int8_ref,
    shapes=lambda x, codes: x.new_empty((*x.shape[:-1], codes.shape[0])),
    checks=(require_float,),
    backward=gradients_of(
        3,
        lambda ctx, inputs: inputs[1:3],
        lambda ctx, stored, dtype: dequantize_rows_ref(stored[0], stored[1], dtype),
    ),
)
