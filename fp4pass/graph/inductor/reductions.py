"""Add the residual to a sum over processes, and normalize that, in the launch that reduces."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of
from .fusions import is_like, on_gpu, rms_norm
from .pattern import match

aten = torch.ops.aten

_NORM = rms_norm()


def fuse_reductions(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Reduce, add and norm in one call where a row-parallel layer is before a norm; count these."""
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor or not eligible(node):
            continue
        for bound in match(_NORM, node):
            arguments = _arguments(node, bound)
            if arguments is not None:
                _replace(graph, node, bound["x"], arguments)
                count += 1
                break
    if count:
        graph.eliminate_dead_code()
    return count


def _arguments(norm: fx.Node, bound: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the arguments of the operator, or None where something does not fit."""
    total, weight, eps = bound["x"], bound["weight"], bound["eps"]
    shape = norm.meta["val"].shape
    if total.target is not aten.add.Tensor or total.kwargs or not isinstance(eps, float):
        return None
    if list(bound["dims"]) not in ([-1], [len(shape) - 1]):
        return None
    reduced = next((each for each in total.args if _is_sum(each)), None)
    if reduced is None or len(total.args) != 2:
        return None
    residual = total.args[1 - total.args.index(reduced)]
    if not all(is_like(each, norm, shape) for each in (reduced, total, residual)):
        return None
    # Before the sum nothing may be computed from it, and the weight is there.
    order = {each: i for i, each in enumerate(norm.graph.nodes)}
    if not is_like(weight, norm, shape[-1:]) or order[weight] > order[total]:
        return None
    x, group, _ = reduced.args
    return x, residual, weight, eps, group


def _is_sum(node: Any) -> bool:
    """Return whether a node is a sum over processes that is read once."""
    return (
        isinstance(node, fx.Node)
        and node.target is ops.all_reduce
        and not node.args[2]
        and len(node.users) == 1
    )


def _replace(graph: fx.Graph, norm: fx.Node, total: fx.Node, arguments: tuple[Any, ...]) -> None:
    """Put the operator in the place of the sum, and its results in those of sum and norm."""
    with graph.inserting_before(total):
        fused = graph.call_function(ops.all_reduce_norm, arguments)
        results = [graph.call_function(operator.getitem, (fused, i)) for i in range(2)]
    fused.meta = meta_of(total, val=(total.meta["val"], norm.meta["val"]))
    for old, new in zip((total, norm), results, strict=True):
        new.meta = meta_of(old)
        old.replace_all_uses_with(new)
