"""Linear layers on 4-bit and 8-bit weights in the place of nn.Linear, and what swaps them in.

layer = fp4pass.nn.Linear4bit.from_linear(linear, quant_type="nf4")
fates = fp4pass.nn.swap(model, "int8", include="*.mlp.*")
"""

from .layers import QUANT_TYPES, Linear4bit, Linear8bitLt
from .swap import swap

__all__ = ["QUANT_TYPES", "Linear4bit", "Linear8bitLt", "swap"]
