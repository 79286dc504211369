"""Finding linears in a graph: the nodes that multiply by a stored weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..linear import PACKED, QuantizedLinear

TRANSPOSES = {
    torch.ops.aten.t.default: (),
    torch.ops.aten.numpy_T.default: (),
    torch.ops.aten.permute.default: ([1, 0],),
    torch.ops.aten.transpose.int: (0, 1),
}


@dataclass(frozen=True)
class LinearNode:
    """One product by a stored weight.

    node: computes it; source: the node of its input; holder: the module that the weight belongs
    to, at `path` in the graph's module; bias: the node of a bias that is not read through holder;
    transposed: the weight is stored as [K, N]; called: the node calls holder as a module.
    """

    node: fx.Node
    source: fx.Node
    holder: nn.Module
    path: str
    bias: fx.Node | None
    transposed: bool
    called: bool


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear that stores its weight as [K, N]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is no more than x W^T + b with its own `weight` and `bias`.

    A subclass of nn.Linear that only has a constructor of its own is; one with other methods might
    call them, and they would be gone with its class.
    """
    if not isinstance(module, nn.Linear):
        return is_conv1d(module)
    above = itertools.takewhile(lambda cls: cls is not nn.Linear, type(module).__mro__)
    own = {
        name
        for cls in above
        for name, value in vars(cls).items()
        if callable(value) or not name.startswith("__")
    }
    return own <= {"__init__"}


def find_linears(graph: fx.Graph) -> list[LinearNode]:
    """Every linear of a graph, in its order."""
    found = (match_linear(node) for node in graph.nodes)
    return [linear for linear in found if linear is not None]


def match_linear(node: fx.Node) -> LinearNode | None:
    """The linear that a node is, if it is one: a call of a linear module, or F.linear, aten.linear,
    aten.addmm or aten.mm on a parameter called `weight`."""
    if node.op == "call_module":
        return _called(node)
    if node.op == "call_function" and node.target in _MATCHERS:
        return _MATCHERS[node.target](node)
    return None


def weight_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that use what a node reads, or its transpose."""
    for user in node.users:
        if user.target in TRANSPOSES:
            yield from weight_readers(user)
        else:
            yield user


def _called(node: fx.Node) -> LinearNode | None:
    assert node.graph.owning_module is not None and isinstance(node.target, str)
    module = node.graph.owning_module.get_submodule(node.target)
    if not (is_linear(module) or isinstance(module, QuantizedLinear)):
        return None
    inputs = [*node.args, *node.kwargs.values()]
    if len(inputs) != 1 or not isinstance(inputs[0], fx.Node):
        return None
    return LinearNode(node, inputs[0], module, node.target, None, is_conv1d(module), called=True)


def _function(node: fx.Node) -> LinearNode | None:
    """F.linear and aten.linear: (input, weight, bias)."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return _match(node, given.get("input"), given.get("weight"), given.get("bias"), False)


def _addmm(node: fx.Node) -> LinearNode | None:
    if any(value != 1 for value in node.kwargs.values()):
        return None
    bias, source, weight = node.args
    return _match(node, source, weight, bias, True)


def _mm(node: fx.Node) -> LinearNode | None:
    source, weight = node.args
    return _match(node, source, weight, None, True)


_MATCHERS = {
    F.linear: _function,
    torch.ops.aten.linear.default: _function,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.mm.default: _mm,
}


def _match(
    node: fx.Node, source: object, weight: object, bias: object, transposed: bool
) -> LinearNode | None:
    """The linear of these operands, if the weight is a stored one; transposed: [K, N] as given."""
    while isinstance(weight, fx.Node) and weight.target in TRANSPOSES:
        if tuple(weight.args[1:]) != TRANSPOSES[weight.target]:
            return None
        weight, transposed = weight.args[0], not transposed
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    if not isinstance(source, fx.Node) or not (bias is None or isinstance(bias, fx.Node)):
        return None
    assert node.graph.owning_module is not None and isinstance(weight.target, str)
    path, _, name = weight.target.rpartition(".")
    holder = node.graph.owning_module.get_submodule(path)
    is_stored = isinstance(holder._parameters.get(name), nn.Parameter) or PACKED in holder._buffers
    if name != "weight" or not is_stored:
        return None
    return LinearNode(node, source, holder, path, bias, transposed, called=False)
