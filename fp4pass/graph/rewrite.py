"""Passes that turn linears into operators on packed weights, and share what they repeat."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, Usage
from .match import TRANSPOSES, LinearNode, match_linear
from .purity import unchanged_between


def rewrite_linears(graph: fx.Graph, usage: Callable[[LinearNode], Usage | None]) -> int:
    """Replace linears by quantize and matmul nodes on the buffers of their holders.

    usage: how to use a linear's stored weight, None to leave it as it is. Returns how many were
    replaced.
    """
    count = 0
    # One by one, for what one replaces may be what the next one reads.
    for node in list(graph.nodes):
        linear = match_linear(node)
        how = None if linear is None else usage(linear)
        if linear is None or how is None:
            continue
        with graph.inserting_before(linear.node):
            new = _emit(graph, linear, how)
        new.meta = dict(linear.node.meta)
        linear.node.replace_all_uses_with(new)
        operands = linear.node.all_input_nodes
        graph.erase_node(linear.node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _emit(graph: fx.Graph, linear: LinearNode, how: Usage) -> fx.Node:
    ops = torch.ops.fp4pass
    key = how.format_key

    def read(name: str) -> fx.Node | None:
        if getattr(linear.holder, name) is None:
            return None
        return _read(graph, f"{linear.path}.{name}" if linear.path else name)

    bias = read("bias") if linear.called else linear.bias
    scale = graph.call_method("view", (read(SCALE), torch.uint8))
    weight = (read(PACKED), scale, read(GLOBAL))
    divisor = None if how.weight_only else read(INPUT_GLOBAL)
    is_dynamic = not how.weight_only and divisor is None and weight[2] is not None
    source = linear.source
    rotation = how.input_rotation
    if rotation and (how.weight_only or is_dynamic):
        source = graph.call_function(ops.rotate.default, (source, rotation))
    if how.weight_only:
        return graph.call_function(ops.linear.default, (source, *weight, bias, key))
    if is_dynamic:
        divisor = graph.call_function(ops.dynamic_global_scale.default, (source, key))
    rest = (divisor, key, how.activation_scales)
    if rotation:
        arguments = (linear.source, rotation, *rest)
        quantized = graph.call_function(ops.rotate_quantize.default, arguments)
    else:
        quantized = graph.call_function(ops.quantize.default, (linear.source, *rest))
    parts = [graph.call_function(operator.getitem, (quantized, i)) for i in range(2)]
    product = (linear.source, *parts, divisor, *weight, bias, key, rotation)
    return graph.call_function(ops.linear_quantized.default, product)


def _read(graph: fx.Graph, target: str) -> fx.Node:
    """A get_attr node. graph.get_attr warns of the plain tensors that functional_call puts in."""
    return graph.create_node("get_attr", target)


def call_unhooked(graph: fx.Graph, wanted: Callable[[LinearNode], bool]) -> int:
    """Replace calls of nn.Linear modules by F.linear on their weights, so that their own hooks do
    not observe what an observer of the graph has seen. Returns how many were replaced."""
    count = 0
    for node in list(graph.nodes):
        linear = match_linear(node)
        if linear is None or not linear.called or not wanted(linear):
            continue
        with graph.inserting_before(linear.node):
            weight = _read(graph, f"{linear.path}.weight")
            bias = None
            if linear.holder.bias is not None:
                bias = _read(graph, f"{linear.path}.bias")
            new = graph.call_function(F.linear, (linear.source, weight, bias))
        new.meta = dict(linear.node.meta)
        linear.node.replace_all_uses_with(new)
        graph.erase_node(linear.node)
        count += 1
    return count


def share_quantize(graph: fx.Graph, by_value: bool = False) -> int:
    """Merge quantizations, and rotations, of one tensor that are alike. Returns how many went
    away.

    by_value: equal scales count as one, which is right only while they stay what they are.
    """
    ops = torch.ops.fp4pass
    repeated = (ops.rotate, ops.dynamic_global_scale, ops.quantize, ops.rotate_quantize)
    targets = {each.default for each in repeated}
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in targets:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        key = (node.target, source, *(_constant(a, by_value) for a in node.args[1:]))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if not unchanged_between(source, first, node):
            seen[key] = node
            continue
        operands = node.all_input_nodes
        for old, new in zip(node.args[1:], first.args[1:], strict=True):
            # The products must read the scale that was used.
            if isinstance(old, fx.Node) and isinstance(new, fx.Node) and old is not new:
                old.replace_all_uses_with(new)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _constant(argument: Any, by_value: bool) -> Any:
    """An argument as a key: a stored scalar counts as its value, or as the tensor that it is."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        module: Any = argument.graph.owning_module
        for name in str(argument.target).split("."):
            module = getattr(module, name)
        if isinstance(module, Tensor) and module.numel() == 1 and not module.is_meta:
            return float(module) if by_value else id(module)
    return argument


def _erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase reads of attributes, and transposes of them, that nothing uses any more."""
    for node in nodes:
        if node.op == "placeholder" or node.users or node._erased:
            continue
        if node.op == "get_attr" or node.target in TRANSPOSES:
            operands = node.all_input_nodes
            graph.erase_node(node)
            _erase_unused(graph, operands)
