"""The layers: weights of 4 bits that are dequantized, and products of 8-bit integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.codebooks import CODEBOOKS, Codebook, get_scheme, value_table
from ..core.formats import FORMATS, Format
from ..errors import NonFiniteError, OptionError, ShapeError, unknown_name
from ..kernels.linear.int8_reference import MAX_COLUMNS, dequantize_rows_ref, quantize_rows_ref
from ..linear import GLOBAL, PACKED, SCALE, stored_tensors
from ..ops import FLOATS, linear_codebook, linear_int8
from ..tensor.quantizer import quantize
from .base import Layout, StoredLinear, sizes_of

# Buffers that a converted linear has not.
ABSMAX, CODEBOOK, CODES = "weight_absmax", "weight_codebook", "weight_codes"

QUANT_TYPES = (
    *(each.name for each in CODEBOOKS.values() if each.bits == 4),
    *(each.name for each in FORMATS.values() if each.element.bits == 4),
)


class Linear4bit(StoredLinear):
    """A linear on 4-bit weights: y = x W^T + bias, W dequantized to x's dtype.

    quant_type: a codebook ("nf4", "fp4") or a format ("nvfp4", "mxfp4", ...) of QUANT_TYPES.
    block_size: elements that share a scale, None for the type's own. Blocks of a codebook run
    over the flattened weight, which may be of any shape; those of a format along a row, which
    must be whole blocks. compute_dtype: of the product, whatever x's dtype is; None for that.
    Buffers of a format are those of a converted linear; of a codebook `weight_packed` uint8
    [N K / 2], `weight_absmax` float32 [blocks] and `weight_codebook` float32 [16], its values.
    Raises OptionError or ShapeError.
    """

    scheme: Format | Codebook
    weight_packed: Tensor
    weight_scale: Tensor
    weight_absmax: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        block_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        scheme = _fitting_scheme(quant_type, block_size, in_features)
        if compute_dtype is not None and compute_dtype not in FLOATS:
            raise OptionError(f"compute_dtype is {compute_dtype}; one of {FLOATS} is wanted.")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.quant_type = quant_type
        self.scheme = scheme
        self.compute_dtype = compute_dtype

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        quant_type: str = "nf4",
        block_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Linear4bit:
        """A quantized layer of a linear's weight, with the linear's own bias."""
        layer = unquantized_4bit(linear, quant_type, block_size, compute_dtype)
        layer.quantize_weight()
        return layer

    def quantize_weight(self, block_size: int | None = None) -> None:
        """Replace the weight by its codes. block_size: None for the one that the layer has.

        Raises StateError if it is quantized already or has no values, NonFiniteError, OptionError
        or ShapeError.
        """
        if block_size is not None and not self.is_quantized:
            self.scheme = _fitting_scheme(self.quant_type, block_size, self.in_features)
        self._quantize()

    def _layout(self) -> Layout:
        count = self.out_features * self.in_features
        if isinstance(self.scheme, Codebook):
            return {
                PACKED: ((self.scheme.packed_bytes(count),), torch.uint8),
                ABSMAX: ((self.scheme.blocks_of(count),), torch.float32),
                CODEBOOK: ((1 << self.scheme.bits,), torch.float32),
            }
        blocks = self.in_features // self.scheme.block
        columns = self.scheme.packed_columns(self.in_features)
        layout: Layout = {
            PACKED: ((self.out_features, columns), torch.uint8),
            SCALE: ((self.out_features, blocks), self.scheme.scale.storage),
        }
        if self.scheme.has_global_scale:
            layout[GLOBAL] = ((1,), torch.float32)
        return layout

    def _problem(self, given: Mapping[str, Tensor]) -> str:
        problem = super()._problem(given)
        if not problem and isinstance(self.scheme, Codebook) and not given[CODEBOOK].is_meta:
            table = value_table(self.scheme, given[CODEBOOK].device)
            if not torch.equal(given[CODEBOOK], table):
                problem = f"its codes are of another codebook than {self.scheme.name}"
        return problem

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        state = quantize(weight, self.scheme.key)
        if isinstance(self.scheme, Codebook):
            table = value_table(self.scheme, weight.device).clone()
            return {PACKED: state.qdata, ABSMAX: state.scale, CODEBOOK: table}
        return {n: t for n, t in stored_tensors(state, None).items() if t is not None}

    def _decode(self, dtype: torch.dtype) -> Tensor:
        key = self.scheme.key
        if isinstance(self.scheme, Codebook):
            shape = (self.out_features, self.in_features)
            return torch.ops.fp4pass.dequantize_codebook(
                self.weight_packed, self.weight_absmax, key, shape, dtype
            )
        return torch.ops.fp4pass.dequantize(*self._blocks(), key, dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        wide, key = x.to(self.compute_dtype or x.dtype), self.scheme.key
        if isinstance(self.scheme, Codebook):
            stored = (self.weight_packed, self.weight_absmax)
            y = linear_codebook(wide, *stored, self.bias, self.out_features, key)
        else:
            y = torch.ops.fp4pass.linear(wide, *self._blocks(), self.bias, key)
        return y.to(x.dtype)

    def _blocks(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, bits of the scales and the global divisor, as operators take them."""
        bits = self.weight_scale.view(torch.uint8)
        return self.weight_packed, bits, getattr(self, GLOBAL, None)

    def extra_repr(self) -> str:
        kept = "quantized" if self.is_quantized else "not quantized"
        block = f"quant_type={self.quant_type}, block_size={self.scheme.block}"
        return f"{super().extra_repr()}, {block}, {kept}"


