"""The quantized linear layer: its computation as a function, and the module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..core.quant_state import QuantState
from ..kernels.compute_fp8.naive import COMPUTES
from ..record.config import LinearConfig
from .input_cache import compute_once
from .packed_linear import PackedLinear, code_bits, scale_bits, swap_class

# The names of compressed-tensors for the buffers that replace a parameter `weight`.
PACKED, SCALE = "weight_packed", "weight_scale"
GLOBAL, INPUT_GLOBAL = "weight_global_scale", "input_global_scale"

# Their names in words.
KINDS = {
    PACKED: "packed codes",
    SCALE: "block scales",
    GLOBAL: "global scales",
    INPUT_GLOBAL: "global scales of inputs",
}


class StoredWeight(NamedTuple):
    """The tensors of a packed weight and of its input, as a linear layer has them."""

    packed: Any  # uint8 [N, P], packed codes
    scale: Any  # scale_shape(N, K), uint8 for the bits of 8-bit scales, else float32
    global_scale: Any  # float32 [1] as it is stored, or None
    input_global_scale: Any  # the same for the input; of float32 scales the one of all inputs


# Returns the result of a function, which layers that read one input share under a name.
ShareFn = Callable[[str, Callable[[], Any]], Any]


def _compute(name: str, compute: Callable[[], Any]) -> Any:
    return compute()


def needs_dynamic_scale(weight: StoredWeight, config: LinearConfig) -> bool:
    """Return whether each input gets a global scale by its own amax."""
    fmt = config.input_format
    return fmt is not None and fmt.has_global_scale and weight.input_global_scale is None


def quantize_input(x: Any, weight: StoredWeight, config: LinearConfig) -> tuple[Any, Any, Any]:
    """Return packed codes [..., P], scales [..., J] and global scale of an input or its proxy."""
    # The global scale is that of calibration if there is one; a float32 scale is in the scales.
    fmt, rotation = config.input_format, config.input_rotation
    assert fmt is not None, "the input is quantized"
    key, global_scale = fmt.key, weight.input_global_scale
    if needs_dynamic_scale(weight, config):
        global_scale = ops.dynamic_global_scale(ops.rotate(x, rotation) if rotation else x, key)
    if rotation:
        packed, scale = ops.rotate_quantize(
            x, rotation, global_scale, key, config.activation_scales
        )
    else:
        packed, scale = ops.quantize(x, global_scale, key, config.activation_scales)
    return packed, scale, global_scale if fmt.has_global_scale else None


def quantized_linear(
    x: Any, weight: StoredWeight, bias: Any, config: LinearConfig, share: ShareFn = _compute
) -> Any:
    """Compute a linear layer with a packed weight: x W^T + bias, [..., N] in the dtype of x."""
    # This is the one definition: modules run it, and graph passes trace it with a proxy as x [...,
    # K]. Results that layers with the same x may share go through `share`, as "rotate" or
    # "quantize".
    stored = (weight.packed, weight.scale, weight.global_scale)
    key, rotation = config.format.key, config.input_rotation
    if config.input_format is None:
        rotated = share("rotate", lambda: ops.rotate(x, rotation)) if rotation else x
        return ops.call(ops.linear, rotated, *stored, bias, key, config.compute)
    packed, scale, global_scale = share("quantize", lambda: quantize_input(x, weight, config))
    activations = (x, packed, scale, global_scale)
    options = (rotation, config.compute, *filter(None, [config.inputs]))
    return ops.call(ops.linear_quantized, *activations, *stored, bias, key, *options)


# Forwards call functions, and methods by the name of their class. Of a layer's own methods
# torch.compile checks at every call where they come from.


def read_buffers(layer: PackedBlocks) -> StoredWeight:
    """Return the buffers of a layer as the operators take them."""
    # Asking the module for each takes as long as a small product.
    known = layer._buffers
    if PACKED not in known:
        known = {**known, **layer._parameters}
    packed: Any = known[PACKED]
    scale: Any = known[SCALE]
    packed = packed if packed.dtype == torch.uint8 else code_bits(packed)
    if scale.dtype != torch.uint8:
        scale = scale_bits(scale, layer.config.format.scale.storage)
    return StoredWeight(packed, scale, known.get(GLOBAL), known.get(INPUT_GLOBAL))


def output_of(
    layer: QuantizedLinear, input: Tensor, x: Tensor, weight: StoredWeight, bias: Tensor | None
) -> Tensor:
    """Return x W^T + bias; layers that read the same `input` share what they make of it."""
    config = layer.config

    def share(name: str, compute: Callable[[], Any]) -> Any:
        if name == "rotate" and x.requires_grad and torch.is_grad_enabled():
            return compute()
        scale = weight.input_global_scale
        is_dynamic = needs_dynamic_scale(weight, config)
        key = (name, *config.input_key, is_dynamic, x.dtype)
        return compute_once(input, key, layer, compute, scale)

    y: Tensor = quantized_linear(x, weight, bias, config, share)
    return y


class PackedBlocks(PackedLinear, ABC):
    """A module with packed blocks and their scales, in buffers with names of compressed-tensors."""

    packed_buffers = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)
    shared_buffers = (INPUT_GLOBAL,)
    # The choices of `LinearConfig.compute` that its products have.
    computes: ClassVar[tuple[str, ...]] = COMPUTES

    config: LinearConfig
    weight_dtype: torch.dtype  # of the dense weight
    weight_packed: Tensor  # uint8 [N, P]
    weight_scale: Tensor  # scale_shape(N, K) in the dtype of the scale
    # float32 [1]: 1 / global_scale, or global_scale itself where `config.multiplies`; None for
    # formats without one. That of the input is None unless calibrated. Where scales are float32
    # it is the scale of all inputs, which multiplies.
    weight_global_scale: Tensor | None
    input_global_scale: Tensor | None

    @property
    def packed_weight(self) -> StoredWeight:
        """The buffers as the operators take them."""
        return read_buffers(self)

    def stored_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in a state dict of buffers that FSDP may have as other bytes."""
        return {PACKED: torch.uint8, SCALE: self.config.format.scale.storage}

    @property
    def weight(self) -> Tensor:
        """The dense weight in the dtype and shape that the layer had, a new tensor each time."""
        return self.weight_as(self.weight_dtype)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the dense weight in a dtype, rounded once."""
        if not self.config.is_rotated:
            return self.as_parameter(self.stored_weight(dtype))
        stored = self.unstacked(self.stored_weight(torch.float32))
        restored = self.stacked(list(map(self.config.restored, stored)))
        return self.as_parameter(restored.to(dtype))

    @abstractmethod
    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes: the weight as `LinearConfig.stored` has it."""

    @abstractmethod
    def as_parameter(self, stored: Tensor) -> Tensor:
        """Return such a weight in the shape that the layer had."""

    @abstractmethod
    def from_parameter(self, weight: Tensor) -> Tensor:
        """Return a weight in that shape as it was before."""

    @staticmethod
    def stacked(parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor that holds those of each matrix of a stack."""
        (part,) = parts
        return part

    @staticmethod
    def unstacked(tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of each matrix of a stack."""
        return (tensor,)

    @classmethod
    def take(
        cls,
        module: nn.Module,
        tensors: Mapping[str, Tensor | None],
        config: LinearConfig,
        weight_dtype: torch.dtype,
        **own: Any,
    ) -> None:
        """Give a module with a dense weight this class and buffers (`buffers_of`), in place."""
        packed: Any = tensors[PACKED]
        sizes = {
            "out_features": packed.shape[-2],
            "in_features": config.format.columns(packed.shape[-1]),
        }
        attributes = {"config": config, "weight_dtype": weight_dtype, **sizes, **own}
        swap_class(module, cls, buffers=tensors, attributes=attributes)

    @classmethod
    def buffers_of(
        cls, states: Sequence[QuantState], input_scales: Sequence[float] = ()
    ) -> dict[str, Tensor | None]:
        """Return the buffers of a quantized weight, given the matrices of its stack."""
        # input_scales: that of its input as it is stored, or those of each expert.
        fmt, device = states[0].format, states[0].qdata.device

        def stored(numbers: Sequence[float]) -> Tensor | None:
            return torch.tensor(numbers, dtype=torch.float32, device=device) if numbers else None

        global_scales = [fmt.global_scale_of(state.global_scale) for state in states]

        return {
            PACKED: cls.stacked([state.qdata for state in states]),
            SCALE: cls.stacked([state.scale for state in states]).view(fmt.scale.storage),
            GLOBAL: stored(global_scales if fmt.has_global_scale else []),
            INPUT_GLOBAL: stored(input_scales),
        }


class QuantizedLinear(PackedBlocks):
    """A linear layer whose weight is packed blocks; its input may be quantized too."""

    # It is the object that was an nn.Linear (or transformers' Conv1D, then `transposed`), with its
    # class swapped. Its buffers have the names of compressed-tensors.

    packed_attributes: ClassVar[tuple[str, ...]] = ("config", "weight_dtype", "transposed")

    transposed: bool  # the dense weight is [K, N]
    bias: Tensor | None  # [N]

    def as_parameter(self, stored: Tensor) -> Tensor:
        """Return a weight [N, K] in the shape that the layer had."""
        return stored.t() if self.transposed else stored

    def from_parameter(self, weight: Tensor) -> Tensor:
        """Return a weight in the shape that the layer had as [N, K]."""
        return weight.t() if self.transposed else weight

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes [N, K]."""
        packed, scale, global_scale, _ = self.packed_weight
        return ops.dequantize(packed, scale, global_scale, self.config.format.key, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] for x [..., K], in x's dtype or in autocast's."""
        x = PackedLinear.checked_input(self, input)
        return output_of(self, input, x, read_buffers(self), self.bias)

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized, for print(model)."""
        folded = " folded" if self.config.folded else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.config.label}{folded}"
        )
