"""The pass for the counters of a static cache, of which each layer has one of its own.

Without it, each layer has a launch that computes the place of its one token and counts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ... import ops
from ..._compat.torch import MutatingCall, meta_of
from .fusions import on_gpu

aten, prims = torch.ops.aten, torch.ops.prims


def join_counters(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Read counters where they are and count for all layers in one launch; return how many."""
    return sum(
        _read_in_place(node, eligible) for node in list(graph.nodes) if node.target in _ADD
    ) + _count_together(graph, eligible)


_ADD = (aten.add.Tensor,)


def _read_in_place(node: fx.Node, eligible: Callable[[fx.Node], bool]) -> int:
    """Have writes into a cache at counter + [0] read the counter; return whether some do."""
    for zero, counter in (node.args, node.args[::-1]):
        if not (_is_zero(zero) and _is_counter(counter) and eligible(counter)) or node.kwargs:
            continue
        # A write only reads the place: it is no result that would be a view of an input.
        writes = [user for user in node.users if _writes_at(user, node)]
        if writes:
            with node.graph.inserting_before(node):
                place = node.graph.call_function(aten.reshape.default, (counter, [1]))
            place.meta = meta_of(node)
            for each in writes:
                each.replace_input_with(node, place)
            return 1
    return 0


def _writes_at(user: fx.Node, place: fx.Node) -> bool:
    """Return whether a node writes into a cache at places that another gives."""
    call = MutatingCall.of(user)
    return call is not None and call.operator is ops.rotary_write and call.inputs["places"] is place


def _is_zero(node: Any) -> bool:
    """Return whether a node gives the one number 0."""
    if not isinstance(node, fx.Node) or node.target is not prims.iota.default:
        return False
    return node.args == (1,) and node.kwargs.get("start") == 0


def _is_counter(node: Any) -> bool:
    """Return whether a node is an input that is one integer."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype == torch.int64


def _count_together(graph: fx.Graph, eligible: Callable[[fx.Node], bool]) -> int:
    """Add to all counters that grow by one number in one call; return how many others there are."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in _ADD and not node.kwargs and _is_count(node) and eligible(node):
            found.setdefault((node.args[1], node.meta["val"].device), []).append(node)
    joined = 0
    for (number, _), nodes in found.items():
        if len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[0]):
            counters = [node.args[0] for node in nodes]
            call = graph.call_function(aten._foreach_add.Scalar, (counters, number))
            call.meta = meta_of(nodes[0], val=[node.meta["val"] for node in nodes])
            for i, node in enumerate(nodes):
                item = graph.call_function(operator.getitem, (call, i))
                item.meta = meta_of(node)
                node.replace_all_uses_with(item)
        for node in nodes:
            graph.erase_node(node)
        joined += len(nodes) - 1
    return joined


def _is_count(node: fx.Node) -> bool:
    """Return whether a node is counter + number, which only becomes the counter."""
    counter, number = node.args
    if not _is_counter(counter) or type(number) is not int or len(node.users) != 1:
        return False
    (user,) = node.users
    return user.target is aten.copy_.default and user.args == (counter, node)
