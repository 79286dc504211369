"""Passes that turn linears into operators on packed weights, and share what they repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..config import LinearConfig
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, PackedWeight, quantized_linear
from .match import TRANSPOSES, LinearNode, match_linear
from .purity import unchanged_between


def rewrite_linears(graph: fx.Graph, config_of: Callable[[LinearNode], LinearConfig | None]) -> int:
    """Replace linears by quantize and matmul nodes on the buffers of their holders.

    config_of: the config of a layer, None to leave it as it is. Returns how many were replaced.
    """
    count = 0
    # One by one, for what one replaces may be what the next one reads.
    for node in list(graph.nodes):
        linear = match_linear(node)
        how = None if linear is None else config_of(linear)
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


def _emit(graph: fx.Graph, linear: LinearNode, config: LinearConfig) -> fx.Node:
    """Trace what a quantized linear layer computes into the graph."""
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def read(name: str) -> Any:
        if getattr(linear.holder, name) is None:
            return None
        path = f"{linear.path}.{name}" if linear.path else name
        return fx.Proxy(_read(graph, path), tracer)

    bias: Any = None
    if linear.called:
        bias = read("bias")
    elif linear.bias is not None:
        bias = fx.Proxy(linear.bias, tracer)
    scale = read(SCALE).view(torch.uint8)
    packed, global_scale = read(PACKED), read(GLOBAL)
    input_global_scale = None if config.weight_only else read(INPUT_GLOBAL)
    weight = PackedWeight(packed, scale, global_scale, input_global_scale)
    output: fx.Proxy = quantized_linear(fx.Proxy(linear.source, tracer), weight, bias, config)
    return output.node


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
