"""Linear4bit: a linear layer with 4-bit weights that are dequantized to its input's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.formats import FORMATS, Format, get_format
from ..core.quant_state import QuantState
from ..errors import OptionError, ShapeError, expected, unknown_name
from ..nn.linear import GLOBAL, PACKED, SCALE, QuantizedLinear
from ..nn.packed_linear import scale_bits
from ..nn.packed_state import BufferLayout
from ..ops import FLOATS
from ..quantization.tensor import quantize
from .codebook_state import CodebookState
from .codebooks import CODEBOOKS, Codebook, get_codebook, value_table
from .layer import QuantizableLinear, require_sizes
from .operators import linear_codebook

# Buffers that a QuantizedLinear does not have.
ABSMAX, CODEBOOK = "weight_absmax", "weight_codebook"

QUANT_TYPES = (
    *(each.name for each in CODEBOOKS.values() if each.bits == 4),
    *(each.name for each in FORMATS.values() if each.element.bits == 4),
)


class Linear4bit(QuantizableLinear):
    """A linear layer with 4-bit weights: y = x W^T + bias, with W dequantized to x's dtype.

    With a format its buffers are those of a QuantizedLinear. With a codebook they are
    `weight_packed` uint8 [ceil(N K / 2)], `weight_absmax` float32 [blocks] and `weight_codebook`
    float32 [16], the values of the codes.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias.
        quant_type: a codebook ("nf4", "fp4", ...) or a format ("nvfp4", "mxfp4", ...) of
            QUANT_TYPES. Blocks of a codebook run over the flattened weight, of any shape; blocks
            of a format run along a row, which must be whole blocks.
        block_size: elements that share a scale; None for the block size of the quant_type.
        compute_dtype: the dtype of the product; None for that of x.
        device: where the dense weight is made.
        dtype: the dtype of the dense weight.

    Raises:
        OptionError: an option does not exist.
        ShapeError: rows are not whole blocks of a format.

    Example:
        >>> layer = fp4pass.parity.Linear4bit.from_linear(model[0], "nf4")
        >>> layer(batches[0]).shape
        torch.Size([4, 64])
    """

    packed_buffers = (PACKED, SCALE, GLOBAL, ABSMAX, CODEBOOK)
    packed_attributes = ("quant_type", "scheme", "compute_dtype", "is_quantized", "weight_dtype")

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
        require_sizes(in_features, out_features, device, dtype)
        scheme = _fitting_scheme(quant_type, block_size, in_features)
        if compute_dtype is not None and compute_dtype not in FLOATS:
            raise OptionError(expected("compute_dtype", f"one of {FLOATS}", compute_dtype))
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
        """Make a quantized layer from a linear layer.

        Args:
            linear: an nn.Linear, a packed linear layer or transformers' Conv1D.
            quant_type: as in Linear4bit.
            block_size: as in Linear4bit.
            compute_dtype: as in Linear4bit.

        Returns:
            A layer with the weight quantized and the same bias.

        Raises:
            OptionError: an option does not exist, or the module is not a linear layer.
            ShapeError: rows are not whole blocks of a format.
            StateError: the weight is on the meta device.
            NonFiniteError: the weight holds NaN or infinity.
        """
        options = {"quant_type": quant_type, "block_size": block_size}
        layer = cls.unquantized(linear, compute_dtype=compute_dtype, **options)
        layer.quantize_weight()
        return layer

    def quantize_weight(self, block_size: int | None = None) -> None:
        """Replace the weight by packed buffers.

        Args:
            block_size: elements that share a scale; None for what the layer was made with.

        Raises:
            StateError: the weight is quantized already, or on the meta device.
            NonFiniteError: the weight holds NaN or infinity.
            OptionError: the block size does not exist.
            ShapeError: rows are not whole blocks of a format.
        """
        if block_size is not None and not self.is_quantized:
            self.scheme = _fitting_scheme(self.quant_type, block_size, self.in_features)
        super().quantize_weight()

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer, quantized or not."""
        count = self.out_features * self.in_features
        if isinstance(self.scheme, Codebook):
            return {
                PACKED: ((self.scheme.packed_bytes(count),), torch.uint8),
                ABSMAX: ((self.scheme.blocks_of(count),), torch.float32),
                CODEBOOK: ((1 << self.scheme.bits,), torch.float32),
            }
        blocks = self.in_features // self.scheme.block
        columns = self.scheme.packed_columns(self.in_features)
        layout: BufferLayout = {
            PACKED: ((self.out_features, columns), torch.uint8),
            SCALE: ((self.out_features, blocks), self.scheme.scale.storage),
        }
        if self.scheme.has_global_scale:
            layout[GLOBAL] = ((1,), torch.float32)
        return layout

    def _load_problem(self, given: Mapping[str, Tensor]) -> str:
        problem = super()._load_problem(given)
        table = given.get(CODEBOOK)
        if not problem and isinstance(self.scheme, Codebook) and table is not None:
            if not table.is_meta and not table.equal(value_table(self.scheme, table.device)):
                problem = f"expected {CODEBOOK} to be {self.scheme.name}, got another table"
        return problem

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        state = quantize(weight, self.scheme.key)
        if isinstance(state, CodebookState):
            table = value_table(state.codebook, weight.device).clone()
            return {PACKED: state.qdata, ABSMAX: state.absmax, CODEBOOK: table}
        assert isinstance(state, QuantState)
        return {n: t for n, t in QuantizedLinear.buffers_of([state]).items() if t is not None}

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
        """Return codes, bits of the scales and the stored global scale, as operators take them."""
        return self.weight_packed, scale_bits(self.weight_scale), getattr(self, GLOBAL, None)

    def extra_repr(self) -> str:
        """Return the size and the options, for print(model)."""
        return self.described(f"quant_type={self.quant_type}, block_size={self.scheme.block}")


def scheme_of(quant_type: str, block_size: int | None) -> Format | Codebook:
    """Return the format or codebook of a quant_type. Raises OptionError if there is none."""
    if quant_type not in QUANT_TYPES:
        raise unknown_name("quant_type", quant_type, QUANT_TYPES)
    read = get_codebook if quant_type in CODEBOOKS else get_format
    return read(quant_type, "default" if block_size is None else block_size)


def _fitting_scheme(quant_type: str, block_size: int | None, in_features: int) -> Format | Codebook:
    """Return the format or codebook of a quant_type. Raises ShapeError for other rows."""
    scheme = scheme_of(quant_type, block_size)
    if isinstance(scheme, Format) and in_features % scheme.block:
        raise ShapeError(
            f"in_features={in_features} is not a multiple of {scheme.block} (the block of "
            f"{scheme.key}). Skip this layer, or choose quant_type='nf4', whose blocks take any "
            "width."
        )
    return scheme
