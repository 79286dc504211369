"""Packed linear layers and experts: their buffers, their forward, their caches."""

from .experts import QUANTIZED, QuantizedExpertStack, parts_of, quantize_pairs, weight_name
from .linear import (
    GLOBAL,
    INPUT_GLOBAL,
    PACKED,
    SCALE,
    PackedBlocks,
    QuantizedLinear,
    StoredWeight,
    quantize_input,
)
from .packed_linear import scale_bits

__all__ = [
    "GLOBAL",
    "INPUT_GLOBAL",
    "PACKED",
    "QUANTIZED",
    "SCALE",
    "PackedBlocks",
    "QuantizedExpertStack",
    "QuantizedLinear",
    "StoredWeight",
    "parts_of",
    "quantize_input",
    "quantize_pairs",
    "scale_bits",
    "weight_name",
]
