"""Passes over functional graphs that merge calls: equal ones, and products of one input."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..match import meta_of

ops = torch.ops.fp4pass
aten = torch.ops.aten

# What gives the same result for the same arguments, and is worth one call.
REPEATED: tuple[Callable[..., Any], ...] = (
    ops.quantize.default,
    ops.rotate.default,
    ops.rotate_quantize.default,
    ops.dynamic_global_scale.default,
    torch.ops.prims.convert_element_type.default,
    aten.view.dtype,
)

# What stands between a stored scale and a product.
VIEWS: tuple[Callable[..., Any], ...] = (aten.view.dtype, aten.detach.default)

# Products: how many arguments all of a group share, and the operator of a group. The next are of
# one product each, then comes the format; what follows is for gradients, which a group has none of.
GROUPED: dict[Callable[..., Any], tuple[int, Callable[..., Any]]] = {
    ops.linear.default: (1, ops.linear_group.default),
    ops.linear_quantized.default: (4, ops.linear_quantized_group.default),
}


_OWN = 4


def share_calls(graph: fx.Graph) -> int:
    """Leave one of several equal calls. Returns how many went away."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target not in REPEATED or node.kwargs:
            continue
        first = seen.setdefault((node.target, node.args), node)
        if first is node:
            continue
        # Equal calls below see equal arguments only when these do.
        for user in list(node.users):
            twin = _item(first, user)
            if twin is not None:
                user.replace_all_uses_with(twin)
                graph.erase_node(user)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        count += 1
    return count


def _item(call: fx.Node, other: fx.Node) -> fx.Node | None:
    """What takes the same item from a call as `other` from an equal one, if there is anything."""
    if other.target is not operator.getitem:
        return None
    items = (user for user in call.users if user.target is operator.getitem)
    return next((item for item in items if item.args[1:] == other.args[1:]), None)


def group_linears(graph: fx.Graph) -> int:
    """Make one call of the products of one input. Returns how many calls went away.

    The operator of a group launches one kernel for few rows, and one for each weight otherwise.
    """
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in GROUPED and not node.kwargs:
            shared, _ = GROUPED[node.target]
            # x of a quantized product only tells the dtype and the shape of the result.
            key = (node.target, node.args[:shared], node.args[shared + _OWN])
            groups.setdefault(key, []).append(node)
    count = 0
    for (target, shared, fmt), members in groups.items():
        members = [node for node in members if _hoist(node, members[0])]
        if len(members) < 2:
            continue
        with graph.inserting_before(members[0]):
            rest = (node.args[len(shared) :][:_OWN] for node in members)
            args = (*shared, *(list(each) for each in zip(*rest, strict=True)), fmt)
            call = graph.call_function(GROUPED[target][1], args)
            call.meta = meta_of(members[0], val=[node.meta.get("val") for node in members])
            for i, node in enumerate(members):
                item = graph.call_function(operator.getitem, (call, i))
                item.meta = meta_of(node)
                node.replace_all_uses_with(item)
        for node in members:
            graph.erase_node(node)
        count += len(members) - 1
    return count


def _hoist(node: fx.Node, target: fx.Node) -> bool:
    """Move what a node reads, other than what is there, to before `target`, if views are all
    that this takes. Returns whether it was."""
    moved = []
    waiting = [each for each in node.all_input_nodes if target < each]
    while waiting:
        each = waiting.pop()
        if each.target not in VIEWS:
            return False
        moved.append(each)
        waiting += [read for read in each.all_input_nodes if target < read]
    for each in sorted(moved):
        target.prepend(each)
    return True
