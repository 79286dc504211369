"""Passes for what is before and behind products of few rows: norms, and sums with a residual."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of
from .fuse import addends_of, is_like
from .fusions import is_norm, on_gpu, rms_norm
from .pattern import NARROW_DTYPES, dtype_of, match

aten = torch.ops.aten

# What reads a norm that is worth a launch of its own.
PRODUCTS: tuple[Any, ...] = (ops.linear, ops.linear_gated)

# Rows of a product up to which its kernel adds the residual.
_FEW_ROWS = 8


def fuse_norms(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Make one call of each RMSNorm that products read, with the sum before it; count these."""
    count = 0
    for node in list(graph.nodes):
        if dtype_of(node) not in (*NARROW_DTYPES, torch.float32) or not eligible(node):
            continue
        if not any(user.target in PRODUCTS and user.args[0] is node for user in node.users):
            continue
        found = (bound for bound in match(rms_norm(), node) if is_norm(node, bound))
        bound = next(found, None)
        if bound is not None:
            _replace_norm(node, bound["x"], bound["weight"], bound["eps"])
            count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _replace_norm(node: fx.Node, x: fx.Node, weight: fx.Node, eps: float) -> None:
    """Put an operator in the place of a norm, and of the sum x where it can stand there."""
    graph, terms = node.graph, addends_of(x, {weight})
    if terms is None:
        with graph.inserting_before(node):
            fused = graph.call_function(ops.rms_norm, (x, weight, eps))
        fused.meta = meta_of(node)
        node.replace_all_uses_with(fused)
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


def add_residuals(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Add a residual in the call of a product of few rows, which alone reads it; count these."""
    # Of many rows what follows would compute the sum for less.
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not eligible(node):
            continue
        terms: Any = node.args
        found = (pair for pair in (terms, terms[::-1]) if _is_few(pair[1]))
        residual, product = next(found, (None, None))
        if product is None or len(product.users) > 1 or terms[0] is terms[1]:
            continue
        if all(is_like(each, node, node.meta["val"].shape) for each in terms):
            x, *weight = product.args
            with graph.inserting_before(node):
                fused = graph.call_function(ops.linear_add, (x, residual, *weight))
            fused.meta = meta_of(node)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(product)
            count += 1
    return count


def _is_few(node: Any) -> bool:
    """Return whether a node is a product of few rows, as far as shapes tell."""
    if not isinstance(node, fx.Node) or node.target is not ops.linear or node.kwargs:
        return False
    rows = node.meta["val"].shape[:-1]
    return all(isinstance(each, int) for each in rows) and math.prod(rows) <= _FEW_ROWS
