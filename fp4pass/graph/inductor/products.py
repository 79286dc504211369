"""The passes that compute what is around products in their launches: gates, sums, norms, rounding.

A product of one row adds its result to the residual, and returns sums of squares of that beside it.
The next products read both in place of the norm. Where processes have parts of a product, what sums
these does the same. The input of FP8 products of many rows is rounded once for all products that
read it: with the norm or gate that computes it, or by ATen calls in the kernel before.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import statically_equal
from ...core.formats import Format, get_format
from ...kernels.compute_fp8.naive import E4M3_MAX, SMALLEST, uses_fp8
from ...kernels.linear.naive import ALONE, Around
from ...kernels.norm.naive import WIDEST
from ...kernels.reduce.naive import LARGEST
from ...ops.registration import unserved
from . import fusions
from .pattern import (
    CAST,
    FLOAT_DTYPES,
    Bound,
    Either,
    Narrow,
    Var,
    Wide,
    add,
    call,
    dtype_of,
    insert,
    match,
    mul,
    node_pass,
    replace,
    replace_all,
    same_shape,
)

aten = torch.ops.aten

GATES = {name: mul(activation, fusions.UP) for name, activation in fusions.ACTIVATIONS.items()}

# Of `linear`, after x: packed codes, scales, a global scale and a bias; then format and `compute`.
# A group has lists of the first four, and what is around the products (`Around`) last.
_WEIGHT, _OPTIONS, _AROUND = slice(1, 5), slice(5, 7), slice(7, None)

# The record of what is around products, where nodes stand for its tensors.
AROUND: Any = Around


def has_kernels(product: fx.Node) -> bool:
    """Return whether a product is computed by the kernels for packed weights."""
    if not fusions.on_gpu(product):
        return False
    return unserved(product.meta["val"].device, format_of(product)) is None


def format_of(product: fx.Node) -> Format:
    """Return the format of the weights that a node multiplies floating point numbers with."""
    key: Any = product.args[5]
    return get_format(key)


def around_of(product: fx.Node) -> Around:
    """Return what a product, or a group of them, computes beside them."""
    given: Any = product.args[_AROUND]
    return Around(*given)


def put_group(node: fx.Node, x: Any, products: Sequence[fx.Node], around: Around = ALONE) -> None:
    """Put the first result of `linear_group`, of x and the weights of products, for a node."""
    weights = map(list, zip(*(each.args[_WEIGHT] for each in products), strict=True))
    fmt, compute = (*products[0].args[_OPTIONS], "input")[:2]
    replace_all([node], ops.linear_group, (x, *weights, fmt, compute, *around))


@node_pass
def fuse_gates(node: fx.Node, eligible: Callable[[fx.Node], bool] = has_kernels) -> bool:
    """Make one call of two products, or of one with halves, and a gate of few rows; count these."""
    if dtype_of(node) is None or not fusions.has_few_rows(node):
        return False
    for name, gate in GATES.items():
        for bound in match(gate, node):
            products = _products(bound["x"], bound["up"], node)
            if products and eligible(products[0]):
                put_group(node, products[0].args[0], products, Around(name))
                return True
    return False


def _products(gate: Any, up: Any, last: fx.Node) -> tuple[fx.Node, ...]:
    """Return the one or two products whose gate is `last`, if nothing else reads them."""
    shape = last.meta["val"].shape
    if not all(fusions.is_like(each, last, shape) for each in (gate, up)):
        return ()
    if calls(gate, ops.linear) and calls(up, ops.linear):
        alike = gate.args[0] is up.args[0] and gate.args[_OPTIONS] == up.args[_OPTIONS]
        products: tuple[fx.Node, ...] = (gate, up) if alike and gate is not up else ()
    else:
        product, interleaved = halves_of(gate, up, ops.linear) or (None, False)
        products = () if product is None or interleaved else (product,)
    return products if all(only_for(each, last) for each in products) else ()


def only_for(first: fx.Node, last: fx.Node) -> bool:
    """Return whether all that is computed from one node is read for another one alone."""
    waiting, seen = [first], {last}
    while waiting:
        node = waiting.pop()
        if not node.users:
            return False
        waiting.extend(user for user in node.users if user not in seen)
        seen.update(node.users)
    return True


def calls(node: Any, operator: Any) -> bool:
    """Return whether a node calls an operator, without keyword arguments."""
    return isinstance(node, fx.Node) and node.target is operator and not node.kwargs


def halves_of(gate: Any, up: Any, product: Any) -> tuple[fx.Node, bool] | None:
    """Return the call of `product` that these are halves of, and whether they are interleaved."""
    both: tuple[Any, Any] = gate, up
    if not all(isinstance(each, fx.Node) for each in both) or gate.target is not up.target:
        return None
    source = gate.args[0] if gate.args else None
    if source is None or source is not up.args[0]:
        return None
    if gate.target is operator.getitem and source.target is aten.split.Tensor:
        first, size, dim = (*source.args, 0)[:3]
        if (gate.args[1], up.args[1]) != (0, 1) or not calls(first, product):
            return None
        shape = first.meta["val"].shape
        halved = statically_equal(2 * size, shape[-1]) and dim in (-1, len(shape) - 1)
        return (first, False) if halved else None
    if gate.target is not aten.slice.Tensor or not calls(source, product):
        return None
    shape = source.meta["val"].shape
    columns = shape[-1]
    found = []
    for each in both:
        given: tuple[Any, ...] = each.args[1:]
        dim, start, end, step = given + (0, 0, columns, 1)[len(given) :]
        if dim not in (-1, len(shape) - 1):
            return None
        found.append((start, min(end, columns), step))
    if found == [(0, columns // 2, 1), (columns // 2, columns, 1)]:
        return source, False
    return (source, True) if found == [(0, columns, 2), (1, columns, 2)] else None


PRODUCT, ROUTED, SLOPE, LIMIT, LEAST = map(Var, ("product", "routed", "slope", "limit", "least"))


@dataclass(frozen=True)
class Formula:
    """A formula of `x` and `up`, the halves of a product, and its options (kernels/experts)."""

    pattern: Any
    activation: str
    shift: float = 0.0


def _limited() -> Any:
    """GPT-OSS's, which limits both halves and adds 1 to the second."""
    x = Narrow(call(aten.clamp_max.default, Wide(fusions.X), LIMIT))
    up = Narrow(
        call(aten.clamp_max.default, call(aten.clamp_min.default, Wide(fusions.UP), LEAST), LIMIT)
    )
    inner = mul(x, SLOPE)
    sigmoid = Either(
        (call(aten.sigmoid.default, inner), Narrow(call(aten.sigmoid.default, Wide(inner))))
    )
    return mul(add(up, 1), mul(x, sigmoid))


