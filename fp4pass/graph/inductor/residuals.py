"""The pass that computes residual sums and norms of one row in the launches of its products.

A product adds its result to the residual, and returns sums of squares of that beside it. The next
products read both in place of the norm. Where processes have parts of a product, what sums these
does the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of, statically_equal
from ...kernels.reduce.naive import LARGEST
from .fusions import addends_of, has_few_rows, is_like, is_norm, on_gpu, rms_norm
from .products import AROUND, around_of, format_of, put_group
from .pattern import FLOAT_DTYPES, dtype_of, match, node_pass, replace

aten = torch.ops.aten

# A norm is worth a launch of its own where one of these reads it.
PRODUCTS: tuple[Any, ...] = (ops.linear, ops.linear_group)


def is_one_row(product: fx.Node, normed: bool) -> bool:
    """Return whether a product is of one row, by the kernel that computes what is around it."""
    # normed: with a norm before it, else with a residual behind it.
    x: Any
    packed: Any
    x, packed = product.args[:2]
    if not on_gpu(x):
        return False
    if product.target is ops.all_reduce:
        value = x.meta["val"]
        return value.numel() * value.itemsize <= LARGEST
    # Late, for most processes launch no kernel.
    from ...kernels.linear.triton import multiplies_row, norms_row

    fmt = format_of(product)
    if not normed:
        return multiplies_row(x.meta["val"], fmt)
    weights = [packed] if isinstance(packed, fx.Node) else packed
    return norms_row(x.meta["val"], sum(each.meta["val"].shape[0] for each in weights), fmt)


@node_pass
def fuse_residuals(node: fx.Node, eligible: Callable[[fx.Node, bool], bool] = is_one_row) -> bool:
    """Compute sums and norms of one row in the launches of products; return how many norms."""
    if dtype_of(node) != torch.bfloat16:
        return False
    if not all(statically_equal(size, 1) for size in node.meta["val"].shape[:-1]):
        return False
    place = _place(node)
    if place is None or not eligible(place[0], False):
        return False
    if not all(eligible(user, True) for user in node.users):
        return False
    _replace(node, *place)
    return True


def _place(norm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, float] | None:
    """Return product, residual, their sum, weight and eps of a norm that is theirs, or None."""
    for user in norm.users:
        # A product reads the norm once, and has none of its own around it.
        is_product = user.target in PRODUCTS and not user.kwargs
        if not is_product or user.args[0] is not norm or norm in user.args[1:]:
            return None
        if around_of(user).residual is not None:
            return None
    bounds = match(rms_norm(), norm) if norm.users else ()
    for bound in (each for each in bounds if is_norm(norm, each)):
        total: Any = bound["x"]
        if total.target is not aten.add.Tensor or total.kwargs:
            continue
        shape = total.meta["val"].shape
        if not all(is_like(each, total, shape) for each in total.args):
            continue
        for product, residual in (total.args, total.args[::-1]):
            is_sum = product.target is ops.all_reduce and not product.args[2]
            adds = (is_sum or product.target is ops.linear) and not product.kwargs
            if adds and len(product.users) == 1 and product is not residual:
                return product, residual, total, bound["weight"], bound["eps"]
    return None


def _replace(
    node: fx.Node, product: fx.Node, residual: fx.Node, total: fx.Node, weight: fx.Node, eps: float
) -> None:
    """Put the operators in the place of a product and a sum, and of those that read the norm."""
    graph, (target, arguments) = node.graph, _added(product, residual)
    with graph.inserting_before(total):
        added = graph.call_function(target, arguments)
        items = [graph.call_function(operator.getitem, (added, i)) for i in range(2)]
    value = total.meta["val"]
    sums = target(*fx.map_arg(arguments, lambda node: node.meta["val"]))[1]
    added.meta = meta_of(total, val=(value, sums))
    items[0].meta, items[1].meta = dict(total.meta), meta_of(total, val=sums)
    total.replace_all_uses_with(items[0])
    norm = AROUND(squares=items[1], norm_weight=weight, eps=eps)
    for user in list(node.users):
        if user.target is ops.linear:
            put_group(user, items[0], [user], norm)
            continue
        _, *weights = user.args[:5]
        fmt, compute = (*user.args[5:7], "input")[:2]
        around = norm._replace(gate=around_of(user).gate)
        replace(user, ops.linear_group, (items[0], *weights, fmt, compute, *around))


def _added(product: fx.Node, residual: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that adds a residual too, and its arguments."""
    if product.target is ops.all_reduce:
        x, group, _ = product.args
        return ops.all_reduce_add, (x, residual, group)
    x, packed, scale, global_scale, bias, fmt, *compute = product.args
    weights = ([each] for each in (packed, scale, global_scale, bias))
    options = (fmt, *(compute or ["input"]), *AROUND(residual=residual))
    return ops.linear_group, (x, *weights, *options)


@node_pass
def fuse_norms(node: fx.Node, eligible: Callable[[fx.Node], bool] = on_gpu) -> bool:
    """Make one call of each RMSNorm of few rows that products read, and its sum; count these."""
    if dtype_of(node) not in FLOAT_DTYPES or not has_few_rows(node):
        return False
    if not any(user.target in PRODUCTS and user.args[0] is node for user in node.users):
        return False
    bound = next((each for each in match(rms_norm(), node) if is_norm(node, each)), None)
    if bound is None or not eligible(node):
        return False
    graph, x, weight = node.graph, bound["x"], bound["weight"]
    terms = addends_of(x, {weight})
    if terms is None:
        replace(node, ops.rms_norm, (x, weight, bound["eps"]))
        return True
    # In the place of the sum, too.
    with graph.inserting_after(max(x, weight)):
        fused = graph.call_function(ops.add_rms_norm, (*terms, weight, bound["eps"]))
    fused.meta = meta_of(node, val=(x.meta["val"], node.meta["val"]))
    place = fused
    for i, each in enumerate((x, node)):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (fused, i))
        place.meta = dict(each.meta)
        each.replace_all_uses_with(place)
    return True
