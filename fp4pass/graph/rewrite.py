"""Passes that put observers before linear layers, replace layers, and share what they repeat."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, Usage
from .match import (
    TRANSPOSES,
    LinearNode,
    find_linears,
    is_written_between,
    match_linear,
    module_of,
    only_reads,
)

# Where the holder of a weight keeps what observes its input.
OBSERVERS = "_fp4pass_observers"

# Of the observers in a graph's module.
_OBSERVER = "fp4pass_observer_"


def insert_observers(
    graph: fx.Graph,
    wanted: Callable[[LinearNode], bool],
    make: Callable[[list[LinearNode]], nn.Module],
) -> int:
    """Put one observer before each group of linears that read the same tensor.

    Linears that one of their observers sees in the graph already are left out.

    Args:
        graph: The graph.
        wanted: Whether to observe a linear.
        make: Gives the observer of a group.

    Returns:
        How many observers were added.
    """
    module = graph.owning_module
    assert module is not None
    groups: list[list[LinearNode]] = []
    latest: dict[fx.Node, list[LinearNode]] = {}
    for linear in find_linears(graph):
        if not wanted(linear) or _is_observed(linear):
            continue
        group = latest.get(linear.source)
        if (
            group is None
            # A weight used twice on one tensor has seen it twice.
            or any(other.holder.weight is linear.holder.weight for other in group)
            or is_written_between(group[0].node, linear.node)
        ):
            group = latest[linear.source] = []
            groups.append(group)
        group.append(linear)
    for group in groups:
        # A child may be in the graph more than once, and children() lists it once.
        count = sum(name.startswith(_OBSERVER) for name in module._modules)
        module.add_module(f"{_OBSERVER}{count}", make(group))
        with graph.inserting_before(group[0].node):
            graph.call_module(f"{_OBSERVER}{count}", (group[0].source,))
    return len(groups)


def _is_observed(linear: LinearNode) -> bool:
    """Whether an observer of the linear's holder reads its source."""
    own = linear.holder.__dict__.get(OBSERVERS, ())
    readers = [module_of(user) for user in linear.source.users if only_reads(user)]
    return any(reader is observer for reader in readers for observer in own)


def rewrite_linears(graph: fx.Graph, usage: Callable[[LinearNode], Usage | None]) -> int:
    """Replace linears by quantize and matmul nodes on the buffers of their holders.

    Args:
        graph: The graph.
        usage: How to use the stored weight of a linear, None to keep the linear.

    Returns:
        How many were replaced.
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
        divisor = graph.call_function(ops.global_divisor.default, (source, key))
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
    """A get_attr node; graph.get_attr warns of the plain tensors that functional_call puts in."""
    return graph.create_node("get_attr", target)


def share_quantize(graph: fx.Graph) -> int:
    """Merge equal quantizations, and rotations, of one tensor.

    Returns:
        How many went away.
    """
    ops = torch.ops.fp4pass
    repeated = (ops.rotate, ops.global_divisor, ops.quantize, ops.rotate_quantize)
    targets = {each.default for each in repeated}
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
        for old, new in zip(node.args[1:], first.args[1:], strict=True):
            # The products must read the scale that was used.
            if isinstance(old, fx.Node) and isinstance(new, fx.Node) and old is not new:
                old.replace_all_uses_with(new)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _constant(argument: Any) -> Any:
    """An argument as a key: a stored scalar counts as the tensor that it is, under any name."""
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
