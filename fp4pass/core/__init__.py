"""Block-scaled tensors: formats and the record of a quantized tensor."""

from .elements import Element, element_table, scale_table
from .files import path_of
from .fingerprint import fingerprint as checksum
from .formats import FORMATS, Format, power_reaching
from .names import covering_globs, without_numbers
from .packing import pack_codes, unpack_codes
from .progress import current, shown, track

__all__ = [
    "FORMATS",
    "Element",
    "Format",
    "checksum",
    "covering_globs",
    "current",
    "element_table",
    "pack_codes",
    "path_of",
    "power_reaching",
    "scale_table",
    "shown",
    "track",
    "unpack_codes",
    "without_numbers",
]
