"""Quantized layers that learn: latents in place of packed codes, rounded at each call."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import ops
from ...errors import OptionError, ShapeError, StateError, expected
from ...kernels.experts.naive import chosen, of_expert
from ...nn.experts import QUANTIZED, QuantizedExpertStack, quantize_pairs, weight_name
from ...nn.linear import (
    GLOBAL,
    INPUT_GLOBAL,
    PACKED,
    SCALE,
    PackedBlocks,
    QuantizedLinear,
    StoredWeight,
    quantize_input,
)
from ...nn.packed_linear import scale_bits, swap_class
from .latent import codes_of, latent_weight, round_latent, search_again, steps_of

# The parameter that is learned.
LATENT = "latent"

# The latents of packed codes, which several layers may share.
Latents = dict[Tensor, nn.Parameter]

# The packed codes of latents.
Codes = dict[nn.Parameter, Tensor]

# Of a quantized layer, beside its buffers.
_SIZES = ("in_features", "out_features")


class _RoundInput(torch.autograd.Function):
    """Return the rounded input; its gradient counts as that of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Trainable(PackedBlocks):
    """A layer with latents in place of its packed codes, and the buffers that it had beside."""

    # Latents move as bytes, too: no cast of the model rounds them.
    packed_buffers = (LATENT, SCALE, GLOBAL, INPUT_GLOBAL)
    # The class that it was, and is again.
    packed_class: ClassVar[type[PackedBlocks]]

    latent: nn.Parameter  # float32 [N, K] or [E, N, K], in cells (`fp4pass.lab.learning.latent`)

    @property
    def stored_scales(self) -> StoredWeight:
        """The buffers beside the codes, as operators take them."""
        known = self._buffers
        return StoredWeight(None, scale_bits(self.weight_scale), known[GLOBAL], known[INPUT_GLOBAL])

    def stored_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in a state dict of buffers that FSDP may have as other bytes."""
        return {SCALE: self.config.format.scale.storage}

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes that the latents round to, with their gradient."""
        fmt = self.config.format
        return round_latent(self.latent, steps_of(self.stored_scales, fmt), fmt, dtype)

    def packed_codes(self) -> Tensor:
        """Return the packed codes that the latents round to: uint8 [..., N, P]."""
        return codes_of(self.latent.detach(), self.config.format.element)

    def search_scales(self, block_hessian: Tensor | None = None) -> None:
        """Search the block scales again for the values of the latents (`search_again`).

        Layers that share the latents need `share_scales` then.
        """
        fmt = self.config.format
        scale = search_again(self.latent, self.stored_scales, fmt, block_hessian)
        self._buffers[SCALE] = scale.view(fmt.scale.storage)

    def share_scales(self, other: _Trainable) -> None:
        """Take the block scales of a layer that has the same latents."""
        self._buffers[SCALE] = other._buffers[SCALE]

    def rotated_input(self, x: Tensor) -> Tensor:
        """Return a checked input as the rounding gets it."""
        rotation = self.config.input_rotation
        return ops.rotate(x, rotation) if rotation else x


class TrainableLinear(_Trainable):
    """A quantized linear layer that learns its codes.

    The forward rounds weight and input as the quantized layer does; both roundings count as the
    identity in the backward. `make_trainable` makes one, `freeze` a quantized layer of it.
    """

    packed_attributes: ClassVar[tuple[str, ...]] = QuantizedLinear.packed_attributes
    packed_class = QuantizedLinear

    transposed: bool  # the dense weight is [K, N]
    bias: Tensor | None  # [N]

    as_parameter = QuantizedLinear.as_parameter
    from_parameter = QuantizedLinear.from_parameter

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] for x [..., K], both rounded, in x's dtype."""
        x = self.checked_input(input)
        dtype = _product_dtype(x)
        rows = self.rotated_input(x)
        if not self.config.weight_only:
            rows = _RoundInput.apply(rows, self._rounded(x))
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(rows.to(dtype), self.stored_weight(dtype), bias).to(x.dtype)

    @torch.no_grad()
    def _rounded(self, x: Tensor) -> Tensor:
        """Return a checked input, rotated and rounded."""
        codes, scale, number = quantize_input(x, self.stored_scales, self.config)
        return ops.dequantize(codes, scale, number, self.config.format.key, x.dtype)

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized, for print(model)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.config.label}"
        )


class TrainableExperts(_Trainable):
    """A quantized stack of experts that learns its codes."""

    packed_attributes: ClassVar[tuple[str, ...]] = QuantizedExpertStack.packed_attributes
    packed_class = QuantizedExpertStack

    view: Any  # of the dense stack

    stacked = staticmethod(QuantizedExpertStack.stacked)
    unstacked = staticmethod(QuantizedExpertStack.unstacked)
    as_parameter = QuantizedExpertStack.as_parameter
    from_parameter = QuantizedExpertStack.from_parameter

    @property
    def transposed(self) -> bool:
        """Whether the dense stack has [K, N] for each expert."""
        return self.view.transposed

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] and the experts ids [T, k]."""
        x = self.checked_input(x)
        dtype = _product_dtype(x)
        rows = self.rotated_input(x)
        if not self.config.weight_only:
            rounded = self._rounded(x, ids)
            rows = rows.unsqueeze(1).expand_as(rounded) if rounded.ndim > rows.ndim else rows
            rows = _RoundInput.apply(rows, rounded)
        bias = None if bias is None else bias.to(dtype)
        return ops.experts_dense(rows.to(dtype), ids, self.stored_weight(dtype), bias).to(x.dtype)

    @torch.no_grad()
    def _rounded(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return rounded inputs: [T, k, K] where each expert has a global scale."""
        key = self.config.format.key
        codes, scale, number = quantize_pairs(x, ids, self.stored_scales, self.config)
        if number is None or len(number) == 1:
            return ops.dequantize(codes, scale, number, key, x.dtype)
        found = x.new_zeros((*ids.shape, self.in_features))
        for index, pairs in chosen(ids, len(number)):
            own = (codes[pairs], scale[pairs], of_expert(number, index))
            found[pairs] = ops.dequantize(*own, key, x.dtype)
        return found

    def extra_repr(self) -> str:
        """Return the sizes and how the stack is quantized, for print(model)."""
        return (
            f"experts={len(self.weight_scale)}, in_features={self.in_features}, "
            f"out_features={self.out_features}, {self.config.label}"
        )


