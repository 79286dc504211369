"""Finding rotations of inputs that the linear before them can take over: D goes into its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx

from ..match import LinearNode, find_linears

aten = torch.ops.aten

# What commutes with a product along the last dimension, as long as that stays as it is.
_KEEPS = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.dropout.default,
    aten.reshape.default,
    aten.view.default,
}


def find_folds(
    graph: fx.Graph, rotation: Callable[[LinearNode], int | None]
) -> list[tuple[LinearNode, list[LinearNode]]]:
    """Linears whose result only linears of one rotation read, and these, in the order of a graph.

    rotation: of a linear's inputs, None for one that is not to be converted. All of them occur
    once, and the rotation divides the rows of the first; its bias is a parameter beside its
    weight, which nothing else reads.
    """
    linears = find_linears(graph)
    by_node = {linear.node: linear for linear in linears}
    uses = Counter(linear.holder for linear in linears)
    found = []
    for first in linears:
        readers = _readers(first.node, by_node)
        if not readers or rotation(first) is None or not _owns_bias(first):
            continue
        if any(uses[each.holder] > 1 for each in (first, *readers)):
            continue
        sizes = {rotation(each) for each in readers}
        size = sizes.pop()
        if not sizes and size and _rows(first) % size == 0:
            found.append((first, readers))
    return found


def _readers(node: fx.Node, by_node: dict[fx.Node, LinearNode]) -> list[LinearNode]:
    """The linears that a value reaches as it is, none if it reaches anything else."""
    found, waiting = [], [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            linear = by_node.get(user)
            if linear is not None and linear.source is value and linear.bias is not value:
                found.append(linear)
            elif _keeps(user, value):
                waiting.append(user)
            elif not _only_reads(user):
                return []
    return found


def _keeps(node: fx.Node, value: fx.Node) -> bool:
    """Whether each last dimension of a value is one of the node's result, unchanged."""
    if node.target not in _KEEPS or node.args[0] is not value:
        return False
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if node.target not in (aten.reshape.default, aten.view.default):
        return True
    before, after = value.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape[-1] == after.shape[-1]


def _only_reads(node: fx.Node) -> bool:
    """Whether a node is an observer."""
    assert node.graph.owning_module is not None
    if node.op != "call_module":
        return False
    return getattr(node.graph.owning_module.get_submodule(str(node.target)), "only_reads", False)


def _owns_bias(linear: LinearNode) -> bool:
    if linear.called or linear.bias is None:
        return True
    path = f"{linear.path}.bias" if linear.path else "bias"
    own = linear.bias.op == "get_attr" and linear.bias.target == path
    return own and len(linear.bias.users) == 1


def _rows(linear: LinearNode) -> int:
    """N of a linear that is not converted yet."""
    shape = linear.holder.get_parameter("weight").shape
    return shape[1] if linear.transposed else shape[0]
