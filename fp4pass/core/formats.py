"""Number formats as data: an element, a scale, and how blocks of them make a tensor.

The law of every format is `value = element(code) * scale * global_scale`.
To add a format, add an entry to `FORMATS`; nothing else asks a format's name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..errors import OptionError, unknown_name


@dataclass(frozen=True)
class Element:
    """The signed values that one code can take: a sign bit, then the index of a magnitude.

    Args:
        name: for people; nothing reads it.
        bits: of a code, which is `sign << (bits - 1) | index`.
        magnitudes: ascending from 0. There may be fewer than the bits have room for; the codes
            that are left are never written.

    Raises:
        OptionError: The magnitudes do not ascend from 0, or the bits have no room for them.
    """

    name: str
    bits: int
    magnitudes: tuple[float, ...]

    @staticmethod
    def binary(
        name: str, bits: int, mantissa_bits: int, min_exponent: int, count: int | None = None
    ) -> Element:
        """Return the element of binary floats with gradual underflow below 2^min_exponent.

        Args:
            name: of the element.
            bits: of a code.
            mantissa_bits: of a magnitude; integers are the case where all bits but the sign are.
            min_exponent: the exponent of the smallest normal magnitude.
            count: how many magnitudes there are, of all that the bits have room for.
        """
        count = 1 << (bits - 1) if count is None else count
        return Element(name, bits, _binary_floats(mantissa_bits, min_exponent, count))

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(self.magnitudes))
        if not ascending or self.magnitudes[0] != 0.0:
            raise OptionError(f"Element {self.name}: magnitudes must ascend from 0.")
        if not 2 <= len(self.magnitudes) <= 1 << (self.bits - 1):
            raise OptionError(
                f"Element {self.name}: {len(self.magnitudes)} magnitudes; {self.bits - 1} bits "
                f"beside the sign have room for 2 to {1 << (self.bits - 1)}."
            )

    @property
    def max(self) -> float:
        """The largest magnitude."""
        return self.magnitudes[-1]

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The value of every code, so that code `1 << (bits - 1)` is -0.0; NaN for unused ones."""
        unused = (math.nan,) * ((1 << (self.bits - 1)) - len(self.magnitudes))
        return (*self.magnitudes, *unused, *(-m for m in self.magnitudes), *unused)

    @cached_property
    def minifloat(self) -> tuple[int, int] | None:
        """`(mantissa_bits, min_exponent)` if the magnitudes are those of a binary float, else None.

        Such a grid rounds by one addition in float32, and the parity of its codes is that of the
        multiples within a binade, so that ties to even are ties to the even code. Integers are the
        case without an exponent. Other tables are searched.
        """
        mantissa, exponent = math.frexp(self.magnitudes[1])
        if mantissa != 0.5:
            return None
        for mantissa_bits in range(1, self.bits):
            min_exponent = exponent - 1 + mantissa_bits
            grid = _binary_floats(mantissa_bits, min_exponent, len(self.magnitudes))
            if grid == self.magnitudes:
                return mantissa_bits, min_exponent
        return None

    @cached_property
    def halving_reach(self) -> float:
        """The largest `amax / s` for which scale `s` is never worse than scale `2 s`.

        With p the smallest point of the doubled grid that is not on the grid itself and g the
        largest point of the grid below it, an x <= (g + p) / 2 whose nearest doubled point is p
        has g at least as near; all other nearest doubled points are on the grid. E2M1: p = 8,
        g = 6, reach 7.
        """
        doubled = [2 * m for m in self.magnitudes]
        missing = min(set(doubled) - set(self.magnitudes))
        below = max(m for m in self.magnitudes if m < missing)
        return (below + missing) / 2

    @property
    def carry(self) -> int:
        """What to add to the float bits of an amax to round it up to a power of two.

        That is from the mantissa of `halving_reach` on, where the larger of two scales 2^k is at
        least as near. E2M1: from 1.75 on.
        """
        return int((2 - 2 * math.frexp(self.halving_reach)[0]) * (1 << 23))

    @property
    def dead_zone(self) -> float:
        """The largest quotient that rounds to zero (a tie, and zero is the even code)."""
        return self.magnitudes[1] / 2