# The classes that `make_trainable` makes of quantized layers.
TRAINABLE = (TrainableLinear, TrainableExperts)


def make_trainable(
    module: nn.Module,
    float_weight: Tensor,
    *,
    share: float = 0.5,
    latents: Latents | None = None,
) -> TrainableLinear | TrainableExperts:
    """Give a quantized linear layer, or a stack of experts, latents to learn, in place.

    It stays the same object and computes the same numbers, up to the rounding of products. Its new
    parameter `latent` is float32, whatever the dtype of the model, and in cells: a step of 1
    changes the code by one.

    Args:
        module: a QuantizedLinear or QuantizedExpertStack.
        float_weight: its weight before it was quantized, in the shape that the layer had.
        share: how far latents begin on the way from the values of their codes to the float weight.
        latents: those of layers before, by the packed codes that layers share; it grows.

    Raises:
        StateError: the module is not quantized, or a part of it is in another process.
        ShapeError: the weight has another shape.
    """
    if not isinstance(module, QUANTIZED):
        raise StateError(expected("make_trainable: module", "a quantized layer", module))
    if module.is_split:
        raise StateError(f"{module}: it is split over processes. Learn on the whole model.")
    if PACKED not in module._buffers:
        raise StateError(f"{module}: its codes are sharded over processes. Learn on whole ones.")
    known: Latents = {} if latents is None else latents
    stored, config = module.packed_weight, module.config
    key = module.weight_packed
    if key not in known:
        target = _stored_target(module, float_weight.detach().to(stored.scale.device))
        steps = steps_of(stored, config.format)
        found = latent_weight(stored.packed, steps, target, config.format, share)
        known[key] = nn.Parameter(found)
    kind = TrainableLinear if isinstance(module, QuantizedLinear) else TrainableExperts
    names = (*kind.packed_attributes, *_SIZES)
    attributes = {name: getattr(module, name) for name in names}
    buffers = {name: module._buffers[name] for name in (SCALE, GLOBAL, INPUT_GLOBAL)}
    swap_class(module, kind, buffers=buffers, attributes=attributes)
    module.register_parameter(LATENT, known[key])
    trained: Any = module
    return trained


def freeze(module: nn.Module, *, codes: Codes | None = None) -> None:
    """Pack the codes that the latents of a layer round to, in place: it is quantized again.

    Args:
        module: from `make_trainable`.
        codes: those of layers before, by the latents that layers share; it grows.

    Raises:
        StateError: the module has no latents.
    """
    if not isinstance(module, TRAINABLE):
        raise StateError(expected("freeze: module", "a layer of make_trainable", module))
    known: Codes = {} if codes is None else codes
    key = module.latent
    if key not in known:
        known[key] = module.packed_codes()
    names = (*module.packed_attributes, *_SIZES)
    attributes = {name: getattr(module, name) for name in names}
    buffers = {name: module._buffers[name] for name in (SCALE, GLOBAL, INPUT_GLOBAL)}
    swap_class(
        module, module.packed_class, buffers={PACKED: known[key], **buffers}, attributes=attributes
    )


def original_weight(original: nn.Module, name: str, module: PackedBlocks) -> Tensor:
    """Return the float weight of a quantized layer, by its name in the model it was converted from.

    Raises:
        StateError: the original has no such weight, or it has no values.
        OptionError: the layer has float32 scales.
    """
    if module.config.format.has_float_scale:
        raise OptionError(
            f"{name}: layers in {module.config.format.key} do not learn: the scales that learning "
            "takes as they are have 8 bits. Convert the model with another scheme for this layer, "
            "or learn before it is converted to this one."
        )
    place = weight_name(name, module)
    try:
        weight = original.get_parameter(place)
    except AttributeError:
        raise StateError(
            f"original: expected the float model with a parameter {place}, got "
            f"{type(original).__name__} without it. Give the model that was converted."
        ) from None
    if weight.is_meta:
        raise StateError(f"original: {place} is on the meta device, without values. Load it.")
    return weight.detach()


def _stored_target(module: PackedBlocks, weight: Tensor) -> Tensor:
    """Return a float weight as the layer stores it, float32 [..., N, K]."""
    rows = module.packed_weight.packed.shape[:-1]
    wanted = module.as_parameter(torch.empty((*rows, module.in_features), device="meta")).shape
    if weight.shape != wanted:
        got = f"shape {tuple(weight.shape)}"
        raise ShapeError(expected(f"{module}: the float weight", f"shape {tuple(wanted)}", got))
    matrices = module.unstacked(module.from_parameter(weight))
    return module.stacked([module.config.stored(each).float() for each in matrices])


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products: weights times their global scale may not fit float16."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype
