"""The passes that compute gates in the launch of their products: of an MLP, and of experts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of, statically_equal
from ...core.formats import Format, get_format
from ...kernels.linear.naive import ALONE, Around
from ...ops.registration import unserved
from .fusions import ACTIVATIONS, UP, X, has_few_rows, is_like, on_gpu
from .pattern import (
    Bound,
    Either,
    Narrow,
    Var,
    Wide,
    add,
    call,
    dtype_of,
    match,
    mul,
    node_pass,
    replace,
    same_shape,
)

aten = torch.ops.aten

GATES = {name: mul(activation, UP) for name, activation in ACTIVATIONS.items()}

# Of `linear`, after x: packed codes, scales, a global scale and a bias; then format and `compute`.
# A group has lists of the first four, and what is around the products (`Around`) last.
_WEIGHT, _OPTIONS, _AROUND = slice(1, 5), slice(5, 7), slice(7, None)

# The record of what is around products, where nodes stand for its tensors.
AROUND: Any = Around


def has_kernels(product: fx.Node) -> bool:
    """Return whether a product is computed by the kernels for packed weights."""
    if not on_gpu(product):
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
    graph = node.graph
    with graph.inserting_before(node):
        call = graph.call_function(ops.linear_group, (x, *weights, fmt, compute, *around))
        call.meta = meta_of(node, val=[node.meta["val"]])
        item = graph.call_function(operator.getitem, (call, 0))
    item.meta = meta_of(node)
    node.replace_all_uses_with(item)
    graph.erase_node(node)


@node_pass
def fuse_gates(node: fx.Node, eligible: Callable[[fx.Node], bool] = has_kernels) -> bool:
    """Make one call of two products, or of one with halves, and a gate of few rows; count these."""
    if dtype_of(node) is None or not has_few_rows(node):
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
    if not all(is_like(each, last, shape) for each in (gate, up)):
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
    x = Narrow(call(aten.clamp_max.default, Wide(X), LIMIT))
    up = Narrow(call(aten.clamp_max.default, call(aten.clamp_min.default, Wide(UP), LEAST), LIMIT))
    inner = mul(x, SLOPE)
    sigmoid = Either(
        (call(aten.sigmoid.default, inner), Narrow(call(aten.sigmoid.default, Wide(inner))))
    )
    return mul(add(up, 1), mul(x, sigmoid))


# The kernels know these; gelu_new rounds after every step.
EXPERT_GATES = (
    *(Formula(mul(ACTIVATIONS[name], UP), name) for name in ("silu", "gelu", "gelu_tanh")),
    Formula(_limited(), "silu", shift=1.0),
)

SUM = Narrow(
    call(aten.sum.dim_IntList, mul(PRODUCT, call(aten.unsqueeze.default, ROUTED, -1)), [1])
)

# Of `experts_linear`, after x and ids: packed codes, scales, global scales and biases.
_STACK = slice(2, 6)


@node_pass
def fuse_experts(node: fx.Node, eligible: Callable[[fx.Node], bool] = on_gpu) -> bool:
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
