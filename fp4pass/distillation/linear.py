"""The linear layer that is trained: a float weight, rounded at each call as it will be stored."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..core.formats import Format
from ..core.packing import pack_codes
from ..kernels.common.rounding import round_to_codes_, round_to_values_, scale_values
from ..linear import GLOBAL, INPUT_GLOBAL, SCALE, PackedBlocks, PackedWeight, quantize_input
from ..packed_linear import scale_bits


class _RoundWeight(torch.autograd.Function):
    """Round a weight in the steps of its blocks; the gradient is that of the rounded weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, step: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        quotient = weight.unflatten(-1, (-1, fmt.block)).float() / step.unsqueeze(-1)
        rounded = round_to_values_(quotient, fmt.element).mul_(step.unsqueeze(-1))
        return rounded.flatten(-2).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None, None, None


class _RoundInput(torch.autograd.Function):
    """Return what an input was rounded to; the gradient is that of the rounded input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class TrainableLinear(PackedBlocks):
    """A quantized linear layer that has a float weight to train, rounded at each call.

    `weight` [N, K] is what the layer would store unrounded: rotated if the layer is. The forward
    rounds it in the block scales that the layer has, and its input as it will be rounded; both
    count as the identity in the backward.
    """

    packed_buffers: ClassVar[tuple[str, ...]] = (SCALE, GLOBAL, INPUT_GLOBAL)
    packed_attributes: ClassVar[tuple[str, ...]] = ("config", "weight_dtype", "transposed")

    transposed: bool  # the dense weight of the layer is [K, N]
    weight: nn.Parameter
    bias: Tensor | None

    # PackedLinear refuses a dense weight.
    __setattr__ = nn.Module.__setattr__
    _load_from_state_dict = nn.Module._load_from_state_dict
    _save_to_state_dict = nn.Module._save_to_state_dict

    def steps(self) -> Tensor:
        """Return the block scales times the global scale: float32 [N, K / block]."""
        return steps_of(scale_bits(self.weight_scale), self.weight_global_scale, self.config.format)

    def packed_codes(self) -> Tensor:
        """Return the packed codes that the weight rounds to."""
        fmt = self.config.format
        quotient = self.weight.detach().unflatten(-1, (-1, fmt.block)).float()
        codes = round_to_codes_(quotient / self.steps().unsqueeze(-1), fmt.element)
        return pack_codes(codes.flatten(-2), fmt.element.bits)

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] for x [..., K], both rounded."""
        x, config = self.checked_input(input), self.config
        rotated = ops.rotate(x, config.input_rotation) if config.input_rotation else x
        if not config.weight_only:
            stored = PackedWeight(None, None, None, self.input_global_scale)
            key = config.format.key
            with torch.no_grad():
                rounded = ops.dequantize(*quantize_input(x, stored, config), key, x.dtype)
            rotated = _RoundInput.apply(rotated, rounded)
        weight = _RoundWeight.apply(self.weight, self.steps(), config.format, x.dtype)
        return F.linear(rotated, weight, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized, for print(model)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.config.format.key}, inputs: {self.config.inputs}"
        )


def steps_of(scale: Tensor, global_scale: Tensor | None, fmt: Format) -> Tensor:
    """Return the block scales times the stored global scale, as `dequantize` has them."""
    step = scale_values(scale, fmt.scale)
    if global_scale is None:
        return step
    return step * global_scale if fmt.multiplies else step / global_scale
