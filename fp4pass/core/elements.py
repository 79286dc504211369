"""The numbers that formats are made of: the values of a code, and of a block scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..errors import OptionError


@dataclass(frozen=True, repr=False)
class Record:
    """A record that keeps its hash and its text: Triton makes a key of them at every launch."""

    # A subclass takes __hash__ in its own body: dataclass would replace an inherited one.

    @cached_property
    def _identity(self) -> tuple[int, str]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        text = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return hash(tuple(values.values())), f"{type(self).__name__}({text})"

    def __hash__(self) -> int:
        return self._identity[0]

    def __repr__(self) -> str:
        return self._identity[1]


@dataclass(frozen=True)
class Element:
    """The signed values that one code can take: a sign bit, then the index of a magnitude.

    OptionError is raised unless the magnitudes ascend from 0 and the bits have room for them.

    Example:
        >>> from fp4pass.core.elements import Element
        >>> Element.binary("e2m1", bits=4, mantissa_bits=1, min_exponent=0).magnitudes
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """

    name: str  # for people; nothing reads it
    bits: int  # of a code, which is `sign << (bits - 1) | index`
    magnitudes: tuple[float, ...]  # ascending from 0; codes beyond the last are never written
    native: torch.dtype | None = None  # of torch, whose bits are the codes

    @staticmethod
    def binary(
        name: str,
        bits: int,
        mantissa_bits: int,
        min_exponent: int,
        count: int | None = None,
        native: torch.dtype | None = None,
    ) -> Element:
        """Return the element of binary floats with gradual underflow below 2^min_exponent."""
        # Integers are the case where all bits but the sign are mantissa. count: how many magnitudes
        # there are, of all that the bits have room for.
        count = 1 << (bits - 1) if count is None else count
        return Element(name, bits, _binary_floats(mantissa_bits, min_exponent, count), native)

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(self.magnitudes))
        if not ascending or self.magnitudes[0] != 0.0:
            raise OptionError(
                f"Element {self.name}: expected ascending magnitudes from 0 on, got "
                f"{self.magnitudes}."
            )
        if not 2 <= len(self.magnitudes) <= 1 << (self.bits - 1):
            raise OptionError(
                f"Element {self.name}: expected 2 to {1 << (self.bits - 1)} magnitudes in "
                f"{self.bits - 1} bits beside the sign, got {len(self.magnitudes)}."
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
        """`(mantissa_bits, min_exponent)` of magnitudes that are binary floats, else None."""
        # Such a grid rounds by one addition in float32, and the parity of its codes is that of the
        # multiples within a binade, so that ties to even are ties to the even code. Integers are
        # the case without an exponent. Other tables are searched.
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
        """The largest `amax / s` for which scale `s` is never worse than scale `2 s`."""
        # With p the smallest point of the doubled grid that is not on the grid itself and g the
        # largest point of the grid below it, an x <= (g + p) / 2 whose nearest doubled point is p
        # has g at least as near; other such points are on the grid. E2M1: p = 8, g = 6, reach 7.
        doubled = [2 * m for m in self.magnitudes]
        missing = min(set(doubled) - set(self.magnitudes))
        below = max(m for m in self.magnitudes if m < missing)
        return (below + missing) / 2

    @property
    def carry(self) -> int:
        """The number added to the float bits of an amax to round it up to a power of two."""
        # From the mantissa of halving_reach on (1.75 for E2M1) the larger of two 2^k is no farther.
        return int((2 - 2 * math.frexp(self.halving_reach)[0]) * (1 << 23))

    @property
    def dead_zone(self) -> float:
        """The largest quotient that rounds to zero (a tie, and zero is the even code)."""
        return self.magnitudes[1] / 2


def _binary_floats(mantissa_bits: int, min_exponent: int, count: int) -> tuple[float, ...]:
    """Return the first binary floats from 0 on; their step doubles with each binade."""
    found = []
    for index in range(count):
        field, fraction = divmod(index, 1 << mantissa_bits)
        significand = fraction + (1 << mantissa_bits if field else 0)
        shift = min_exponent - mantissa_bits + max(field - 1, 0)
        found.append(math.ldexp(significand, shift))
    return tuple(found)


@dataclass(frozen=True)
class Scale:
    """The unsigned numbers that a scale can be, as the bits of an exponent and a mantissa."""

    name: str  # for people; nothing reads it
    mantissa_bits: int  # of a byte; the bits above them are the exponent
    bias: int  # of the exponent
    last: int  # the largest byte that is written; the smallest is 1
    nan: int  # the byte that marks a block whose input was not finite
    subnormal: bool  # whether exponent 0 is one of subnormal numbers, as IEEE has it
    storage: torch.dtype  # in which checkpoints hold the bytes

    @property
    def bits(self) -> int:
        """Of one scale: 8, which are a byte, or 32, which are a float32."""
        return 8 * self.storage.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which records hold scales, and operators take them: uint8 for bytes."""
        return torch.uint8 if self.bits == 8 else self.storage

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
        return self.decode(1)

    @property
    def max(self) -> float:
        """The largest scale."""
        return self.decode(self.last)

    @property
    def octave(self) -> int:
        """The number of consecutive bytes that double the scale."""
        return 1 << self.mantissa_bits

    @cached_property
    def halving_from(self) -> int:
        """The first byte from which on half of every scale is a scale too."""
        values = set(self.values)
        odd = [b for b, v in enumerate(self.values, start=1) if v / 2 not in values]
        return max(odd) + 1


@lru_cache(maxsize=64)
def scale_table(scale: Scale, device: torch.device) -> Tensor:
    """Return the value of each of the 256 bytes, float32 [256]; NaN above `scale.nan`."""
    decoded = [scale.decode(b) if b <= scale.nan else math.nan for b in range(256)]
    return torch.tensor(decoded, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def element_table(element: Element, device: torch.device) -> Tensor:
    """Return the value of each code, float32 [2 ** bits]."""
    return torch.tensor(element.values, dtype=torch.float32, device=device)
