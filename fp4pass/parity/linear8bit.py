"""Linear8bitLt: a linear layer in 8-bit integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, OptionError, ShapeError, expected
from ..nn.linear import SCALE
from ..nn.packed_state import BufferLayout
from .int8_reference import MAX_COLUMNS, dequantize_rows_ref, quantize_rows_ref
from .layer import QuantizableLinear, require_sizes
from .operators import linear_int8

# A buffer that a QuantizedLinear does not have.
CODES = "weight_codes"


class Linear8bitLt(QuantizableLinear):
    """A linear layer in 8-bit integers: rows of x and W are rounded, their products summed exactly.

    Its buffers are `weight_codes` int8 [N, K] and `weight_scale` float32 [N], the largest magnitude
    of a row divided by 127.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias.
        threshold: columns of x with a magnitude of at least this are outliers, multiplied in x's
            dtype by the dequantized columns of W; 0 for none. All rows of a call decide about a
            column, so the rows of a batch depend on each other.
        device: where the dense weight is made.
        dtype: the dtype of the dense weight.

    Raises:
        OptionError: the threshold is negative.
        ShapeError: rows are so long that their sums may exceed int32.

    Example:
        >>> layer = fp4pass.parity.Linear8bitLt.from_linear(model[0])
        >>> layer(batches[0]).shape
        torch.Size([4, 64])
    """

    packed_buffers = (CODES, SCALE)
    packed_attributes = ("threshold", "is_quantized", "weight_dtype")

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
        require_sizes(in_features, out_features, device, dtype)
        if not isinstance(threshold, int | float) or threshold is True or not threshold >= 0.0:
            raise OptionError(expected("threshold", "0 (no outliers) or more", repr(threshold)))
        if in_features > MAX_COLUMNS:
            raise ShapeError(
                f"in_features: expected at most {MAX_COLUMNS}, as many products of 8-bit codes as "
                f"int32 can sum, got {in_features}. Use Linear4bit for this layer."
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.threshold = float(threshold)

    @classmethod
    def from_linear(cls, linear: nn.Module, threshold: float = 6.0) -> Linear8bitLt:
        """Make a quantized layer from a linear layer.

        Args:
            linear: an nn.Linear, a packed linear layer or transformers' Conv1D.
            threshold: as in Linear8bitLt.

        Returns:
            A layer with the weight quantized and the same bias.

        Raises:
            OptionError: the threshold is negative, or the module is not a linear layer.
            ShapeError: rows are so long that their sums may exceed int32.
            StateError: the weight is on the meta device.
            NonFiniteError: the weight holds NaN or infinity.
        """
        layer = cls.unquantized(linear, threshold=threshold)
        layer.quantize_weight()
        return layer

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer, quantized or not."""
        shape = (self.out_features, self.in_features)
        return {CODES: (shape, torch.int8), SCALE: (shape[:1], torch.float32)}

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        # Some rows at a time, because they are cast to float32.
        parts = [quantize_rows_ref(rows) for rows in weight.split(4096)]
        codes, scale = (torch.cat(part) for part in zip(*parts, strict=True))
        if not scale.isfinite().all():
            raise NonFiniteError("The weight holds NaN or infinity. Repair it before the call.")
        return {CODES: codes, SCALE: scale}

    def _decode(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows_ref(self.weight_codes, self.weight_scale, dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        return linear_int8(x, self.weight_codes, self.weight_scale, self.bias, self.threshold)

    def extra_repr(self) -> str:
        """Return the size and the options, for print(model)."""
        return self.described(f"threshold={self.threshold}")
