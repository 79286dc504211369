"""Codebooks: tables of values for blocks that are divided by their largest magnitude.

The law of every codebook is `value = values[code] * absmax`, with the absmax of the code's block.
Blocks run over the flattened tensor, and the last one may be shorter. To add a codebook, add an
entry to `CODEBOOKS`; no code asks for its name.

x of any shape with n elements has packed codes uint8 [ceil(n * bits / 8)], the first of two 4-bit
codes in the high half, and absmax float32 [ceil(n / block)]. The kernels of codebook_triton.py
return the same bits as the references here, except codes of a block with NaN or infinity, whose
absmax is not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.elements import Record
from ..core.formats import FORMATS
from ..core.quant_state import OTHER_RECORDS, OtherRecord
from ..errors import OptionError, ShapeError, unknown_name
from ..kernels.common.rounding import in_chunks
from ..ops.checks import require_float
from ..ops.linears import gradients_of
from ..ops.registration import READERS, operator
from ..quantization.functional import not_finite, without_statistics

# Block sizes of a codebook: powers of two, so that codes of a block are whole words.
BLOCK_SIZES = tuple(1 << k for k in range(4, 13))

# Blocks below it are divided by it, so that the reciprocal is finite. As bitsandbytes does.
LEAST_ABSMAX = 1e-38


@dataclass(frozen=True, repr=False)
class Codebook(Record):
    """A table of values in [-1, 1], one for each code.

    A quotient `x / absmax` is rounded to the nearest value. Ties go to the lower value, or to the
    even code where the values are evenly spaced. Values that do not fit the bits raise OptionError,
    and so do block sizes that are not allowed.
    """

    name: str  # under which it is registered
    bits: int  # of a code: 4, with the first of two codes in the high half of a byte, or 8
    values: tuple[float, ...]  # 2 ** bits, in the order of the codes
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
        return tuple(sorted(range(len(self.values)), key=self.values.__getitem__))

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


def _linear(bits: int) -> tuple[float, ...]:
    """Return the values k / (2^(bits - 1) - 1) of all signed k, in two's complement."""
    half = 1 << (bits - 1)
    return tuple(_float32(k / (half - 1)) for k in (*range(half), *range(-half, 0)))


# The tables of bitsandbytes, in float32: nf4 has quantiles of a normal distribution, 8 positive, 7
# negative and 0; fp4 has two zeros and is ordered by the bits of sign and exponent.
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


@lru_cache(maxsize=128)
def table_of(codebook: Codebook, name: str, device: torch.device) -> Tensor:
    """Return a tuple of a codebook on a device: float32 "values" and "bounds", or uint8 "order"."""
    dtype = torch.uint8 if name == "order" else torch.float32
    return torch.tensor(getattr(codebook, name), dtype=dtype, device=device)


