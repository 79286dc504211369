"""Whether the forward of a class is x W^T + b, and no more."""

from __future__ import annotations

import functools
import operator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

# A forward that names anything else is not run to be traced.
_NAMES = {"weight", "bias", "T", "mT", "t", "transpose", "matmul", "linear", "add"}
_NAMES |= {"torch", "nn", "functional", "F"}

# What tracing a forward raises that is not straight.
_FAILURES = (fx.proxy.TraceError, AttributeError, NameError, TypeError, ValueError)

_SWAPS = ((0, 1), (1, 0), (-1, -2), (-2, -1))


def multiplies_only(module: nn.Module) -> bool:
    """Return whether a module's own forward computes x W^T + b with its `weight` and `bias`."""
    return _is_product(type(module).forward, module._parameters.get("bias") is not None)


@functools.cache
def _is_product(forward: Any, has_bias: bool) -> bool:
    """Return whether a forward is straight; it is traced with proxies for its parameters."""
    if not isinstance(forward, FunctionType):
        return False
    code = forward.__code__
    if code.co_argcount != 2 or code.co_freevars or not _NAMES.issuperset(code.co_names):
        return False
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    x, weight, bias = (fx.Proxy(graph.placeholder(n), tracer) for n in ("x", "weight", "bias"))
    layer = SimpleNamespace(weight=weight, bias=bias if has_bias else None)
    try:
        output = forward(layer, x)
    except _FAILURES:
        return False
    if not isinstance(output, fx.Proxy):
        return False
    return _is_sum(output.node, x.node, weight.node, bias.node if has_bias else None)


def _is_sum(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    """Return whether a node is x W^T + b, or x W^T without a bias."""
    if node.target is F.linear:
        names = ("input", "weight", "bias")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        return [given.get(name) for name in names] == [x, weight, bias]
    if bias is not None:
        others = [each for each in node.args if each is not bias]
        if node.target not in (operator.add, torch.add) or node.kwargs or len(node.args) != 2:
            return False
        product = others[0] if len(others) == 1 else None
        return isinstance(product, fx.Node) and _is_sum(product, x, weight, None)
    if node.target not in (operator.matmul, torch.matmul) or node.kwargs or node.args[0] is not x:
        return False
    return isinstance(node.args[1], fx.Node) and _is_transpose(node.args[1], weight)


def _is_transpose(node: fx.Node, weight: fx.Node) -> bool:
    """Return whether a node is the transpose of a matrix."""
    if node.kwargs or not node.args or node.args[0] is not weight:
        return False
    rest: Any = node.args[1:]
    if node.target is getattr:
        return rest in (("T",), ("mT",))
    if node.target in ("t", torch.t):
        return rest == ()
    return node.target in ("transpose", torch.transpose) and rest in _SWAPS
