"""Every operator of `torch.ops.fp4pass`: schema, implementation, fake and autograd.

A format crosses an operator as its key and a scale as its uint8 bits. All operators are
functional but `observe` and `observe_full`. NVIDIA GPUs run the Triton kernels, everything else the
references.
"""

from .activations import (
    activate_quantize,
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    dynamic_global_scale,
    layer_norm_quantize,
    quantize,
    rms_norm_quantize,
    rotate_quantize,
)
from .bitsandbytes import linear_codebook, linear_int8
from .codebooks import dequantize_codebook, quantize_codebook
from .composites import gelu, layer_norm, softmax
from .dispatch import FLOATS
from .linears import linear, linear_group, linear_quantized, linear_quantized_group
from .rotations import rotate
from .weights import dequantize, errors, observe, observe_full, search

__all__ = [
    "FLOATS",
    "activate_quantize",
    "add_layer_norm_quantize",
    "add_rms_norm_quantize",
    "dequantize",
    "dequantize_codebook",
    "dynamic_global_scale",
    "errors",
    "gelu",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "linear_codebook",
    "linear_group",
    "linear_int8",
    "linear_quantized",
    "linear_quantized_group",
    "observe",
    "observe_full",
    "quantize",
    "quantize_codebook",
    "rms_norm_quantize",
    "rotate",
    "rotate_quantize",
    "search",
    "softmax",
]
