"""Fold rotations of inputs into the linear before: D goes into the rows of its weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..match import LinearNode, find_linears, value_users

_aten = torch.ops.aten

# What commutes with a product along the last dimension, as long as that stays as it is.
_KEEPS = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.detach.default,
    _aten.dropout.default,
    _aten.reshape.default,
    _aten.view.default,
}


def fold_rotations(
    model: fx.GraphModule, rotations: Mapping[nn.Module, int]
) -> dict[nn.Module, dict[str, Any]]:
    """Find the linears that can give rotated outputs to those that would rotate them.

    Only a whole graph proves that nothing else reads an output. All linears of a fold occur once,
    and nothing shares their parameters; the bias of the first is a parameter beside its weight. By
    holder, `rotations` are the columns of its input that it rotates together, and the result the
    fields of its config that change: `output_rotation` of a first linear, `folded` of the others.
    """
    named = model.named_parameters(remove_duplicate=False)
    shared = Counter(id(parameter) for _, parameter in named)
    linears = find_linears(model.graph)
    uses = Counter(linear.holder for linear in linears)

    def is_free(linear: LinearNode) -> bool:
        own = linear.holder._parameters.values()
        is_shared = any(shared[id(parameter)] > 1 for parameter in own)
        return linear.holder in rotations and uses[linear.holder] == 1 and not is_shared

    by_node = {linear.node: linear for linear in linears}
    changes: dict[nn.Module, dict[str, Any]] = {}
    for first in linears:
        readers = _readers(first.node, by_node)
        if not readers or not all(map(is_free, (first, *readers))) or not _owns_bias(first):
            continue
        sizes = {rotations[each.holder] for each in readers}
        size = sizes.pop()
        if not sizes and size:
            changes.setdefault(first.holder, {})["output_rotation"] = size
            for each in readers:
                changes.setdefault(each.holder, {})["folded"] = True
    return changes


def _readers(node: fx.Node, by_node: dict[fx.Node, LinearNode]) -> list[LinearNode]:
    """Return the linears that a value reaches as it is, none if it reaches anything else."""
    found, waiting = [], [node]
    while waiting:
        value = waiting.pop()
        for user in value_users(value):
            linear = by_node.get(user)
            if linear is not None and linear.source is value and linear.bias is not value:
                found.append(linear)
            elif _keeps(user, value):
                waiting.append(user)
            else:
                return []
    return found


def _keeps(node: fx.Node, value: fx.Node) -> bool:
    """Return whether each last dimension of a value is one of the node's result, unchanged."""
    if node.target not in _KEEPS or node.args[0] is not value:
        return False
    if node.target is _aten.dropout.default:
        return node.args[2] is False
    if node.target not in (_aten.reshape.default, _aten.view.default):
        return True
    before, after = value.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape[-1] == after.shape[-1]


def _owns_bias(linear: LinearNode) -> bool:
    """Return whether the bias of a linear is read beside its weight, and nowhere else."""
    if linear.called or linear.bias is None:
        return True
    path = f"{linear.path}.bias" if linear.path else "bias"
    own = linear.bias.op == "get_attr" and linear.bias.target == path
    return own and len(linear.bias.users) == 1
