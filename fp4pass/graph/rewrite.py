"""Passes that put observers before linear layers, replace layers, and remove repeated work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import ops
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, StoredWeight, quantized_linear
from ..record.config import LinearConfig
from .match import (
    TRANSPOSES,
    LinearNode,
    find_linears,
    is_written_between,
    match_linear,
    module_of,
    only_reads,
)

# The attribute of a weight's holder with the observers of its input.
OBSERVERS = "_fp4pass_observers"


def insert_observers(
    graph: fx.Graph,
    wanted: Callable[[LinearNode], bool],
    make: Callable[[list[LinearNode]], nn.Module],
) -> int:
    """Put one observer before each group of linears that read one tensor; return how many."""
    module = graph.owning_module
    assert module is not None
    groups: list[list[LinearNode]] = []
    latest: dict[fx.Node, list[LinearNode]] = {}
    for linear in find_linears(graph):
        own = linear.holder.__dict__.get(OBSERVERS, ())
        readers = [module_of(user) for user in linear.source.users if only_reads(user)]
        # One that an observer of its holder sees in the graph already is done.
        if any(reader is each for reader in readers for each in own) or not wanted(linear):
            continue
        group = latest.get(linear.source, [])
        # A weight used twice on one tensor has seen it twice.
        again = any(other.holder.weight is linear.holder.weight for other in group)
        if not group or again or is_written_between(group[0].node, linear.node):
            group = latest[linear.source] = []
            groups.append(group)
        group.append(linear)
    for group in groups:
        names = (f"fp4pass_observer_{i}" for i in itertools.count())
        name = next(name for name in names if not hasattr(module, name))
        module.add_module(name, make(group))
        with graph.inserting_before(group[0].node):
            graph.call_module(name, (group[0].source,))
    return len(groups)


def rewrite_linears(graph: fx.Graph, config_of: Callable[[LinearNode], LinearConfig | None]) -> int:
    """Replace linears by quantize and matmul nodes on the buffers of their holders, and count."""
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
        # graph.get_attr warns of the plain tensors that functional_call puts in.
        return fx.Proxy(graph.create_node("get_attr", path), tracer)

    bias: Any = None
    if linear.called:
        bias = read("bias")
    elif linear.bias is not None:
        bias = fx.Proxy(linear.bias, tracer)
    scale = read(SCALE)
    if not config.format.has_float_scale:
        scale = scale.view(torch.uint8)
    packed, global_scale = read(PACKED), read(GLOBAL)
    input_global_scale = None if config.weight_only else read(INPUT_GLOBAL)
    weight = StoredWeight(packed, scale, global_scale, input_global_scale)
    output: fx.Proxy = quantized_linear(fx.Proxy(linear.source, tracer), weight, bias, config)
    return output.node


def share_quantize(graph: fx.Graph) -> int:
    """Merge equal quantizations, and rotations, of one tensor; return how many went away."""
    targets = {ops.rotate, ops.dynamic_global_scale, ops.quantize, ops.rotate_quantize}
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in targets:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        key = (node.target, source, *(_constant(a) for a in node.args[1:]))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if is_written_between(first, node):
            seen[key] = node
            continue
        operands = node.all_input_nodes
        # The products must read the scale that was used.
        for old, new in zip(node.args[1:], first.args[1:], strict=True):
            if isinstance(old, fx.Node) and isinstance(new, fx.Node) and old is not new:
                old.replace_all_uses_with(new)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _constant(argument: Any) -> Any:
    """Return an argument as a key: a stored scalar is the tensor that it is, under any name."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        module: Any = argument.graph.owning_module
        for name in str(argument.target).split("."):
            module = getattr(module, name)
        if isinstance(module, Tensor) and module.numel() == 1 and not module.is_meta:
            return id(module)
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
