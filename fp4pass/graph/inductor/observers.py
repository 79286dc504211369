"""Observe each tensor of a prepared model's graph once."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from ... import ops
from ..._compat.torch import MutatingCall

aten = torch.ops.aten

# Operators that add to a Hessian and a token count and raise an amax, and how each is combined.
OBSERVERS = (ops.observe, ops.observe_full)
COMBINE = (aten.add.Tensor, aten.add.Tensor, aten.maximum.default)


def share_observers(graph: fx.Graph) -> int:
    """Leave one of several observations of a tensor; return how many were removed."""
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        call = MutatingCall.of(node)
        if call is not None and call.operator in OBSERVERS:
            groups.setdefault((call.operator, call.inputs["x"]), []).append(node)
    count = 0
    for members in groups.values():
        if len(members) > 1:
            _share(graph, members)
            count += len(members) - 1
    return count


def _share(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Observe once, into zeros, and add what that finds to the statistics of all nodes."""
    call = _call_of(members[0])
    with graph.inserting_before(members[0]):
        zeros, found = [], []
        for value in (state.meta["val"] for state in call.changed):
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            zeros.append(graph.call_function(aten.full.default, (list(value.shape), 0), options))
            zeros[-1].meta["val"] = torch.zeros_like(value)
        seen = replace(call, changed=tuple(zeros)).insert(graph)
        for i in range(len(zeros)):
            found.append(graph.call_function(operator.getitem, (seen, i + 1)))
            found[-1].meta["val"] = seen.meta["val"][i + 1]
    for node in members:
        with graph.inserting_before(node):
            # A layer called twice adds to what the node before has put in its place.
            for i, (state, new) in enumerate(zip(_call_of(node).changed, found, strict=True)):
                total = graph.call_function(COMBINE[i], (state, new))
                total.meta["val"] = state.meta["val"]
                for user in [user for user in node.users if user.args[1] == i + 1]:
                    user.replace_all_uses_with(total)
                    graph.erase_node(user)
        for user in list(node.users):
            # The operator's own result, which is None.
            graph.erase_node(user)
        graph.erase_node(node)


def _call_of(node: fx.Node) -> MutatingCall:
    call = MutatingCall.of(node)
    assert call is not None
    return call
