"""A layer whose codes, norms and biases are learned: latents behind straight-through rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import ops
from ..core.packing import pack_codes
from ..experts import QUANTIZED, QuantizedExpertStack
from ..kernels.common.rounding import (
    global_multiplier,
    round_to_codes_,
    round_to_values_,
    scale_values,
)
from ..linear import PACKED, SCALE, PackedBlocks, QuantizedLinear, needs_dynamic_scale

# What is learned: buffers and parameters by the module that has them and their names.
Values = dict[tuple[nn.Module, str], Tensor]


class StraightThrough(torch.autograd.Function):
    """Values in place of x, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as that of x."""
        return grads[0], None


class Latent:
    """A packed weight, or a stack of them, as numbers that round to its codes.

    Attributes:
        value: float32 [..., N, K / block, block], in units of the scales that the weight began
            with, which its codes are at first.
    """

    def __init__(self, module: PackedBlocks) -> None:
        stored, self._fmt = module.packed_weight, module.config.format
        self._factor: Tensor | float = 1.0
        if stored.global_scale is not None:
            factor = global_multiplier(stored.global_scale, self._fmt)
            self._factor = factor.view(-1, *[1] * (stored.scale.ndim - 1)).squeeze(0)
        self._scale = stored.scale  # uint8 [..., N, K / block]
        self._unit = self._step = self._steps()
        dense: Any = module
        codes = dense.stored_weight(torch.float32).view(*self._scale.shape, -1) / self._unit
        self.value = codes.requires_grad_()

    def _steps(self) -> Tensor:
        """Return what codes are multiplied by [..., N, K / block, 1]."""
        return scale_values(self._scale, self._fmt.scale).mul(self._factor).unsqueeze(-1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for [..., N, K], with the gradient of the latent."""
        weight = self.value * self._unit
        with torch.no_grad():
            values = round_to_values_(weight / self._step, self._fmt.element) * self._step
        dense: Tensor = StraightThrough.apply(weight, values)
        return dense.flatten(-2).to(dtype)

    @torch.no_grad()
    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the packed codes [..., N, P] and the bits of the block scales."""
        codes = round_to_codes_(self.value * self._unit / self._step, self._fmt.element)
        return pack_codes(codes.flatten(-2), self._fmt.element.bits), self._scale


class LearnedLayer:
    """A layer of a stack that computes with latents in place of packed weights."""

    def __init__(self, layer: nn.Module, shared: frozenset[int], small: bool) -> None:
        """shared: ids of tensors that other layers have too; small: norms and biases learn."""
        self.layer = layer
        self._latents: dict[nn.Module, Latent] = {}
        by_weight: dict[int, Latent] = {}
        for module in layer.modules():
            if isinstance(module, QUANTIZED) and id(module.weight_packed) not in shared:
                key = id(module.weight_packed)
                by_weight[key] = self._latents[module] = by_weight.get(key) or Latent(module)
        self.weights = [latent.value for latent in by_weight.values()]
        found = {
            name: parameter
            for name, parameter in layer.named_parameters()
            if small and parameter.ndim == 1 and id(parameter) not in shared
        }
        self._small = {
            name: each.detach().float().clone().requires_grad_() for name, each in found.items()
        }
        self._parameters = found

    @property
    def small(self) -> list[Tensor]:
        """The norms and biases, float32."""
        return list(self._small.values())

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Have the layer compute with the latents, in the dtype that it has."""
        with ExitStack() as undo:
            for module, latent in self._latents.items():
                before = module.__dict__.get("forward")
                module.__dict__["forward"] = _forward_of(module, latent)
                undo.callback(_restore, module, before)
            yield

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer with the norms and biases as they are learned."""
        small = {name: each.to(self._parameters[name].dtype) for name, each in self._small.items()}
        return functional_call(self.layer, small, tuple(args), dict(kwargs))

    @torch.no_grad()
    def learned(self) -> Values:
        """Return what was learned, as the layer stores it."""
        found: Values = {}
        packed: dict[Latent, tuple[Tensor, Tensor]] = {}
        for module, latent in self._latents.items():
            codes, scale = packed.setdefault(latent, latent.packed())
            buffer: Any = module._buffers[SCALE]
            found[module, PACKED], found[module, SCALE] = codes, scale.view(buffer.dtype)
        for name, each in self._small.items():
            path, _, last = name.rpartition(".")
            found[self.layer.get_submodule(path), last] = each.to(self._parameters[name].dtype)
        return found


def put(values: Values) -> Values:
    """Put buffers, and values of parameters, into their modules; return what was there."""
    before: Values = {}
    for (module, name), value in values.items():
        if name in module._parameters:
            parameter = module.get_parameter(name).detach()
            before[module, name] = parameter.clone()
            parameter.copy_(value)
        else:
            before[module, name] = module.get_buffer(name)
            module._buffers[name] = value
    return before


def _restore(module: nn.Module, forward: Any) -> None:
    del module.__dict__["forward"]
    if forward is not None:
        module.__dict__["forward"] = forward


def _forward_of(module: Any, latent: Latent) -> Any:
    """Return the forward of a quantized layer with a latent in place of its packed weight."""

    def linear(input: Tensor) -> Tensor:
        x = _seen(module, module.checked_input(input))
        dtype = _dtype_of(x)
        bias = None if module.bias is None else module.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), latent.dense(dtype), bias).to(x.dtype)

    def stack(x: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        x = _seen(module, module.checked_input(x))
        dtype = _dtype_of(x)
        bias = None if bias is None else bias.to(dtype)
        return ops.experts_dense(x.to(dtype), ids, latent.dense(dtype), bias).to(x.dtype)

    return stack if isinstance(module, QuantizedExpertStack) else linear


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype of products: weights times their global scale may not fit float16."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _seen(module: QuantizedLinear | QuantizedExpertStack, x: Tensor) -> Tensor:
    """Return an input as the products see it: rotated and rounded, with a gradient."""
    config, weight = module.config, module.packed_weight
    if config.input_rotation:
        x = ops.rotate(x, config.input_rotation)
    if config.weight_only:
        return x
    with torch.no_grad():
        key, global_scale = config.format.key, weight.input_global_scale
        if needs_dynamic_scale(weight, config):
            global_scale = ops.dynamic_global_scale(x, key)
        rows = x.reshape(-1, x.shape[-1])
        packed, scale = ops.quantize(rows, global_scale, key, config.activation_scales)
        values = ops.dequantize(packed, scale, global_scale, key, x.dtype).view(x.shape)
    rounded: Tensor = StraightThrough.apply(x, values)
    return rounded
