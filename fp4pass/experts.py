"""Mixtures of experts: their stacked weights, and the modules that compute with packed ones.

A stack is one parameter of a module of experts, [E, N, K] or, transposed, [E, K, N]. In a prepared
or converted model each stack has a module of its own, under the name of its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .config import LinearConfig
from .linear import (
    GLOBAL,
    INPUT_GLOBAL,
    PACKED,
    SCALE,
    PackedWeight,
    QuantizedLinear,
    quantize_input,
)
from .packed_linear import PackedLinear, become, scale_bits


def stack_names(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the two stacks of a module of experts, or None for any other module."""
    # What transformers.integrations.moe sets on modules whose products it can compute itself.
    known = vars(module)
    if "has_gate" not in known or "is_transposed" not in known:
        return None
    return ("gate_up_proj" if known["has_gate"] else "up_proj", "down_proj")


def routing_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [T, H], the experts and the weights [T, k] of a call of experts."""
    hidden, ids, weights = (*args, *kwargs.values())[:3]
    return hidden, ids, weights


class ExpertStack(nn.Module):
    """A stack in floating point. Its parameter is the owner's, which alone saves and moves it."""

    owner: Any  # the module of experts

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        # Not as a child: it is the parent.
        self.__dict__["owner"], self.name = owner, name
        self._parameters["weight"] = owner._parameters[name]

    @property
    def dense(self) -> Tensor:
        """The weights [E, N, K]."""
        weight: Tensor = self.owner._parameters[self.name]
        return weight.mT if self.owner.is_transposed else weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] with the experts ids [T, k]."""
        return ops.experts_dense(x, ids, self.dense, _bias(self.owner, self.name))

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertStack:
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class QuantizedExpertStack(PackedLinear):
    """A stack of packed weights, with the buffers of a QuantizedLinear for each expert.

    Its input may be quantized too, once for all experts.
    """

    packed_buffers = (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)
    packed_attributes = ("config", "weight_dtype", "transposed")

    config: LinearConfig
    transposed: bool  # the dense stack is [E, K, N]
    weight_dtype: torch.dtype
    weight_packed: Tensor  # uint8 [E, N, P]
    weight_scale: Tensor  # [E, N, K / block]
    weight_global_scale: Tensor | None  # float32 [E], as `QuantizedLinear` has it
    input_global_scale: Tensor | None  # float32 [1]

    @property
    def packed_weight(self) -> PackedWeight:
        """The buffers as the operators take them."""
        scale = scale_bits(self.weight_scale)
        return PackedWeight(
            self.weight_packed, scale, self.weight_global_scale, self.input_global_scale
        )

    @property
    def weight(self) -> Tensor:
        """The dense stack, dequantized to the dtype and shape that it had."""
        config = self.config
        dtype = torch.float32 if config.is_rotated else self.weight_dtype
        stored = self.stored_weight(dtype)
        if config.is_rotated:
            stored = torch.stack([config.restored(each) for each in stored]).to(self.weight_dtype)
        return stored.mT if self.transposed else stored

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for [E, N, K]."""
        packed, scale, global_scale, _ = self.packed_weight
        scales = [None] * len(packed) if global_scale is None else global_scale.split(1)
        key = self.config.format.key
        experts = zip(packed, scale, scales, strict=True)
        return torch.stack([ops.dequantize(*each, key, dtype) for each in experts])

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] and the experts ids [T, k]."""
        x, weight, config = self.checked_input(x), self.packed_weight, self.config
        stored = (weight.packed, weight.scale, weight.global_scale)
        key, rotation = config.format.key, config.input_rotation
        if config.weight_only:
            rotated = ops.rotate(x, rotation) if rotation else x
            return ops.experts_linear(rotated, ids, *stored, bias, key)
        # Once for all experts; of `rotated` the gradient is computed.
        quantized = quantize_input(x, weight, config)
        rotated = ops.rotate(x, rotation) if rotation and x.requires_grad else x
        return ops.experts_linear_quantized(rotated, *quantized, ids, *stored, bias, key)

    def extra_repr(self) -> str:
        """Return the sizes and how the stack is quantized, for print(model)."""
        return (
            f"experts={len(self.weight_packed)}, in_features={self.in_features}, "
            f"out_features={self.out_features}, {self.config.format.key}, "
            f"inputs: {self.config.inputs}"
        )


# What `convert` makes of linear layers and of stacks.
QUANTIZED = (QuantizedLinear, QuantizedExpertStack)


class QuantizedExperts(nn.Module):
    """The experts of a mixture, of which stacks are packed.

    It is the object that the model had, with its class swapped; `kind` is the class that it was,
    whose activation it computes.
    """

    kind: Any
    post_expert_norm: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weighted sums [T, H] of the chosen experts, as the class before did."""
        hidden, ids, weights = routing_of(args, kwargs)
        first, second = stack_names(self) or ("", "")
        h = activated(self, product(self, first, hidden, ids))
        y = product(self, second, h, ids)
        if getattr(self, "has_post_expert_norm", False):  # not in all tested versions
            y = self.post_expert_norm(y)
        return weighted_sum(y, ids, weights, hidden.dtype)


