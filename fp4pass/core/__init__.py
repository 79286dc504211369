"""Block-scaled tensors: formats and the record of a quantized tensor."""

from .elements import Element, scale_table
from .formats import Format, power_reaching
from .names import covering_globs, without_numbers
from .packing import pack_codes, unpack_codes
from .progress import current, shown

__all__ = [
    "Element",
    "Format",
    "covering_globs",
    "current",
    "pack_codes",
    "power_reaching",
    "scale_table",
    "shown",
    "unpack_codes",
    "without_numbers",
]
