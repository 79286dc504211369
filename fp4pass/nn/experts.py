"""Mixtures of experts: their stacked weights, and the modules that compute with packed ones.

A stack is one parameter of a module of experts, [E, N, K] or as its adapter says. In a prepared or
converted model each stack has a module of its own, under the name of its parameter.

A packed stack keeps global scales as [E], or as [E, R] where the R parts of an expert's rows (gate
and up) have one each; those of inputs as [1] for all experts, or [E].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import ops
from .._compat.transformers import is_split_by_plan
from .._compat.transformers_experts import ExpertsAdapter, StackView, adapter_of
from ..errors import StateError
from ..record.config import LinearConfig
from .linear import PackedBlocks, QuantizedLinear, StoredWeight, quantize_input
from .packed_linear import swap_class


def parts_of(weight: StoredWeight) -> int:
    """Return R, the parts of an expert's rows that have a global scale each."""
    scale = weight.global_scale
    return 1 if scale is None or scale.ndim == 1 else int(scale.shape[1])


def cut_rows(weight: StoredWeight) -> StoredWeight:
    """Return a stack [E, N, K] as one of E * R matrices [N / R, K], with one global scale each."""
    parts = parts_of(weight)
    if parts == 1:
        return weight
    inputs = weight.input_global_scale
    if inputs is not None and len(inputs) > 1:
        inputs = inputs.repeat_interleave(parts)
    codes, bits = (_cut_rows(each, parts) for each in (weight.packed, weight.scale))
    return StoredWeight(codes, bits, weight.global_scale.flatten(), inputs)


