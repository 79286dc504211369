"""Codebooks: tables of 16 values for blocks that are divided by their largest magnitude.

The law of every codebook is `value = values[code] * absmax`, with the absmax of the code's block.
Blocks run over the flattened tensor, and the last one may be shorter. To add a codebook, add an
entry to `CODEBOOKS`; no code asks for its name.

x of any shape with n elements has packed codes uint8 [ceil(n / 2)], the first of two in the high
half, and absmax float32 [ceil(n / block)]. The kernels of codebook_triton.py return the same bits
as the references here, except codes of a block with NaN or infinity, whose absmax is not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from ..ops import gradients_of
from ..ops.checks import require_float
from ..ops.registration import READERS, operator
from ..quantization.functional import not_finite, without_statistics

# Powers of two, so that codes of a block are whole bytes and blocks are tiles of a kernel.
BLOCK_SIZES = tuple(1 << k for k in range(4, 13))

# Blocks below it are divided by it, so that the reciprocal is finite. As bitsandbytes does.
LEAST_ABSMAX = 1e-38


@dataclass(frozen=True, repr=False)
class Codebook(Record):
    """A table of values in [-1, 1], by code. Quotients round to the nearest, ties down."""

    name: str
    values: tuple[float, ...]  # 16, in the order of the codes
    block: int = 64  # elements that share an absmax, one of BLOCK_SIZES

    __hash__ = Record.__hash__

    def __post_init__(self) -> None:
        if self.block not in BLOCK_SIZES:
            raise OptionError(
                f"Codebook {self.name!r} has no block of {self.block!r}. Choose one of "
                f"{BLOCK_SIZES}."
            )

    @property
    def key(self) -> str:
        """The name under which `get_codebook` returns exactly this record."""
        return self.name if self.block == 64 else f"{self.name}:{self.block}"

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The codes by ascending value; of equal values the smaller code first."""
        return tuple(sorted(range(len(self.values)), key=self.values.__getitem__))

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """The float32 midpoints between values in `order`, above which the next code is taken."""
        ordered = torch.tensor([self.values[code] for code in self.order], dtype=torch.float32)
        return tuple(((ordered[:-1] + ordered[1:]) / 2).tolist())

    def sizes(self, count: int) -> tuple[int, int]:
        """Return the bytes of `count` packed codes, and the number of their blocks."""
        return -(-count // 2), -(-count // self.block)


# The tables of bitsandbytes, in float32: nf4 has quantiles of a normal distribution, 8 positive, 7
# negative and 0; fp4 has two zeros and is ordered by the bits of sign and exponent.
NF4 = Codebook(
    "nf4",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
_FP4 = (torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12).tolist()
FP4 = Codebook("fp4", (*_FP4, 0.0, *(-v for v in _FP4[1:])))

CODEBOOKS = {codebook.name: codebook for codebook in (NF4, FP4)}


def get_codebook(name: str, block: int | str | None = "default") -> Codebook:
    """Return the codebook of "nf4" or "nf4:128" and a block size, or raise OptionError."""
    base, colon, size = str(name).partition(":")
    if base not in CODEBOOKS or (colon and not size.isdecimal()):
        raise unknown_name("Scheme", name, [*CODEBOOKS, *FORMATS])
    if colon and block not in ("default", int(size)):
        raise OptionError(f"Scheme {name!r} and block={block!r} contradict each other.")
    chosen: Any = int(size) if colon else block
    # The registered record where it fits, because kernels are looked up by it.
    codebook = CODEBOOKS[base]
    is_default = chosen in (None, "default", codebook.block)
    return codebook if is_default else dataclasses.replace(codebook, block=chosen)


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
    # The code of zero fills a last byte.
    codes = F.pad(codes, (0, len(codes) % 2), value=codebook.values.index(0.0))
    return codes[::2] << 4 | codes[1::2], absmax


def _quantize_blocks(blocks: Tensor, codebook: Codebook, *, divide: bool) -> tuple[Tensor, Tensor]:
    """Return the codes uint8 [J * n] and absmax [J] of blocks [J, n] float32; any code for NaN."""
    absmax = blocks.abs().amax(-1)
    least = absmax.clamp(min=LEAST_ABSMAX)
    column = least.view(-1, 1)
    quotient = (blocks / column if divide else blocks * (1 / column)).flatten()
    rank = torch.bucketize(quotient, table_of(codebook, "bounds", quotient.device), out_int32=True)
    codes = table_of(codebook, "order", quotient.device).index_select(0, rank)
    return codes, least if divide else absmax


def dequantize_codebook_ref(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return values[code] * absmax of its block, float32 rounded to `dtype`, in `shape`."""
    dense = packed.new_empty(tuple(shape), dtype=dtype)
    flat, table = dense.view(-1), table_of(codebook, "values", packed.device)
    # Whole blocks at a time; the last part may end within one.
    size = max(codebook.block, 1 << 17)
    parts = flat.split(size), packed.split(size // 2), absmax.split(size // codebook.block)
    for out, part, largest in zip(*parts, strict=True):
        codes = torch.stack((part >> 4, part & 15), -1).flatten()
        values = table.index_select(0, codes[: len(out)].int())
        out.copy_(values.mul_(largest.repeat_interleave(codebook.block)[: len(out)]))
    return dense


def linear_codebook_ref(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, rows: int, codebook: Codebook
) -> Tensor:
    """Return x [..., K] times a weight [rows, K] in a codebook, dequantized to the dtype of x."""
    weight = dequantize_codebook(packed, absmax, codebook.key, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


READERS[Codebook] = get_codebook


def _require_packed(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int]
) -> None:
    """Raise ShapeError unless packed codes and absmax are those of a tensor of `shape`."""
    expected = codebook.sizes(math.prod(shape))
    found = (packed.numel(), absmax.numel())
    if found != expected:
        raise ShapeError(
            f"A tensor of shape {tuple(shape)} in {codebook.key}: expected {expected[0]} bytes of "
            f"codes and {expected[1]} absmax, got {found[0]} and {found[1]}."
        )


def _codes_and_absmax(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    size, blocks = codebook.sizes(x.numel())
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.float32)


def _save_codebook(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, packed, absmax, _, rows, codebook = inputs
    ctx.weight = codebook, (rows, x.shape[-1])
    return packed, absmax


quantize_codebook = operator(
    quantize_codebook_ref,
    triton="parity.codebook_triton",
    shapes=_codes_and_absmax,
    checks=(require_float,),
)
dequantize_codebook = operator(
    dequantize_codebook_ref,
    triton="parity.codebook_triton",
    shapes=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
    checks=(_require_packed,),
)
linear_codebook = operator(
    linear_codebook_ref,
    shapes=lambda x, rows: x.new_empty((*x.shape[:-1], rows)),
    checks=(require_float,),
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
        qdata: packed codes, uint8 [ceil(n / 2)].
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
        size, blocks = self.codebook.sizes(math.prod(self.shape))
        self._require_tensor("qdata", (size,), torch.uint8)
        self._require_tensor("absmax", (blocks,), torch.float32)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return "2 codes a byte, the first high"

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
