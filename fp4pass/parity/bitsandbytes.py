"""The 4-bit functions of bitsandbytes, by its names: codes, absmax and values to the bit.

Its layers are `fp4pass.parity.Linear4bit` and `fp4pass.parity.Linear8bitLt`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import Tensor

from ..errors import unknown_name
from ..quantization.tensor import dequantize, quantize
from .codebook_state import CodebookState
from .codebooks import CODEBOOKS

__all__ = [
    "dequantize_4bit",
    "dequantize_fp4",
    "dequantize_nf4",
    "quantize_4bit",
    "quantize_fp4",
    "quantize_nf4",
]

_QUANT_TYPES = tuple(each.name for each in CODEBOOKS.values() if each.bits == 4)


def quantize_4bit(
    A: Tensor, *, blocksize: int = 64, quant_type: str = "fp4"
) -> tuple[Tensor, CodebookState]:
    """Quantize a tensor in a codebook of 4 bits: "fp4", "nf4" or another.

    It returns the packed codes, uint8 [ceil(n / 2), 1], and the record from which `dequantize_4bit`
    makes the tensor again.
    """
    if quant_type not in _QUANT_TYPES:
        raise unknown_name("quant_type", quant_type, _QUANT_TYPES)
    state = quantize(A, quant_type, blocksize)
    assert isinstance(state, CodebookState)
    return state.qdata.unsqueeze(1), state


def dequantize_4bit(A: Tensor, quant_state: CodebookState) -> Tensor:
    """Return the tensor of what `quantize_4bit` returned, in its shape and dtype."""
    return dequantize(dataclasses.replace(quant_state, qdata=A.flatten()))


quantize_fp4 = partial(quantize_4bit, quant_type="fp4")
quantize_nf4 = partial(quantize_4bit, quant_type="nf4")
dequantize_fp4 = dequantize_nf4 = dequantize_4bit
