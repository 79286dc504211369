"""The layers, tensors and names of other libraries, for code that was written with them.

Importing it registers their operators, and codebooks such as "nf4" with `fp4pass.quantize` and
`fp4pass.quantization.functional.load_state`.

    layer = fp4pass.parity.Linear4bit.from_linear(linear, quant_type="nf4")
    swapped = fp4pass.parity.swap(model, "int8", include="*.mlp.*")
"""

from . import bitsandbytes, qwantize
from .bitsandbytes import QUANT_TYPES, Linear4bit, Linear8bitLt, swap
from .codebooks import CodebookState
from .learned_codebook import codebook_quantize, learn_codebook

__all__ = [
    "QUANT_TYPES",
    "CodebookState",
    "Linear4bit",
    "Linear8bitLt",
    "bitsandbytes",
    "codebook_quantize",
    "learn_codebook",
    "qwantize",
    "swap",
]
