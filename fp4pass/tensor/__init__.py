"""Quantize single tensors: in any format or codebook, by blocks, or with learned values."""

from ..core.quant_state import CodebookState, QuantState, load_state
from . import functional
from .learned_blocks import codebook_quantize
from .learned_codebook import learn_codebook
from .quantizer import dequantize, quantize

__all__ = [
    "CodebookState",
    "QuantState",
    "codebook_quantize",
    "dequantize",
    "functional",
    "learn_codebook",
    "load_state",
    "quantize",
]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
