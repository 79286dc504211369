"""Number formats as data: an element, a scale, and how blocks of them make a tensor.

The law of every format is `value = element(code) * scale * global_scale`.
To add a format, add an entry to `FORMATS`; nothing else asks a format's name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex

import torch
from torch import Tensor

from ..errors import OptionError, unknown_name
from .elements import Element, Record, Scale

# The number of rows or columns that share a scale where all do.
WHOLE = 0

# The last part of the key of a format whose stored global scale multiplies.
_MULTIPLIER = "multiplier"


@dataclass(frozen=True, repr=False)
class Format(Record):
    """Elements, a scale for each tile of a weight [N, K], and maybe a global scale.

    An input [..., K] has a scale for each `block` of a row, whatever `rows` is.

    Example:
        >>> from fp4pass.core.formats import FORMATS
        >>> FORMATS["nvfp4"].bits_per_weight((64, 64)), FORMATS["nvfp4"].element.max
        (4.5, 6.0)
        >>> fp4pass.core.formats.get_format("mxfp4:16").block
        16
    """

    name: str  # under which it is registered, and which checkpoints store
    element: Element  # what a code stands for
    scale: Scale  # what a block scale can be
    block: int  # how many columns share a scale; WHOLE for all
    blocks: tuple[int, ...]  # the block sizes that may be asked for
    has_global_scale: bool  # whether a tensor has a float32 scale besides
    # Whether the stored global scale multiplies (ModelOpt), or divides (compressed-tensors).
    multiplies: bool = False
    rows: int = 1  # how many rows of a weight share a scale; WHOLE for all

    __hash__ = Record.__hash__

    @property
    def key(self) -> str:
        """The name under which `get_format` returns exactly this record, if it is registered."""
        if self.multiplies:
            return f"{self.name}:{self.block}:{_MULTIPLIER}"
        default = FORMATS.get(self.name, self).block
        return self.name if default == self.block else f"{self.name}:{self.block}"

    def with_multiplier(self, multiplies: bool = True) -> Format:
        """Return this format with stored global scales that multiply, or divide."""
        return _variant(self, self.block, multiplies)

    def global_scale_of(self, stored: float) -> float:
        """Return the global scale of a stored number, or the number of a global scale."""
        return stored if self.multiplies else 1.0 / stored

    @property
    def has_float_scale(self) -> bool:
        """Whether scales are float32 numbers, of tiles that need not fill the weight."""
        return self.scale.storage == torch.float32

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the only scale of a weight is a float32 number."""
        return self.has_float_scale and self.rows == WHOLE

    @property
    def has_input_scale(self) -> bool:
        """Whether calibration finds a scale of inputs: a global one, or of weights with one."""
        return self.has_global_scale or self.has_tensor_scale

    @property
    def tile(self) -> str:
        """The part of a weight that shares a scale, in words."""
        if self.block == WHOLE:
            return "the tensor" if self.rows == WHOLE else "a row"
        return f"{self.block}" if self.rows == 1 else f"{self.rows} x {self.block}"

    def bits_per_weight(self, shape: Sequence[int]) -> float:
        """Return the bits of codes and scales for one weight of matrices [..., N, K]."""
        *_, rows, columns = shape
        scales = math.prod(self.scale_shape(rows, columns))
        return self.element.bits + self.scale.bits * scales / (rows * columns)

    def fits(self, columns: int) -> bool:
        """Return whether rows of so many columns can be quantized: blocks of 8-bit scales fill."""
        return self.has_float_scale or columns % self.block == 0

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight [rows, columns]."""
        return self.scale_rows(rows), self.scale_columns(columns)

    def scale_rows(self, rows: int) -> int:
        """Return how many scales lie below each other for a weight of so many rows."""
        return 1 if self.rows == WHOLE else -(-rows // self.rows)

    def scale_columns(self, columns: int) -> int:
        """Return how many scales a row of so many columns has."""
        return 1 if self.block == WHOLE else -(-columns // self.block)

    def packed_columns(self, columns: int) -> int:
        """Return P, the bytes of the packed codes of `columns` elements, which are whole blocks."""
        return columns * self.element.bits // 8

    def columns(self, packed_columns: int) -> int:
        """Return how many elements bytes of packed codes hold: the inverse of `packed_columns`."""
        return packed_columns * 8 // self.element.bits

    def global_scale_for(self, amax: float) -> float:
        """Return the smallest power of two 2^k with `2^k * scale.max * element.max >= amax`."""
        # k is in [-126, 126]. Formats without a global scale have 1.0, and so has an amax of 0.
        # OptionError is raised for an amax that is negative or not finite.
        if not self.has_global_scale or amax == 0.0:
            return 1.0
        if not math.isfinite(amax) or amax < 0.0:
            raise OptionError(f"amax: expected a finite and not negative number, got {amax}.")
        return float(
            power_reaching(
                torch.tensor(amax, dtype=torch.float64, device="cpu"),
                self.scale.max * self.element.max,
            )
        )

    def input_scale_for(self, amax: float) -> float | None:
        """Return the number that is stored for inputs up to `amax`, None for what stores none."""
        if self.has_global_scale:
            return self.global_scale_of(self.global_scale_for(amax))
        if not self.has_input_scale:
            return None
        # As calibration has it in float32, and no subnormal number.
        return float(torch.tensor(amax, device="cpu").div(self.element.max).clamp(min=2.0**-126))


def power_reaching(amax: Tensor, full: float) -> Tensor:
    """Return the smallest 2^k, k in [-126, 126], with `2^k * full >= amax`; 1 for an amax of 0."""
    mantissa, exponent = torch.frexp(amax)
    full_mantissa, full_exponent = math.frexp(full)
    k = (exponent - full_exponent + (mantissa > full_mantissa)).clamp_(-126, 126)
    return torch.where(amax > 0, ((k + 127) << 23).view(torch.float32), 1.0)


E2M1 = Element("e2m1", bits=4, magnitudes=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))

E2M3 = Element.binary("e2m3", bits=6, mantissa_bits=3, min_exponent=0)
E3M2 = Element.binary("e3m2", bits=6, mantissa_bits=2, min_exponent=-2)
# The other codes of 8 bits are NaN and, in E5M2, infinity (OCP OFP8 v1.0).
FP8_E4M3 = Element.binary(
    "e4m3", bits=8, mantissa_bits=3, min_exponent=-6, count=127, native=torch.float8_e4m3fn
)
FP8_E5M2 = Element.binary(
    "e5m2", bits=8, mantissa_bits=2, min_exponent=-14, count=124, native=torch.float8_e5m2
)
INT4 = Element.binary("int4", bits=4, mantissa_bits=3, min_exponent=3)
INT8 = Element.binary("int8", bits=8, mantissa_bits=7, min_exponent=7)

E4M3 = Scale(
    "e4m3", mantissa_bits=3, bias=7, last=126, nan=127, subnormal=True, storage=torch.float8_e4m3fn
)
E8M0 = Scale(
    "e8m0", mantissa_bits=0, bias=127, last=254, nan=255, subnormal=False, storage=torch.uint8
)
# Unsigned, so that the sign bit is one more of the mantissa or the exponent.
UE4M4 = Scale(
    "ue4m4", mantissa_bits=4, bias=7, last=254, nan=255, subnormal=True, storage=torch.uint8
)
UE5M3 = Scale(
    "ue5m3", mantissa_bits=3, bias=15, last=254, nan=255, subnormal=True, storage=torch.uint8
)
# The bits of a float32, whose sign is not used.
FLOAT32 = Scale(
    "float32", mantissa_bits=23, bias=127, last=0x7F7FFFFF, nan=0x7FC00000, subnormal=True,
    storage=torch.float32,
)  # fmt: skip

NVFP4 = Format("nvfp4", E2M1, E4M3, block=16, blocks=(16, 32), has_global_scale=True)
MXFP4 = Format("mxfp4", E2M1, E8M0, block=32, blocks=(32, 16), has_global_scale=False)

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        NVFP4,
        MXFP4,
        Format("nvfp4_ue4m4", E2M1, UE4M4, block=16, blocks=(16, 32), has_global_scale=True),
        Format("nvfp4_ue5m3", E2M1, UE5M3, block=16, blocks=(16, 32), has_global_scale=True),
        Format("nvint4", INT4, E4M3, block=16, blocks=(16, 32), has_global_scale=True),
        Format("int8", INT8, E4M3, block=32, blocks=(32, 64, 128, 256), has_global_scale=True),
        Format("mxfp6_e2m3", E2M3, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
        Format("mxfp6_e3m2", E3M2, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
        Format("mxfp8", FP8_E4M3, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
        Format("mxfp8_e5m2", FP8_E5M2, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
        Format("fp8", FP8_E4M3, FLOAT32, WHOLE, (WHOLE,), has_global_scale=False),
        Format("fp8_block", FP8_E4M3, FLOAT32, 128, (128,), has_global_scale=False, rows=128),
        Format("fp8_tensor", FP8_E4M3, FLOAT32, WHOLE, (WHOLE,), False, rows=WHOLE),
    )
}


def get_format(name: str, block: int | str = "default") -> Format:
    """Return the format `name`, `name:block` or `name:block:multiplier`, or raise OptionError."""
    # Operators look one up at every call.
    if block == "default" and type(name) is str and name in FORMATS:
        return FORMATS[name]
    base, *parts = str(name).split(":")
    key_block, suffix = (*parts, "", "")[:2]
    is_key = base in FORMATS and len(parts) <= 2 and (not parts or key_block.isdecimal())
    if is_key and len(parts) == 2:
        is_key = suffix == _MULTIPLIER and FORMATS[base].has_global_scale
    if not is_key:
        raise unknown_name("fmt: Format", name, FORMATS)
    fmt = FORMATS[base]
    if key_block and block not in ("default", int(key_block)):
        raise OptionError(f"Format {name!r} and block={block!r} contradict each other.")
    wanted = int(key_block) if key_block else fmt.block if block == "default" else block
    # A float would be found among them, and True is 1.
    if not isinstance(wanted, SupportsIndex) or wanted not in fmt.blocks:
        if fmt.block == WHOLE:
            raise OptionError(
                f"block: Format {base!r} has one scale for {fmt.tile}, and no blocks, got "
                f"{wanted!r}. Leave block out."
            )
        raise OptionError(
            f"block: Format {base!r} has no block of {wanted!r}. Choose one of {fmt.blocks}, or "
            "'default'."
        )
    # The record itself where it fits: kernels are looked up by it.
    if wanted == fmt.block and not suffix:
        return fmt
    return _variant(fmt, int(wanted), bool(suffix))


@lru_cache(maxsize=64)
def _variant(fmt: Format, block: int, multiplies: bool) -> Format:
    """Return a registered record with another block or direction, one object for each."""
    return dataclasses.replace(fmt, block=block, multiplies=multiplies)
