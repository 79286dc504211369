"""What a traced forward may call: torch functions and tensor methods without side effects.

None of them writes to its arguments, draws random numbers at trace time or looks at values.
Those in the VIEWS sets may return a tensor that shares memory with an argument.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..linear import QuantizedLinear
from .match import is_linear

OPERATORS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "MatMult": operator.matmul,
}


def unpack(value: Any, count: int) -> tuple[Any, ...]:
    """The parts that `a, b = value` gives, with its error if there are more or less of them."""
    parts = tuple(value)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack, {count} wanted")
    return parts


FRESH_FUNCTIONS = frozenset(
    {
        *OPERATORS.values(),
        operator.neg,
        F.celu,
        F.elu,
        F.gelu,
        F.glu,
        F.group_norm,
        F.hardsigmoid,
        F.hardswish,
        F.layer_norm,
        F.leaky_relu,
        F.linear,
        F.log_softmax,
        F.logsigmoid,
        F.mish,
        F.normalize,
        F.relu,
        F.relu6,
        F.rms_norm,
        F.selu,
        F.sigmoid,
        F.silu,
        F.softmax,
        F.softplus,
        F.tanh,
        torch.abs,
        torch.add,
        torch.bmm,
        torch.cat,
        torch.clamp,
        torch.div,
        torch.exp,
        torch.log,
        torch.matmul,
        torch.maximum,
        torch.mean,
        torch.minimum,
        torch.mul,
        torch.pow,
        torch.relu,
        torch.rsqrt,
        torch.sigmoid,
        torch.softmax,
        torch.sqrt,
        torch.stack,
        torch.sub,
        torch.sum,
        torch.tanh,
    }
)
VIEW_FUNCTIONS = frozenset(
    {
        F.dropout,
        getattr,
        operator.getitem,
        torch.chunk,
        torch.flatten,
        torch.permute,
        torch.reshape,
        torch.split,
        torch.squeeze,
        torch.transpose,
        torch.unsqueeze,
        unpack,
    }
)

FRESH_METHODS = frozenset(
    {
        "abs",
        "add",
        "amax",
        "clamp",
        "clone",
        "div",
        "exp",
        "log",
        "matmul",
        "max",
        "mean",
        "mul",
        "pow",
        "relu",
        "rsqrt",
        "sigmoid",
        "softmax",
        "sqrt",
        "square",
        "sub",
        "sum",
        "tanh",
        "var",
    }
)
VIEW_METHODS = frozenset(
    {
        "bfloat16",
        "chunk",
        "contiguous",
        "dim",
        "expand",
        "flatten",
        "float",
        "half",
        "mT",
        "permute",
        "reshape",
        "size",
        "split",
        "squeeze",
        "t",
        "to",
        "transpose",
        "type_as",
        "unflatten",
        "unsqueeze",
        "view",
    }
)

_FRESH_OVERLOADS = frozenset(
    {
        torch.ops.aten.linear.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.silu.default,
        torch.ops.aten.gelu.default,
        torch.ops.aten.relu.default,
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.add.Tensor,
    }
)

# Attributes of a tensor that are functions of it.
ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})


def unchanged_between(source: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing between two readers of `source` can have written to its memory."""
    aliases: dict[fx.Node, fx.Node] = {}
    outside = next(iter(source.graph.nodes))

    def root(node: fx.Node) -> fx.Node:
        while node in aliases:
            node = aliases[node]
        return node

    for node in source.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            # What comes from outside may be one tensor under several names.
            shares = [outside]
        else:
            shares = [] if _is_fresh(node) else node.all_input_nodes
        for other in shares:
            if root(other) is not root(node):
                aliases[root(other)] = root(node)
    node = first.next
    while node is not last:
        if _may_write(node) and any(root(a) is root(source) for a in node.all_input_nodes):
            return False
        node = node.next
    return True


def _called_module(node: fx.Node) -> nn.Module:
    assert node.graph.owning_module is not None and isinstance(node.target, str)
    return node.graph.owning_module.get_submodule(node.target)


def _is_fresh(node: fx.Node) -> bool:
    """Whether the node's result shares memory with none of its arguments."""
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return node.target.namespace == "fp4pass" or node.target in _FRESH_OVERLOADS
        return node.target in FRESH_FUNCTIONS
    if node.op == "call_method":
        return node.target in FRESH_METHODS
    if node.op == "call_module":
        return _only_reads(_called_module(node))
    return True


def _may_write(node: fx.Node) -> bool:
    """Whether the node may write to the memory of an argument."""
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return node.target._schema.is_mutable and node.target.namespace != "fp4pass"
        return node.target not in FRESH_FUNCTIONS | VIEW_FUNCTIONS
    if node.op == "call_method":
        return node.target not in FRESH_METHODS | VIEW_METHODS
    return node.op == "call_module" and not _only_reads(_called_module(node))


def _only_reads(module: nn.Module) -> bool:
    """Linears and observers only read their input."""
    known = is_linear(module) or isinstance(module, QuantizedLinear)
    return known or getattr(type(module), "only_reads", False)