# The kernels know these; gelu_new rounds after every step.
EXPERT_GATES = (
    *(
        Formula(mul(fusions.ACTIVATIONS[name], fusions.UP), name)
        for name in ("silu", "gelu", "gelu_tanh")
    ),
    Formula(_limited(), "silu", shift=1.0),
)

SUM = Narrow(
    call(aten.sum.dim_IntList, mul(PRODUCT, call(aten.unsqueeze.default, ROUTED, -1)), [1])
)

# Of `experts_linear`, after x and ids: packed codes, scales, global scales and biases.
_STACK = slice(2, 6)


@node_pass
def fuse_experts(node: fx.Node, eligible: Callable[[fx.Node], bool] = fusions.on_gpu) -> bool:
    """Make one call of the products of experts, their gate and sum; return how many were made."""
    if dtype_of(node) != torch.bfloat16 or not eligible(node):
        return False
    bound = next(match(SUM, node), None)
    arguments = None if bound is None else _arguments(node, bound)
    if arguments is None:
        return False
    replace(node, ops.experts_mixture, arguments)
    return True


def _arguments(node: fx.Node, bound: Bound) -> tuple[Any, ...] | None:
    """Return those of the fused call for a sum, or None if it is of something else."""
    second, weights = bound["product"], bound["routed"]
    if not calls(second, ops.experts_linear) or not isinstance(weights, fx.Node):
        return None
    ids: Any
    x: Any
    ids, fmt = second.args[1], second.args[6]
    gates = (
        (gate, found) for gate in EXPERT_GATES for found in match(gate.pattern, second.args[0])
    )
    for gate, found in gates:
        halves = halves_of(found["x"], found["up"], ops.experts_linear)
        if halves is None:
            continue
        first, interleaved = halves
        x = first.args[0]
        limit = found.get("limit")
        if (
            (first.args[1], first.args[6]) == (ids, fmt)
            and dtype_of(x) == torch.bfloat16
            and x.meta["val"].ndim == 2
            and same_shape(weights.meta["val"].shape, ids.meta["val"].shape)
            and (limit is None or found["least"] == -limit)
            and only_for(first, node)
        ):
            options = (gate.activation, interleaved, found.get("slope", 1.0), gate.shift, limit)
            return (x, ids, weights, *first.args[_STACK], *second.args[_STACK], *options, fmt)
    return None


# A norm is worth a launch of its own where one of these reads it.
PRODUCTS: tuple[Any, ...] = (ops.linear, ops.linear_group)


