"""The layers, tensors and names of other libraries, for code that was written with them.

Importing it registers their operators, and codebooks such as "nf4" with `fp4pass.quantize` and
`fp4pass.quantization.functional.load_state`.

    layer = fp4pass.parity.Linear4bit.from_linear(linear, quant_type="nf4")
    swapped = fp4pass.parity.swap(model, "int8", include="*.mlp.*")
"""

from . import bitsandbytes, qwantize
from .bitsandbytes import Linear4bit, Linear8bitLt, swap
from .codebooks import CodebookState

__all__ = ["CodebookState", "Linear4bit", "Linear8bitLt", "bitsandbytes", "qwantize", "swap"]
