"""Linear layers with 4-bit and 8-bit weights, and `swap`, which puts them into a model.

layer = fp4pass.nn.Linear4bit.from_linear(linear, quant_type="nf4")
swapped = fp4pass.nn.swap(model, "int8", include="*.mlp.*")
"""

from .linear4bit import QUANT_TYPES, Linear4bit
from .linear8bit import Linear8bitLt
from .swap import swap

__all__ = ["QUANT_TYPES", "Linear4bit", "Linear8bitLt", "swap"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