def is_one_row(product: fx.Node, normed: bool) -> bool:
    """Return whether a product is of one row, by the kernel that computes what is around it."""
    # normed: with a norm before it, else with a residual behind it.
    x: Any
    packed: Any
    x, packed = product.args[:2]
    if not fusions.on_gpu(x):
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
    bound = fusions.norm_of(norm) if norm.users else None
    total: Any = None if bound is None else bound["x"]
    if bound is None or total.target is not aten.add.Tensor or total.kwargs:
        return None
    if not all(fusions.is_like(each, total, total.meta["val"].shape) for each in total.args):
        return None
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
        added = insert(graph, total, target, *arguments)
        items = [insert(graph, total, operator.getitem, added, i) for i in range(2)]
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
def fuse_norms(node: fx.Node, eligible: Callable[[fx.Node], bool] = fusions.on_gpu) -> bool:
    """Make one call of each RMSNorm of few rows that products read, and its sum; count these."""
    if dtype_of(node) not in FLOAT_DTYPES or not fusions.has_few_rows(node):
        return False
    if not any(user.target in PRODUCTS and user.args[0] is node for user in node.users):
        return False
    bound = fusions.norm_of(node)
    if bound is None or not eligible(node):
        return False
    graph, x, weight = node.graph, bound["x"], bound["weight"]
    terms = fusions.addends_of(x, {weight})
    if terms is None:
        replace(node, ops.rms_norm, (x, weight, bound["eps"]))
        return True
    # In the place of the sum, too.
    with graph.inserting_after(max(x, weight)):
        fused = insert(graph, node, ops.add_rms_norm, *terms, weight, bound["eps"])
    with graph.inserting_after(fused):
        items = [
            insert(graph, each, operator.getitem, fused, i) for i, each in enumerate((x, node))
        ]
    for each, item in zip((x, node), items, strict=True):
        each.replace_all_uses_with(item)
    return True


# Where `linear` has the packed codes, and `compute` behind the weight and its format.
_PACKED, _COMPUTE = 1, 6


def is_dense(product: fx.Node, rows: int) -> bool:
    """Return whether a product of so many rows is one of two dense operands, on a GPU."""
    if not has_kernels(product):
        return False
    # Late, for most processes launch no kernel.
    from ...kernels.compute_fp8.triton import multiplies_dense

    packed: Any = product.args[_PACKED]
    n, words = packed.meta["val"].shape
    return multiplies_dense(rows, n, 2 * words, torch.bfloat16, product.meta["val"].device)


def round_rows(graph: fx.Graph, eligible: Callable[[fx.Node, int], bool] = is_dense) -> int:
    """Round inputs of FP8 products outside of them; return of how many products."""
    products: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=ops.linear):
        sizes = node.meta["val"].shape[:-1]
        known = all(isinstance(size, int) for size in sizes) and dtype_of(node) == torch.bfloat16
        if not known or node.kwargs or len(node.args) <= _COMPUTE:
            continue
        rows = math.prod(sizes)
        if uses_fp8(str(node.args[_COMPUTE]), rows) and eligible(node, rows):
            products[node.args[0]].append(node)
    for readers in products.values():
        # Another node than before, where that was replaced meanwhile.
        x: Any = readers[0].args[0]
        with graph.inserting_before(readers[0]):
            alone = x.users.keys() <= set(readers)
            rounded = (_with_gate(graph, x) or _with_norm(graph, x)) if alone else None
            rounded = rounded or _round(graph, readers[0], x)
        for node in readers:
            put_group(node, rounded[0], [node], AROUND(factors=rounded[1]))
    if products:
        graph.eliminate_dead_code()
    return sum(map(len, products.values()))


def _with_gate(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Compute x, if it is an activation times a factor, and round it in one call, as `_round`."""
    for name, gate in GATES.items():
        for bound in match(gate, x):
            if fusions.is_activation(x, bound):
                both = insert(graph, x, ops.activate_round, bound["x"], bound["up"], name)
                values, factors = (insert(graph, x, operator.getitem, both, i) for i in (0, 1))
                return values, factors
    return None


def _with_norm(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Compute x, if it is an RMSNorm, and the sum before, and round it in one call, as `_round`."""
    bound = fusions.norm_of(x)
    if bound is None or x.meta["val"].shape[-1] > WIDEST:
        return None
    before, weight, eps = bound["x"], bound["weight"], bound["eps"]
    terms = fusions.addends_of(before, {weight})
    # A sum has the place of the one before, which others read too.
    place = graph.inserting_after(max(before, weight)) if terms else nullcontext()
    with place:
        both = insert(graph, x, ops.norm_round, *(terms or (before, None)), weight, eps)
    with graph.inserting_after(both):
        total, values, factors = (insert(graph, x, operator.getitem, both, i) for i in range(3))
    if terms:
        before.replace_all_uses_with(total)
    return values, factors


def _round(graph: fx.Graph, like: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert what rounds rows to E4M3 as `quantize_rows_ref`; return them and their factors."""
    wide = insert(graph, like, CAST, x, torch.float32)
    sizes = insert(graph, like, aten.abs.default, wide)
    largest = insert(graph, like, aten.amax.default, sizes, [-1], True)
    factor = insert(graph, like, aten.div.Tensor, largest, E4M3_MAX)
    factor = insert(graph, like, aten.clamp_min.default, factor, SMALLEST)
    quotient = insert(graph, like, aten.div.Tensor, wide, factor)
    return insert(graph, like, CAST, quotient, torch.float8_e4m3fn), factor
