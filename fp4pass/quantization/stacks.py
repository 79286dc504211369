"""The weight of a linear layer, or of experts, as a stack of matrices [E, N, K]."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..graph.match import is_conv1d
from ..nn.experts import ExpertStack, QuantizedExpertStack, replace_stack
from ..nn.linear import PackedBlocks, QuantizedLinear
from ..record.config import LinearConfig


def dense_stack(module: nn.Module, transposed: bool) -> Tensor:
    """Return the weight of a layer in floating point as a view [E, N, K].

    transposed: the module has it as [K, N].
    """
    if isinstance(module, ExpertStack):
        return module.dense.detach()
    weight = module.get_parameter("weight").detach()
    return (weight.mT if transposed else weight).unsqueeze(0)


def caller_of(module: nn.Module) -> nn.Module:
    """Return the module that reads a weight when it is called: the layer, or its experts."""
    return module.owner if isinstance(module, ExpertStack) else module


def packed_class(module: nn.Module) -> type[PackedBlocks]:
    """Return the class that a layer in floating point has once it is packed."""
    return QuantizedExpertStack if isinstance(module, ExpertStack) else QuantizedLinear


def pack_weight(
    module: nn.Module, tensors: Mapping[str, Tensor | None], config: LinearConfig, transposed: bool
) -> None:
    """Replace the weight of a layer by packed buffers, in place.

    A linear, or the bare module under which an exported graph keeps a weight ([K, N] if
    `transposed`), becomes a QuantizedLinear, and a stack a QuantizedExpertStack; any other holder
    of a weight only gets the buffers.
    """
    if isinstance(module, ExpertStack):
        replace_stack(module, tensors, config)
        return
    weight = module.get_parameter("weight")
    is_bare = type(module) is nn.Module and not module._modules
    if isinstance(module, nn.Linear) or is_conv1d(module) or is_bare:
        transposed = transposed or is_conv1d(module)
        QuantizedLinear.take(module, tensors, config, weight.dtype, transposed=transposed)
        return
    del module.weight
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
