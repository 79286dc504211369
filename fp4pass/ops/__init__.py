# ruff: noqa: F401 (imported to be exported)
"""Every operator of `torch.ops.fp4pass`, declared once (registration.py).

A format crosses an operator as its key and a block scale as its uint8 bits. `global_scale` is the
stored number, float32 [1] or None for 1, and `Format.multiplies` of the format tells whether it
multiplies or divides. All operators are functional but those that observe. NVIDIA GPUs
run the Triton kernels, everything else the references, which document the arguments.
"""

from .activations import (
    activate_quantize,
    add_rms_norm,
    all_reduce,
    all_reduce_add,
    attention,
    attention_span,
    dynamic_global_scale,
    norm_quantize,
    quantize,
    rms_norm,
    rotary_attention,
    rotate,
    rotate_quantize,
)
from .checks import FLOATS
from .linears import (
    experts_dense,
    experts_linear,
    experts_linear_quantized,
    experts_linear_transposed,
    experts_mixture,
    experts_outer,
    experts_quantize,
    linear,
    linear_group,
    linear_quantized,
    linear_quantized_group,
    observe_experts,
)
from .registration import call
from .weights import dequantize, gptq, joint, observe, observe_full, search, search_stack
