"""Packed linear layers and experts: their buffers, their forward, their caches."""

from .expert_scales import parts_of, quantize_pairs
from .experts import QUANTIZED, QuantizedExpertStack, weight_name
from .linear import (
    GLOBAL,
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
