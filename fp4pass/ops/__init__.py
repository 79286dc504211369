"""Every operator of `torch.ops.fp4pass`: schema, implementation, fake and autograd.

A format crosses an operator as its key and a scale as its uint8 bits. All operators are
functional but `observe`. NVIDIA GPUs run the Triton kernels, everything else the references.
"""

from .composites import gelu, layer_norm, softmax
from .dispatch import FLOATS
from .products import linear, linear_group, linear_quantized, linear_quantized_group
from .rounding import (
    activate_quantize,
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    global_divisor,
    layer_norm_quantize,
    quantize,
    rms_norm_quantize,
)
from .weights import dequantize, errors, observe, search

__all__ = [
    "FLOATS",
    "activate_quantize",
    "add_layer_norm_quantize",
    "add_rms_norm_quantize",
    "dequantize",
    "errors",
    "gelu",
    "global_divisor",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "linear_group",
    "linear_quantized",
    "linear_quantized_group",
    "observe",
    "quantize",
    "rms_norm_quantize",
    "search",
    "softmax",
]