def _binary_floats(mantissa_bits: int, min_exponent: int, count: int) -> tuple[float, ...]:
    """The first binary floats from 0 on: multiples of a step that doubles with each binade."""
    found = []
    for index in range(count):
        field, fraction = divmod(index, 1 << mantissa_bits)
        significand = fraction + (1 << mantissa_bits if field else 0)
        shift = min_exponent - mantissa_bits + max(field - 1, 0)
        found.append(math.ldexp(significand, shift))
    return tuple(found)


@dataclass(frozen=True)
class Scale:
    """The 8-bit unsigned numbers that a block scale can be, as an exponent and a mantissa.

    Args:
        name: for people; nothing reads it.
        mantissa_bits: of a byte; the bits above them are the exponent.
        bias: of the exponent.
        last: the largest byte that is written; the smallest is 1.
        nan: the byte that marks a block whose input was not finite.
        subnormal: whether exponent 0 is one of subnormal numbers, as IEEE has it.
        storage: the dtype in which checkpoints hold the bytes.
    """

    name: str
    mantissa_bits: int
    bias: int
    last: int
    nan: int
    subnormal: bool
    storage: torch.dtype

    def decode(self, byte: int) -> float:
        """Return the value of one byte."""
        if byte == self.nan:
            return math.nan
        exponent, mantissa = divmod(byte, 1 << self.mantissa_bits)
        if self.subnormal and exponent == 0:
            exponent = 1
        else:
            mantissa += 1 << self.mantissa_bits
        return math.ldexp(mantissa, exponent - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values of bytes 1 to `last`, ascending."""
        return tuple(self.decode(byte) for byte in range(1, self.last + 1))

    @property
    def min(self) -> float:
        """The smallest scale that is written."""
        return self.values[0]

    @property
    def max(self) -> float:
        """The largest scale."""
        return self.values[-1]

    @property
    def octave(self) -> int:
        """How many consecutive bytes double the scale."""
        return 1 << self.mantissa_bits

    @cached_property
    def halving_from(self) -> int:
        """The first byte from which on half of every scale is a scale too."""
        values = set(self.values)
        odd = [b for b, v in enumerate(self.values, start=1) if v / 2 not in values]
        return max(odd) + 1


# The last part of the key of a format whose stored global scale multiplies.
_MULTIPLIER = "multiplier"


@dataclass(frozen=True)
class Format:
    """A block format: elements, a scale for each `block` of them along K, a global scale or none.

    Args:
        name: under which it is registered, and which checkpoints store.
        element: what a code stands for.
        scale: what a block scale can be.
        block: how many elements share a scale.
        blocks: the block sizes that may be asked for.
        has_global_scale: whether a tensor has a float32 scale besides.
        multiplies: whether the stored global scale multiplies (ModelOpt) instead of dividing
            (compressed-tensors).
    """

    name: str
    element: Element
    scale: Scale
    block: int
    blocks: tuple[int, ...]
    has_global_scale: bool
    multiplies: bool = False

    @cached_property
    def _identity(self) -> tuple[int, str]:
        """The hash and the text of the record, of which Triton makes a key at every launch."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        text = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return hash(tuple(values.values())), f"Format({text})"

    def __hash__(self) -> int:
        return self._identity[0]

    def __repr__(self) -> str:
        return self._identity[1]

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
    def bits_per_weight(self) -> float:
        """Bits of codes and block scales for one weight."""
        return self.element.bits + 8 / self.block

    def packed_columns(self, columns: int) -> int:
        """Return P, the bytes of the packed codes of `columns` elements, which are whole blocks."""
        return columns * self.element.bits // 8

    def columns(self, packed_columns: int) -> int:
        """Return how many elements bytes of packed codes hold: the inverse of `packed_columns`."""
        return packed_columns * 8 // self.element.bits

    def global_scale_for(self, amax: float) -> float:
        """Return the smallest power of two 2^k with `2^k * scale.max * element.max >= amax`.

        Args:
            amax: the largest magnitude of a tensor, or of those that share a global scale.

        Returns:
            2^k with k in [-126, 126]; 1.0 for formats without a global scale and for amax 0.

        Raises:
            OptionError: amax is negative or not finite.
        """
        if not self.has_global_scale or amax == 0.0:
            return 1.0
        if not math.isfinite(amax) or amax < 0.0:
            raise OptionError(f"amax must be finite and not negative, not {amax}.")
        mantissa, exponent = math.frexp(amax)
        full_mantissa, full_exponent = math.frexp(self.scale.max * self.element.max)
        k = exponent - full_exponent + (mantissa > full_mantissa)
        return math.ldexp(1.0, min(max(k, -126), 126))


E2M1 = Element("e2m1", bits=4, magnitudes=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))