class Linear8bitLt(StoredLinear):
    """A linear in 8-bit integers: rows of x and of W rounded, products summed exactly.

    threshold: columns of x in which a magnitude reaches it are multiplied in x's dtype instead, by
    the dequantized columns of W; 0 for none. Which columns are, is decided for each call, so that
    rows that are together in a call are not independent.
    Buffers: `weight_codes` int8 [N, K] and `weight_scale` float32 [N], the largest magnitude of a
    row over 127. Raises OptionError, or ShapeError for rows whose sums may exceed int32.
    """

    weight_codes: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        threshold: float = 6.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not threshold >= 0.0:
            raise OptionError(f"threshold={threshold!r}; 0, for none, or more is wanted.")
        if in_features > MAX_COLUMNS:
            raise ShapeError(
                f"in_features={in_features}; up to {MAX_COLUMNS} products of 8-bit codes can be "
                "summed in int32. Use Linear4bit for this layer."
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.threshold = float(threshold)

    @classmethod
    def from_linear(cls, linear: nn.Module, threshold: float = 6.0) -> Linear8bitLt:
        """A quantized layer of a linear's weight, with the linear's own bias."""
        layer = unquantized_8bit(linear, threshold)
        layer.quantize_weight()
        return layer

    def quantize_weight(self) -> None:
        """Replace the weight by its codes.

        Raises StateError if it is quantized already or has no values, or NonFiniteError.
        """
        self._quantize()

    def _layout(self) -> Layout:
        shape = (self.out_features, self.in_features)
        return {CODES: (shape, torch.int8), SCALE: (shape[:1], torch.float32)}

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        # Some rows at a time, for they become float32 on the way.
        parts = [quantize_rows_ref(rows) for rows in weight.split(4096)]
        codes, scale = (torch.cat(part) for part in zip(*parts, strict=True))
        if not scale.isfinite().all():
            raise NonFiniteError("The weight holds NaN or infinity. Repair it before.")
        return {CODES: codes, SCALE: scale}

    def _decode(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows_ref(self.weight_codes, self.weight_scale, dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        return linear_int8(x, self.weight_codes, self.weight_scale, self.bias, self.threshold)

    def extra_repr(self) -> str:
        kept = "quantized" if self.is_quantized else "not quantized"
        return f"{super().extra_repr()}, threshold={self.threshold}, {kept}"


def unquantized_4bit(
    linear: nn.Module,
    quant_type: str,
    block_size: int | None,
    compute_dtype: torch.dtype | None,
) -> Linear4bit:
    """A Linear4bit that has a linear's own parameters still."""
    layer = Linear4bit(
        *sizes_of(linear),
        quant_type=quant_type,
        block_size=block_size,
        compute_dtype=compute_dtype,
        device="meta",
    )
    return layer.take(linear)


def unquantized_8bit(linear: nn.Module, threshold: float) -> Linear8bitLt:
    """A Linear8bitLt that has a linear's own parameters still."""
    return Linear8bitLt(*sizes_of(linear), threshold=threshold, device="meta").take(linear)


def scheme_of(quant_type: str, block_size: int | None) -> Format | Codebook:
    """The format or codebook of a quant_type. Raises OptionError for what has not 4 bits."""
    if quant_type not in QUANT_TYPES:
        raise unknown_name("quant_type", quant_type, QUANT_TYPES)
    return get_scheme(quant_type, "default" if block_size is None else block_size)


def _fitting_scheme(quant_type: str, block_size: int | None, in_features: int) -> Format | Codebook:
    scheme = scheme_of(quant_type, block_size)
    if isinstance(scheme, Format) and in_features % scheme.block:
        raise ShapeError(
            f"in_features={in_features} is not a multiple of {scheme.block} (the block of "
            f"{scheme.key}). Leave the layer as it is, or choose quant_type='nf4', whose blocks "
            "take any width."
        )
    return scheme
