"""An nn.Linear that can be quantized: its weight is replaced by packed buffers."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

from ..core.machine import moved
from ..errors import OptionError, StateError, expected
from ..graph.match import is_conv1d
from ..nn.packed_linear import PackedLinear
from ..nn.packed_state import BufferLayout
from ..ops import FLOATS

Layer = TypeVar("Layer", bound="QuantizableLinear")


class QuantizableLinear(PackedLinear, nn.Linear, ABC):
    """An nn.Linear whose weight is replaced by packed buffers when it is quantized.

    Until then it is an nn.Linear, to be trained or loaded; loading a state dict with packed buffers
    quantizes it. Afterwards only the buffers are kept, and `weight` cannot be set.
    """

    is_quantized: bool = False
    # The dtype of `weight` when it is computed; set once the layer is quantized.
    weight_dtype: torch.dtype

    @abstractmethod
    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer, quantized or not."""

    @abstractmethod
    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the packed buffers of a weight [N, K]."""

    @abstractmethod
    def _decode(self, dtype: torch.dtype) -> Tensor:
        """Return the dense weight [N, K]."""

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] by the packed weight, transposed, and add the bias."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight [N, K]: the parameter, or computed from the packed buffers."""
        if self.is_quantized:
            return self._decode(self.weight_dtype)
        # As nn.Module does; nn.Linear's constructor has not made one yet when it asks.
        weight: Any = nn.Module.__getattr__(self, "weight")
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] of x [..., K], in the dtype of x or autocast's."""
        if not self.is_quantized:
            return super().forward(input)
        return self._multiply(self.checked_input(input))

    def quantize_weight(self) -> None:
        """Replace the weight by packed buffers.

        Raises:
            StateError: the weight is quantized already, or on the meta device.
            NonFiniteError: the weight holds NaN or infinity.
        """
        if self.is_quantized:
            raise StateError(
                f"Expected a dense weight, got {self}, which is quantized already. Make a new "
                "layer from a dense weight."
            )
        weight = self.weight
        if weight.is_meta:
            raise StateError(
                "Expected a weight with values, got one on the meta device. Load the weights "
                "first, or a state dict of a quantized layer."
            )
        # Inference tensors could neither be saved for a gradient nor be written to later.
        with torch.inference_mode(False), torch.no_grad():
            self._pack(self._encode(weight.detach()))

    def _pack(self, buffers: Mapping[str, Tensor]) -> None:
        """Replace the weight by these buffers."""
        self.weight_dtype = self.weight.dtype
        del self._parameters["weight"]
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.is_quantized = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move the buffers, and cast the dtype in which the weight is computed."""
        super()._apply(fn, recurse)
        if self.is_quantized:
            self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self

    def _load_problem(self, given: Mapping[str, Tensor]) -> str:
        """Return why packed buffers cannot be loaded; a dense layer needs all of them at once."""
        missing = [name for name in self.buffer_layout() if name not in given]
        if given and missing and not self.is_quantized:
            return f"expected {', '.join(missing)} beside {', '.join(given)}, got nothing"
        return super()._load_problem(given)

    def _make_room(self) -> None:
        if not self.is_quantized:
            device, layout = self.weight.device, self.buffer_layout().items()
            self._pack({n: torch.empty(s, dtype=t, device=device) for n, (s, t) in layout})

    def described(self, options: str) -> str:
        """Return the size, the options and whether the layer is quantized, for print(model)."""
        kept = "quantized" if self.is_quantized else "not quantized"
        return f"{nn.Linear.extra_repr(self)}, {options}, {kept}"

    @classmethod
    def unquantized(cls: type[Layer], linear: nn.Module, **options: Any) -> Layer:
        """Return an unquantized layer with the parameters of a linear layer, not copied."""
        weight: Any = getattr(linear, "weight", None)
        known = isinstance(linear, nn.Linear | PackedLinear) or is_conv1d(linear)
        if not known or not isinstance(weight, Tensor) or weight.ndim != 2:
            raise OptionError(f"Expected an nn.Linear, got {type(linear).__name__}.")
        if is_conv1d(linear):
            weight = weight.detach().t()
        rows, columns = weight.shape
        layer = cls(columns, rows, linear.bias is not None, device="meta", **options)
        parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        layer._parameters.update(weight=parameter, bias=linear._parameters.get("bias"))
        return layer.train(linear.training)


def require_sizes(in_features: object, out_features: object, device: Any, dtype: Any) -> None:
    """Raise OptionError for sizes below 1, and for a device or a dtype that a layer cannot have."""
    if dtype is not None and dtype not in FLOATS:
        raise OptionError(expected("dtype", f"one of {FLOATS}", repr(dtype)))
    if device is not None:
        moved(torch.empty(0), device)
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if not isinstance(size, SupportsIndex) or not operator.index(size) >= 1:
            raise OptionError(expected(name, "a whole number, at least 1", repr(size)))