E2M3 = Element.binary("e2m3", bits=6, mantissa_bits=3, min_exponent=0)
E3M2 = Element.binary("e3m2", bits=6, mantissa_bits=2, min_exponent=-2)
# What is left of 8 bits are NaN and, in E5M2, infinity (OCP OFP8 v1.0).
FP8_E4M3 = Element.binary("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, count=127)
FP8_E5M2 = Element.binary("e5m2", bits=8, mantissa_bits=2, min_exponent=-14, count=124)
INT4 = Element.binary("int4", bits=4, mantissa_bits=3, min_exponent=3)
INT8 = Element.binary("int8", bits=8, mantissa_bits=7, min_exponent=7)

E4M3 = Scale(
    "e4m3",
    mantissa_bits=3,
    bias=7,
    last=126,
    nan=127,
    subnormal=True,
    storage=torch.float8_e4m3fn,
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
        Format("mxfp8_e4m3", FP8_E4M3, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
        Format("mxfp8_e5m2", FP8_E5M2, E8M0, block=32, blocks=(32, 16), has_global_scale=False),
    )
}


def get_format(name: str, block: int | str = "default") -> Format:
    """Return the format of a key, with another block size if one is given.

    Args:
        name: `name`, `name:block`, or `name:block:multiplier` (`Format.multiplies`).
        block: one of the format's blocks, or "default".

    Raises:
        OptionError: There is no such format, or it does not have that block.
    """
    base, *parts = str(name).split(":")
    key_block, suffix = (*parts, "", "")[:2]
    if base not in FORMATS or len(parts) > 2 or (parts and not key_block.isdecimal()):
        raise unknown_name("Format", name, FORMATS)
    fmt = FORMATS[base]
    if len(parts) == 2 and (suffix != _MULTIPLIER or not fmt.has_global_scale):
        raise unknown_name("Format", name, FORMATS)
    if key_block and block not in ("default", int(key_block)):
        raise OptionError(f"Format {name!r} and block={block!r} contradict each other.")
    wanted = int(key_block) if key_block else fmt.block if block == "default" else block
    if wanted not in fmt.blocks:
        raise OptionError(
            f"Format {base!r} has no block of {wanted!r}. Choose one of {fmt.blocks}, or 'default'."
        )
    # The record itself where it fits: kernels are looked up by it.
    if wanted == fmt.block and not suffix:
        return fmt
    return _variant(fmt, int(wanted), bool(suffix))


@lru_cache(maxsize=64)
def _variant(fmt: Format, block: int, multiplies: bool) -> Format:
    """A registered record with another block or direction; the same object for the same call."""
    return dataclasses.replace(fmt, block=block, multiplies=multiplies)


@lru_cache(maxsize=64)
def scale_table(scale: Scale, device: torch.device) -> Tensor:
    """Return the value of each of the 256 bytes, float32 [256]; NaN above `scale.nan`."""
    decoded = [scale.decode(b) if b <= scale.nan else math.nan for b in range(256)]
    return torch.tensor(decoded, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def element_table(element: Element, device: torch.device) -> Tensor:
    """Return the value of each code, float32 [2 ** bits]."""
    return torch.tensor(element.values, dtype=torch.float32, device=device)
