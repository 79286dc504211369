"""Operators on tensors in codebooks, whose blocks run over the flattened elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.codebooks import Codebook, get_scheme
from ..errors import OptionError, ShapeError
from ..kernels.codebook.reference import dequantize_codebook_ref, quantize_codebook_ref
from .dispatch import operator, require_float, run


def _codebook(scheme: str) -> Codebook:
    found = get_scheme(scheme)
    if not isinstance(found, Codebook):
        raise OptionError(f"{scheme!r} is a format; its operators are quantize and dequantize.")
    return found


def _fake_quantize_codebook(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    codebook, count = _codebook(scheme), x.numel()
    return (
        x.new_empty(codebook.packed_bytes(count), dtype=torch.uint8),
        x.new_empty(codebook.blocks_of(count), dtype=torch.float32),
    )


@operator(_fake_quantize_codebook)
def quantize_codebook(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Quantize x of any shape to the codes of a codebook (kernels/codebook/reference.py).

    Returns packed codes uint8, flat, and float32 absmax [blocks], not finite where x is not.
    """
    require_float(x)
    return run(quantize_codebook_ref, x, None, x, _codebook(scheme))


def _fake_dequantize_codebook(
    packed: Tensor, absmax: Tensor, scheme: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@operator(_fake_dequantize_codebook)
def dequantize_codebook(
    packed: Tensor, absmax: Tensor, scheme: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The tensor of `shape` in `dtype` that packed codes and absmax stand for."""
    codebook, count = _codebook(scheme), math.prod(shape)
    wanted = (codebook.packed_bytes(count), codebook.blocks_of(count))
    if (packed.numel(), absmax.numel()) != wanted:
        raise ShapeError(
            f"{packed.numel()} bytes of codes and {absmax.numel()} absmax; a tensor of shape "
            f"{tuple(shape)} in {codebook.key} has {wanted[0]} and {wanted[1]}."
        )
    return run(dequantize_codebook_ref, packed, None, packed, absmax, codebook, shape, dtype)