def cut_pairs(
    x: Tensor, ids: Tensor, bias: Tensor | None, parts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs, ids [T, k * R] and biases [E * R, N / R] for a stack from `cut_rows`."""
    if parts == 1:
        return x, ids, bias
    # Ids of no expert stay so.
    places = ids.unsqueeze(-1) * parts + torch.arange(parts, device=ids.device)
    x = x.repeat_interleave(parts, 1) if x.ndim == 3 else x
    return x, places.flatten(1), None if bias is None else _cut_rows(bias, parts)


def dequantize_stack(weight: StoredWeight, config: LinearConfig, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes of a stack [E, N, K]."""
    packed, scale, global_scale, _ = cut_rows(weight)
    scales = [None] * len(packed) if global_scale is None else global_scale.split(1)
    matrices = zip(packed, scale, scales, strict=True)
    dense = torch.stack([ops.dequantize(*each, config.format.key, dtype) for each in matrices])
    return dense.view(*weight.packed.shape[:2], -1)


def quantize_pairs(
    x: Tensor, ids: Tensor, weight: StoredWeight, config: LinearConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes and scale bits of inputs [T, K] or [T, k, K], and their global scale."""
    # Where each expert has one [E], codes and bits are those of pairs [T, k, ...].
    scales = weight.input_global_scale
    if scales is None or len(scales) == 1:
        return quantize_input(x, weight, config)
    rotated = ops.rotate(x, config.input_rotation) if config.input_rotation else x
    assert config.input_format is not None, "the input is quantized"
    key, method = config.input_format.key, config.activation_scales
    return *ops.experts_quantize(rotated, ids, scales, key, method), scales


def _cut_rows(tensor: Tensor, parts: int) -> Tensor:
    """Return [E * R, N / R, ...] of [E, N, ...]."""
    return tensor.unflatten(1, (parts, -1)).flatten(0, 1)


def require_adapter(owner: nn.Module) -> ExpertsAdapter:
    """Return the adapter of a module that is one of experts."""
    adapter = adapter_of(owner)
    assert adapter is not None, f"{type(owner).__name__} has stacks"
    return adapter


def holder_of(owner: Any, name: str) -> tuple[Any, str]:
    """Return the module that has a stack of an owner, itself or a child, and its name there."""
    child, _, last = name.rpartition(".")
    return (owner._modules[child] if child else owner), last


def _places(owner: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the name of each stack of an owner, the module that has it, and its name there."""
    adapter = adapter_of(owner)
    for name in () if adapter is None else adapter.names:
        yield name, *holder_of(owner, name)


class ExpertStack(nn.Module):
    """A stack in floating point. Its parameter is its holder's, which alone saves and moves it."""

    owner: Any  # the module of experts
    holder: Any  # the module that has the parameter: the owner, or a child of it

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        # Not as a child: it is the parent.
        self.__dict__["owner"], self.name = owner, name
        self.__dict__["holder"], self.last = holder_of(owner, name)
        weight = self._parameters["weight"] = self.holder._parameters[self.last]
        self.view = require_adapter(owner).view(owner, name, weight)

    @property
    def dense(self) -> Tensor:
        """The weights [E, N, K]."""
        return self.view.of(self.holder._parameters[self.last])

    @property
    def stage(self) -> tuple[str, ...]:
        """The stacks that read the same input."""
        stages = require_adapter(self.owner).stages
        return next(stage for stage in stages if self.name in stage)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] with the experts ids [T, k]."""
        return ops.experts_dense(x, ids, self.dense, _bias(self.owner, self.name))

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertStack:
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class QuantizedExpertStack(PackedBlocks):
    """A stack of packed weights, with the buffers of a QuantizedLinear for each expert."""

    packed_attributes: ClassVar[tuple[str, ...]] = ("config", "weight_dtype", "view")
    computes: ClassVar[tuple[str, ...]] = ("input",)

    # Its tensors have E in front: uint8 [E, N, P], scales [E, N, K / block].
    view: StackView  # of the dense stack

    @property
    def transposed(self) -> bool:
        """Whether the dense stack has [K, N] for each expert."""
        return self.view.transposed

    @staticmethod
    def stacked(parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor that holds those of each expert."""
        return torch.stack(list(parts))

    @staticmethod
    def unstacked(tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of each expert."""
        return tensor.unbind(0)

    def as_parameter(self, stored: Tensor) -> Tensor:
        """Return weights [E, N, K] in the shape that the parameter had."""
        return self.view.parameter(stored)

    def from_parameter(self, weight: Tensor) -> Tensor:
        """Return a weight in the shape of the parameter as [E, N, K]."""
        return self.view.of(weight)

    def stored_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes [E, N, K]."""
        return dequantize_stack(self.packed_weight, self.config, dtype)

    def weight_for(self, x: Tensor) -> StoredWeight:
        """Return the buffers to multiply an input by."""
        return self.packed_weight

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the products [T, k, N] of x [T, K] or [T, k, K] and the experts ids [T, k]."""
        x, config = self.checked_input(x), self.config
        weight, shape = self.weight_for(x), (*ids.shape, self.out_features)
        x, ids, bias = cut_pairs(x, ids, bias, parts_of(weight))
        weight = cut_rows(weight)
        stored = (weight.packed, weight.scale, weight.global_scale)
        key, rotation = config.format.key, config.input_rotation
        if config.input_format is None:
            rotated = ops.rotate(x, rotation) if rotation else x
            y = ops.experts_linear(rotated, ids, *stored, bias, key)
        else:
            quantized = quantize_pairs(x, ids, weight, config)
            # Of `rotated` the gradient is computed.
            rotated = ops.rotate(x, rotation) if rotation and x.requires_grad else x
            arguments = (rotated, *quantized, ids, *stored, bias, key)
            y = ops.experts_linear_quantized(*arguments, *filter(None, [config.inputs]))
        return y if y.shape[-1] == shape[-1] else y.reshape(shape)

    def extra_repr(self) -> str:
        """Return the sizes and how the stack is quantized, for print(model)."""
        return (
            f"experts={len(self.weight_packed)}, in_features={self.in_features}, "
            f"out_features={self.out_features}, {self.config.label}"
        )


# The classes that `convert` makes of linear layers and of stacks.
QUANTIZED = (QuantizedLinear, QuantizedExpertStack)


class QuantizedExperts(nn.Module):
    """The experts of a mixture, whose stacks are packed: the object of the model."""

    # `kind` is the class that it was before it was swapped, whose activation it computes.

    kind: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the same as the class before: in most, weighted sums [T, H] over experts."""
        adapter = require_adapter(self)
        if is_split_by_plan(self):
            raise StateError(
                f"{self.kind.__name__}: transformers would sum over processes what each computes "
                "whole. Split a converted model by fp4pass.parallelize(model, mesh)."
            )
        called = adapter.routed(self, args, kwargs)
        hidden, ids, weights = called
        computed = self.held(adapter.computed(self, ids))
        first, *rest = adapter.stages
        products = [product(self, name, hidden, computed) for name in first]
        for stage in rest:
            x = adapter.activated(self, *products)
            products = [product(self, name, x, computed) for name in stage]
        y = adapter.finished(self, products[0], called)
        total = y[:, 0] if weights is None else weighted_sum(y, ids, weights, hidden.dtype)
        outer: Tensor = next(iter((*args, *kwargs.values())))
        return total.unflatten(0, outer.shape[:-1])

    def held(self, ids: Tensor) -> Tensor:
        """Return where the experts ids [T, k] lie in the stacks."""
        return ids


def product(owner: nn.Module, name: str, x: Tensor, ids: Tensor) -> Tensor:
    """Return the products [T, k, N] of x [T, K] or [T, k, K] with a stack that is a module."""
    holder, last = holder_of(owner, name)
    stack: Any = holder._modules[last]
    return stack(x, ids) if isinstance(stack, ExpertStack) else stack(x, ids, _bias(owner, name))


def stage_inputs(
    owner: nn.Module, x: Tensor, ids: Tensor
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the names of stacks that read one input, and that input; no hook of a stack runs."""
    adapter, stacks = require_adapter(owner), stacks_of(owner)
    products: list[Tensor] = []
    for stage in adapter.stages:
        x = adapter.activated(owner, *products) if products else x
        yield stage, x
        products = [
            stacks[name].forward(x, ids) if name in stacks else product(owner, name, x, ids)
            for name in stage
        ]


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
    holder, last = holder_of(owner, name)
    return holder._parameters.get(f"{last}_bias")


def stacks_of(owner: nn.Module) -> dict[str, ExpertStack]:
    """Return the stacks of a module of experts in floating point, new ones if it has none yet."""
    found = {}
    for name, holder, last in _places(owner):
        parameter, known = holder._parameters.get(last), holder._modules.get(last)
        if parameter is not None and parameter.ndim == 3:
            found[name] = known if isinstance(known, ExpertStack) else ExpertStack(owner, name)
            found[name]._parameters["weight"] = parameter
    return found


def packed_stacks(owner: QuantizedExperts) -> dict[str, QuantizedExpertStack]:
    """Return the stacks of a module of experts that are packed."""
    found = {name: holder._modules[last] for name, holder, last in _places(owner)}
    return {name: each for name, each in found.items() if isinstance(each, QuantizedExpertStack)}


def weight_name(name: str, module: nn.Module) -> str:
    """Return the name in a state dict of the dense weight that a layer or stack has, or had."""
    if isinstance(module, (ExpertStack, QuantizedExpertStack)):
        return name
    return f"{name}.weight" if name else "weight"


def set_weight(module: nn.Module, weight: nn.Parameter) -> None:
    """Set the dense weight of a layer or stack."""
    if isinstance(module, ExpertStack):
        module.holder._parameters[module.last] = module._parameters["weight"] = weight
    else:
        module.weight = weight


def current_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the dense weight that a layer or stack has now, which loading may have replaced."""
    if isinstance(module, ExpertStack):
        module._parameters["weight"] = module.holder._parameters[module.last]
    return module._parameters["weight"]


def add_stacks(modules: Iterable[nn.Module]) -> list[ExpertStack]:
    """Make the stacks among some modules part of their model, for hooks and names; return them."""
    found = [module for module in modules if isinstance(module, ExpertStack)]
    for stack in found:
        # Its name is that of the parameter, which the holder goes on to return for it.
        stack.holder._modules[stack.last] = stack
    return found


def finalize_stacks(model: nn.Module) -> None:
    """Keep only those stacks in floating point as modules that QuantizedExperts call."""
    for owner in model.modules():
        if isinstance(owner, QuantizedExperts):
            add_stacks(stacks_of(owner).values())
            # In one order, whatever was packed first.
            for _, holder, last in _places(owner):
                holder._modules[last] = holder._modules.pop(last)
        for name, child in list(owner._modules.items()):
            if isinstance(child, ExpertStack) and not isinstance(child.owner, QuantizedExperts):
                del owner._modules[name]


def replace_stack(
    stack: ExpertStack, tensors: Mapping[str, Tensor | None], config: LinearConfig
) -> None:
    """Turn a stack into packed buffers, and its owner into QuantizedExperts, in place."""
    owner = stack.owner
    add_stacks([stack])
    weight = stack.holder._parameters.pop(stack.last)
    del stack.__dict__["owner"], stack.__dict__["holder"]
    QuantizedExpertStack.take(stack, tensors, config, weight.dtype, view=stack.view)
    # These call their stacks.
    if not isinstance(owner, QuantizedExperts):
        swap_class(owner, QuantizedExperts, attributes={"kind": type(owner)})
    add_stacks(stacks_of(owner).values())


def restore_stacks(owner: QuantizedExperts, dtype: torch.dtype | None) -> None:
    """Turn experts back into the class that they were, with their rounded weights, in place."""
    for _, holder, last in _places(owner):
        stack, parameters = holder._modules.pop(last), holder._parameters
        if isinstance(stack, QuantizedExpertStack):
            weight = stack.weight_as(dtype or stack.weight_dtype).contiguous()
            parameters[last] = nn.Parameter(weight)
        # A stack is in front of its biases.
        for key in (last, f"{last}_bias"):
            if key in parameters:
                parameters[key] = parameters.pop(key)
    swap_class(owner, owner.__dict__.pop("kind"))