def product(owner: nn.Module, name: str, x: Tensor, ids: Tensor) -> Tensor:
    """Return the products [T, k, N] of x [T, K] or [T, k, K] with a stack that is a module."""
    stack: Any = owner._modules[name]
    return stack(x, ids) if isinstance(stack, ExpertStack) else stack(x, ids, _bias(owner, name))


def activated(owner: Any, h: Tensor) -> Tensor:
    """Return what the second stack reads [T, k, K] of the products with the first [T, k, N]."""
    kind = getattr(owner, "kind", type(owner))
    return kind._apply_gate(owner, h) if owner.has_gate else owner.act_fn(h)


def weighted_sum(y: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over k of y [T, k, H] times weights [T, k], in a dtype."""
    terms = y * weights.unsqueeze(-1)
    # One launch on a GPU, rounded once.
    return terms.sum(1, dtype=torch.float32).to(dtype) if y.is_cuda else in_order(terms, ids, dtype)


def in_order(terms: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over k of terms [T, k, H] as transformers' loop over experts adds them."""
    order = ids.argsort(-1).unsqueeze(-1).expand_as(terms)
    total = torch.zeros_like(terms[:, 0], dtype=dtype)
    for term in terms.to(dtype).gather(1, order).unbind(1):
        total = total + term
    return total


def _bias(owner: nn.Module, name: str) -> Tensor | None:
    """Return the biases [E, N] of a stack, if its owner has some."""
    return owner._parameters.get(f"{name}_bias")


def stacks_of(owner: nn.Module) -> dict[str, ExpertStack]:
    """Return the stacks of a module of experts in floating point, new ones if it has none yet."""
    found = {}
    for name in stack_names(owner) or ():
        parameter, known = owner._parameters.get(name), owner._modules.get(name)
        if parameter is not None and parameter.ndim == 3:
            found[name] = known if isinstance(known, ExpertStack) else ExpertStack(owner, name)
            found[name]._parameters["weight"] = parameter
    return found


def weight_name(name: str, module: nn.Module) -> str:
    """Return the name in a state dict of the dense weight of a layer or stack."""
    if isinstance(module, ExpertStack):
        return name
    return f"{name}.weight" if name else "weight"


def set_weight(module: nn.Module, weight: nn.Parameter) -> None:
    """Set the dense weight of a layer or stack."""
    if isinstance(module, ExpertStack):
        module.owner._parameters[module.name] = module._parameters["weight"] = weight
    else:
        module.weight = weight


def current_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the dense weight that a layer or stack has now, which loading may have replaced."""
    if isinstance(module, ExpertStack):
        module._parameters["weight"] = module.owner._parameters[module.name]
    return module._parameters["weight"]


def add_stack(stack: ExpertStack) -> None:
    """Make a stack a module of the model, so that hooks and names find it."""
    # Its name is that of the parameter, which the owner goes on to return for it.
    stack.owner._modules[stack.name] = stack


def settle_stacks(model: nn.Module) -> None:
    """Have just the stacks in floating point be modules that QuantizedExperts call."""
    for owner in model.modules():
        if isinstance(owner, QuantizedExperts):
            owner._modules.update(stacks_of(owner))
            # In one order, whatever was packed first.
            for name in stack_names(owner) or ():
                owner._modules[name] = owner._modules.pop(name)
        else:
            for name in [n for n, m in owner._modules.items() if isinstance(m, ExpertStack)]:
                del owner._modules[name]


def replace_stack(
    stack: ExpertStack, tensors: Mapping[str, Tensor | None], config: LinearConfig
) -> None:
    """Turn a stack into packed buffers, and its owner into QuantizedExperts, in place."""
    owner: Any = stack.owner
    packed: Any = tensors[PACKED]
    add_stack(stack)
    weight = owner._parameters.pop(stack.name)
    attributes = {
        "config": config,
        "out_features": packed.shape[1],
        "in_features": config.format.columns(packed.shape[2]),
        "weight_dtype": weight.dtype,
        "transposed": bool(owner.is_transposed),
    }
    del stack.__dict__["owner"]
    become(stack, QuantizedExpertStack, buffers=tensors, attributes=attributes)
    swap_class(owner)


def swap_class(owner: nn.Module) -> None:
    """Turn a module of experts into QuantizedExperts, which call their stacks."""
    if not isinstance(owner, QuantizedExperts):
        owner.__dict__["kind"] = type(owner)
        owner.__class__ = QuantizedExperts
    owner._modules.update(stacks_of(owner))


def restore_stacks(owner: QuantizedExperts, dtype: torch.dtype | None) -> None:
    """Turn experts back into the class that they were, with their rounded weights, in place."""
    parameters = owner._parameters
    for name in stack_names(owner) or ():
        stack = owner._modules.pop(name)
        if isinstance(stack, QuantizedExpertStack):
            weight = stack.weight.to(dtype or stack.weight_dtype).contiguous()
            parameters[name] = nn.Parameter(weight)
        # A stack is in front of its biases.
        for key in (name, f"{name}_bias"):
            if key in parameters:
                parameters[key] = parameters.pop(key)
    owner.__class__ = owner.__dict__.pop("kind")