def quantize_codebook_ref(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Return packed codes and absmax of x, in blocks along its flattened elements."""
    # Quotients are products with the reciprocal of absmax. In a last block that is shorter they are
    # divided, and its absmax is at least 1e-38, as in the CPU build of bitsandbytes.
    flat = x.reshape(-1)
    whole = len(flat) - len(flat) % codebook.block
    chunks = in_chunks(codebook.block, flat[:whole].view(-1, codebook.block))
    parts = [_quantize_blocks(blocks.float(), codebook, divide=False) for (blocks,) in chunks]
    if whole < len(flat):
        parts.append(_quantize_blocks(flat[whole:].float().view(1, -1), codebook, divide=True))
    codes, absmax = map(torch.cat, zip(*parts, strict=True))
    if codebook.bits == 4:
        # The code of zero fills a last byte.
        codes = F.pad(codes, (0, len(codes) % 2), value=int(codes_of(torch.zeros(1), codebook)))
        codes = codes[::2] << 4 | codes[1::2]
    return codes, absmax


def _quantize_blocks(blocks: Tensor, codebook: Codebook, *, divide: bool) -> tuple[Tensor, Tensor]:
    """Return the codes uint8 [J * n] and absmax [J] of blocks [J, n] float32."""
    absmax = blocks.abs().amax(-1)
    least = absmax.clamp(min=LEAST_ABSMAX)
    column = least.view(-1, 1)
    quotient = blocks / column if divide else blocks * (1 / column)
    return codes_of(quotient.flatten(), codebook), least if divide else absmax


def codes_of(quotient: Tensor, codebook: Codebook) -> Tensor:
    """Return the codes (uint8) of float32 quotients in [-1, 1]; any code for NaN."""
    if codebook.steps is not None:
        # Two's complement, cut to the lower bits.
        signed = quotient.nan_to_num().mul_(codebook.steps).round_().to(torch.int32)
        return (signed & (1 << codebook.bits) - 1).to(torch.uint8)
    rank = torch.bucketize(quotient, table_of(codebook, "bounds", quotient.device), out_int32=True)
    return table_of(codebook, "order", quotient.device).index_select(0, rank)


def dequantize_codebook_ref(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return values[code] * absmax of its block, float32 rounded to `dtype`, in `shape`."""
    dense = packed.new_empty(tuple(shape), dtype=dtype)
    flat, table = dense.view(-1), table_of(codebook, "values", packed.device)
    # Whole blocks at a time; the last part may end within one.
    size = max(codebook.block, 1 << 17)
    bytes_of = codebook.packed_bytes(size)
    parts = flat.split(size), packed.split(bytes_of), absmax.split(size // codebook.block)
    for out, part, largest in zip(*parts, strict=True):
        codes = torch.stack((part >> 4, part & 15), -1).flatten() if codebook.bits == 4 else part
        values = table.index_select(0, codes[: len(out)].int())
        factors = largest.repeat_interleave(codebook.block)[: len(out)]
        out.copy_(values.mul_(factors))
    return dense


def linear_codebook_ref(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor | None,
    rows: int,
    codebook: Codebook,
    *,
    dequantize: Callable[..., Tensor] = dequantize_codebook_ref,
) -> Tensor:
    """Return x [..., K] times a weight [rows, K] in a codebook, dequantized to the dtype of x."""
    weight = dequantize(packed, absmax, codebook, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


READERS[Codebook] = get_codebook


def _require_packed(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int]
) -> None:
    """Raise ShapeError unless packed codes and absmax are those of a tensor of `shape`."""
    count = math.prod(shape)
    expected = (codebook.packed_bytes(count), codebook.blocks_of(count))
    found = (packed.numel(), absmax.numel())
    if found != expected:
        raise ShapeError(
            f"A tensor of shape {tuple(shape)} in {codebook.key}: expected {expected[0]} bytes of "
            f"codes and {expected[1]} absmax, got {found[0]} and {found[1]}."
        )


def _require_packed_weight(
    x: Tensor, packed: Tensor, absmax: Tensor, rows: int, codebook: Codebook
) -> None:
    _require_packed(packed, absmax, codebook, (rows, x.shape[-1]))


def _codes_and_absmax(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    count = x.numel()
    return (
        x.new_empty(codebook.packed_bytes(count), dtype=torch.uint8),
        x.new_empty(codebook.blocks_of(count), dtype=torch.float32),
    )


def _save_codebook(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, packed, absmax, _, rows, codebook = inputs
    ctx.weight = codebook, (rows, x.shape[-1])
    return packed, absmax


quantize_codebook = operator(
    quantize_codebook_ref,
    triton="parity.codebook_triton:quantize_codebook_triton",
    shapes=_codes_and_absmax,
    checks=(require_float,),
)
dequantize_codebook = operator(
    dequantize_codebook_ref,
    triton="parity.codebook_triton:dequantize_codebook_triton",
    shapes=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
    checks=(_require_packed,),
)
linear_codebook = operator(
    linear_codebook_ref,
    triton="parity.codebook_triton:linear_codebook_triton",
    shapes=lambda x, rows: x.new_empty((*x.shape[:-1], rows)),
    checks=(require_float, _require_packed_weight),
    backward=gradients_of(
        3,
        _save_codebook,
        lambda ctx, stored, dtype: dequantize_codebook(*stored, *ctx.weight, dtype),
    ),
)


@dataclass(frozen=True, eq=False, repr=False)
class CodebookState(OtherRecord):
    """A tensor in a codebook: `value = values[code] * absmax`.

    Blocks run over the flattened tensor of n elements; the last one may be shorter.

    Attributes:
        qdata: packed codes, uint8 [ceil(n * bits / 8)].
        absmax: the largest magnitude of each block, float32 [ceil(n / block)].
        codebook: the table of values.
        shape: the shape of the dense tensor.
        dtype: the dtype of the dense tensor.

    Raises:
        ShapeError: the tensors do not fit each other.

    Example:
        >>> import fp4pass.parity
        >>> state = fp4pass.quantize(torch.randn(4, 64), "nf4")
        >>> state.save("weight.safetensors")
        >>> state = fp4pass.parity.CodebookState.load("weight.safetensors").to("cpu")
        >>> fp4pass.dequantize(state).shape
        torch.Size([4, 64])
    """

    qdata: Tensor
    absmax: Tensor
    codebook: Codebook
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    scale_field: ClassVar[str] = "absmax"
    scheme_field: ClassVar[str] = "codebook"

    def __post_init__(self) -> None:
        count = math.prod(self.shape)
        self._require_tensor("qdata", (self.codebook.packed_bytes(count),), torch.uint8)
        self._require_tensor("absmax", (self.codebook.blocks_of(count),), torch.float32)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return "2 codes a byte, the first high" if self.codebook.bits == 4 else "1 code a byte"

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of absmax."""
        return self.qdata.nbytes + self.absmax.nbytes

    @classmethod
    def _read(cls, qdata: Tensor, scale: Tensor, facts: Mapping[str, Any]) -> CodebookState:
        """Return the record of tensors of a file, and of the facts beside them."""
        return cls(qdata, scale, get_codebook(facts["scheme"]), facts["shape"], facts["dtype"])

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        scheme: str,
        block: int | str = "default",
        method: object = "sse",
        global_scale: float | str = "auto",
    ) -> CodebookState:
        """Quantize a checked tensor, as `fp4pass.quantize` does."""
        codebook = get_codebook(scheme, block)
        if global_scale != "auto":
            raise OptionError(
                f"quantize: {codebook.key} is a codebook and has no global scale, got "
                f"global_scale={global_scale!r}. Leave it out."
            )
        without_statistics(method)
        qdata, absmax = quantize_codebook(x, codebook.key)
        if not absmax.isfinite().all():
            raise not_finite()
        return cls(qdata, absmax, codebook, tuple(x.shape), x.dtype)

    def dequantize(self) -> Tensor:
        """Return the dense tensor, as `fp4pass.dequantize` does."""
        rest = (self.codebook.key, self.shape, self.dtype)
        tensor: Tensor = dequantize_codebook(self.qdata, self.absmax, *rest)
        return tensor


OTHER_RECORDS.update(dict.fromkeys(CODEBOOKS, CodebookState))
