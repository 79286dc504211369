"""Quantize single tensors in any format."""

from ...core.quant_state import QuantState, load_state
from . import functional
from .quantizer import dequantize, quantize

__all__ = [
    "QuantState",
    "dequantize",
    "functional",
    "load_state",
    "quantize",
]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
