"""The pass for norms before products: kernels of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of
from .fusions import addends_of, has_few_rows, is_norm, on_gpu, rms_norm
from .pattern import NARROW_DTYPES, dtype_of, match, replace

# A norm is worth a launch of its own where one of these reads it.
PRODUCTS: tuple[Any, ...] = (ops.linear, ops.linear_group, ops.linear_gated)


def fuse_norms(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Make one call of each RMSNorm of few rows that products read, and its sum; count these."""
    count = 0
    for node in list(graph.nodes):
        if dtype_of(node) not in (*NARROW_DTYPES, torch.float32) or not has_few_rows(node):
            continue
        if not any(user.target in PRODUCTS and user.args[0] is node for user in node.users):
            continue
        found = (bound for bound in match(rms_norm(), node) if is_norm(node, bound))
        bound = next(found, None)
        if bound is not None and eligible(node):
            _replace_norm(node, bound["x"], bound["weight"], bound["eps"])
            count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _replace_norm(node: fx.Node, x: fx.Node, weight: fx.Node, eps: float) -> None:
    """Put an operator in the place of a norm, and of the sum x where it can stand there."""
    graph, terms = node.graph, addends_of(x, {weight})
    if terms is None:
        replace(graph, node, ops.rms_norm, (x, weight, eps))
        return
    order = {each: i for i, each in enumerate(graph.nodes)}
    with graph.inserting_after(max((x, weight), key=order.__getitem__)):
        fused = graph.call_function(ops.add_rms_norm, (*terms, weight, eps))
    fused.meta = meta_of(node, val=(x.meta["val"], node.meta["val"]))
    place = fused
    for i, each in enumerate((x, node)):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (fused, i))
        place.meta = dict(each.meta)
        each.replace_all_uses_with(place)
