"""Codebooks as data: tables of values for blocks that are divided by their largest magnitude.

The law of every codebook is `value = values[code] * absmax`, with the absmax of the code's block.
Blocks run over the flattened tensor, and the last one may be shorter. To add a codebook, add an
entry to `CODEBOOKS`; no code asks for its name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..core.elements import Record
from ..core.formats import FORMATS, FP8_E4M3
from ..errors import OptionError, unknown_name

# Block sizes of a codebook: powers of two, so that codes of a block are whole words.
BLOCK_SIZES = tuple(1 << k for k in range(4, 13))


@dataclass(frozen=True, repr=False)
class Codebook(Record):
    """A table of values in [-1, 1], one for each code.

    A quotient `x / absmax` is rounded to the nearest value. Ties go to the lower value, or to the
    even code where the values are evenly spaced. Values that do not fit the bits raise OptionError,
    and so do block sizes that are not allowed.
    """

    name: str  # under which it is registered
    bits: int  # of a code: 4, with the first of two codes in the high half of a byte, or 8
    values: tuple[float, ...]  # 2 ** bits, in the order of the codes; NaN for codes never written
    block: int = 64  # elements that share an absmax, one of BLOCK_SIZES

    __hash__ = Record.__hash__

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or len(self.values) != 1 << self.bits:
            raise OptionError(
                f"Codebook {self.name}: expected 16 values of 4 bits or 256 values of 8 bits, got "
                f"{len(self.values)} values of {self.bits} bits."
            )
        if self.block not in BLOCK_SIZES:
            raise OptionError(
                f"Codebook {self.name!r} has no block of {self.block!r}. Choose one of "
                f"{BLOCK_SIZES}."
            )

    @property
    def key(self) -> str:
        """The name under which `get_codebook` returns exactly this record, if it is registered."""
        default = CODEBOOKS.get(self.name, self).block
        return self.name if default == self.block else f"{self.name}:{self.block}"

    @property
    def bits_per_weight(self) -> float:
        """Bits per element of a whole block, its float32 absmax included."""
        return self.bits + 32 / self.block

    @cached_property
    def steps(self) -> int | None:
        """The n for which each code k, as a signed integer, has the value k / n; else None."""
        half = 1 << (self.bits - 1)
        n = half - 1
        signed = (*range(half), *range(-half, 0))
        return n if self.values == tuple(_float32(k / n) for k in signed) else None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The codes by ascending value; of equal values the smaller code first."""
        used = (code for code, value in enumerate(self.values) if not math.isnan(value))
        return tuple(sorted(used, key=self.values.__getitem__))

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """The float32 midpoints between values in `order`, above which the next code is taken."""
        ordered = torch.tensor([self.values[code] for code in self.order], dtype=torch.float32)
        return tuple(((ordered[:-1] + ordered[1:]) / 2).tolist())

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of `count` packed codes; half of the last byte may be unused."""
        return -(-count * self.bits // 8)

    def blocks_of(self, count: int) -> int:
        """Return the number of blocks of `count` elements; the last one may be shorter."""
        return -(-count // self.block)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _normal(bits: int) -> tuple[float, ...]:
    """Return quantiles of a normal distribution, constructed as NF4 is (Dettmers 2023)."""
    # Half of the codes are positive, one less are negative, and one is 0. They are evenly spaced in
    # probability up to 1 - delta, where delta is the mean of half a step of each side.
    half = 1 << (bits - 1)
    top = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2

    def quantiles(count: int) -> Tensor:
        steps = torch.arange(count, dtype=torch.float64)
        found = torch.special.ndtri(top - (top - 0.5) * steps / count)
        return (found / found[0]).float()

    zero = torch.zeros(1)
    return tuple(torch.cat((-quantiles(half - 1), zero, quantiles(half).flip(0))).tolist())


def _linear(bits: int) -> tuple[float, ...]:
    """Return the values k / (2^(bits - 1) - 1) of all signed k, in two's complement."""
    half = 1 << (bits - 1)
    return tuple(_float32(k / (half - 1)) for k in (*range(half), *range(-half, 0)))


def _fp8() -> tuple[float, ...]:
    """Return the values of E4M3 divided by 448, its largest; its -0.0 is never written."""
    values = [_float32(value / FP8_E4M3.max) for value in FP8_E4M3.values]
    values[1 << (FP8_E4M3.bits - 1)] = math.nan
    return tuple(values)


# The tables of bitsandbytes, in float32. Its nf4 is _normal(4) from other approximations of the
# quantiles, 2e-7 away; its fp4 has two zeros and is ordered by the bits of sign and exponent.
NF4 = Codebook(
    "nf4",
    4,
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4 = tuple(_float32(v / 12) for v in _TWELFTHS)
FP4 = Codebook("fp4", 4, (*_FP4, 0.0, *(-v for v in _FP4[1:])))

CODEBOOKS: dict[str, Codebook] = {
    codebook.name: codebook
    for codebook in (
        NF4,
        FP4,
        Codebook("nf8", 8, _normal(8)),
        Codebook("fp8_e4m3", 8, _fp8()),
        Codebook("int8_linear", 8, _linear(8)),
        Codebook("int4_linear", 4, _linear(4)),
    )
}


def get_codebook(name: str, block: int | str = "default") -> Codebook:
    """Return the codebook of a name like "nf4" or "nf4:128", and a block size.

    Raises:
        OptionError: the name is unknown, or the codebook does not allow the block size.
    """
    base, _, key_block = str(name).partition(":")
    if base in FORMATS:
        raise OptionError(
            f"Expected the key of a codebook, got {name!r}, a format. Call quantize or dequantize."
        )
    if base not in CODEBOOKS or (":" in str(name) and not key_block.isdecimal()):
        raise unknown_name("Scheme", name, [*CODEBOOKS, *FORMATS])
    if key_block and block not in ("default", int(key_block)):
        raise OptionError(f"Scheme {name!r} and block={block!r} contradict each other.")
    codebook = CODEBOOKS[base]
    chosen = int(key_block) if key_block else codebook.block if block == "default" else block
    if not isinstance(chosen, int):
        raise OptionError(f"block: expected a number or 'default', got {chosen!r}.")
    # The registered record where it fits, because kernels are looked up by it.
    return codebook if chosen == codebook.block else dataclasses.replace(codebook, block=chosen)


@lru_cache(maxsize=64)
def value_table(codebook: Codebook, device: torch.device) -> Tensor:
    """Return the value of each code: float32 [2 ** bits]."""
    return torch.tensor(codebook.values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def bound_table(codebook: Codebook, device: torch.device) -> Tensor:
    """Return `codebook.bounds` as float32, ascending."""
    return torch.tensor(codebook.bounds, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def order_table(codebook: Codebook, device: torch.device) -> Tensor:
    """Return `codebook.order` as uint8."""
    return torch.tensor(codebook.order, dtype=torch.uint8, device=device)
