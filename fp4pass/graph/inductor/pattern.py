"""Patterns of ATen calls, written like the formula that they match.

A node is matched from its result backwards. A number in a pattern matches itself, a `Var` anything.
Where a formula computes in float32, `Wide` marks its inputs and `Narrow` its output: a cast for
bfloat16 and float16, nothing for float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..._compat.torch import meta_of, statically_equal

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
NARROW_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*NARROW_DTYPES, torch.float32)

# Operators whose two arguments match in either order.
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)

# The keyword arguments that calls may have, where there are any.
_PLAIN: dict[Any, tuple[dict[str, Any], ...]] = {
    aten.var_mean.correction: ({"correction": 0, "keepdim": True},),
    aten.sum.dim_IntList: ({}, {"dtype": torch.float32}),
    aten.clone.default: ({}, {"memory_format": torch.contiguous_format}),
}

# The values of a pattern's variables, by their names.
Bound = dict[str, Any]


@dataclass(frozen=True)
class Var:
    """Any node or value, the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Wide:
    """A float32 tensor, or a narrower one that is cast to float32."""

    of: Any


@dataclass(frozen=True)
class Narrow:
    """A float32 tensor, or its cast to a narrower dtype."""

    of: Any


@dataclass(frozen=True)
class Call:
    """A call of one of `targets` with arguments that match `args`."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Either:
    """The first of some patterns, or one of the others."""

    of: tuple[Any, ...]


def call(target: Any, *args: Any) -> Call:
    """Return the pattern of a call of one operator."""
    return Call((target,), args)


def mul(a: Any, b: Any) -> Call:
    """Return the pattern of a product; either factor may be a number."""
    return Call((aten.mul.Tensor, aten.mul.Scalar), (a, b))


def add(a: Any, b: Any) -> Call:
    """Return the pattern of a sum; either term may be a number."""
    return Call((aten.add.Tensor, aten.add.Scalar), (a, b))


def match(pattern: Any, value: Any, bound: Bound | None = None) -> Iterator[Bound]:
    """Yield what the variables of a pattern stand for, for every way in which a value matches."""
    # A plain value in a pattern must be equal, a list in each of its places. Nodes have a fake
    # tensor in `meta["val"]`; `bound` has the values of variables that are known.
    bound = {} if bound is None else bound
    if isinstance(pattern, Var):
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}
        elif _equal(bound[pattern.name], value):
            yield bound
    elif isinstance(pattern, Either):
        for each in pattern.of:
            yield from match(each, value, bound)
    elif isinstance(pattern, Wide | Narrow):
        yield from _match_cast(pattern, value, bound)
    elif isinstance(pattern, Call):
        yield from _match_call(pattern, value, bound)
    elif isinstance(pattern, list):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _match_all(pattern, value, bound)
    elif not isinstance(value, fx.Node) and value == pattern:
        yield bound


def node_pass(change: Callable[..., bool]) -> Callable[..., int]:
    """Make a pass of a function that changes a node, if it can, and returns whether it has."""

    @functools.wraps(change)
    def run(graph: fx.Graph, *eligible: Callable[..., bool]) -> int:
        count = sum(change(node, *eligible) for node in list(graph.nodes))
        if count:
            graph.eliminate_dead_code()
        return count

    return run


def replace(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call in the place of a node. Dead code elimination removes what it alone read."""
    with node.graph.inserting_before(node):
        found = node.graph.call_function(target, arguments)
    found.meta = meta_of(node)
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def replace_all(nodes: Sequence[fx.Node], target: Any, arguments: tuple[Any, ...]) -> None:
    """Put the results of one call in the place of nodes, before the first of them."""
    graph, values = nodes[0].graph, [node.meta.get("val") for node in nodes]
    with graph.inserting_before(nodes[0]):
        made = graph.call_function(target, arguments)
        made.meta = meta_of(nodes[0], val=values)
        for i, node in enumerate(nodes):
            item = graph.call_function(operator.getitem, (made, i))
            item.meta = meta_of(node)
            node.replace_all_uses_with(item)
    for node in nodes:
        graph.erase_node(node)


def insert(graph: fx.Graph, like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """Insert a call, with the tensors that it gives; the rest of its meta is another node's."""
    node = graph.call_function(target, arguments)
    values: Any = fx.map_arg(arguments, lambda node: node.meta["val"])
    node.meta = meta_of(like, val=target(*values))
    return node


def dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype of the tensor that a node computes, None for anything else."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tensor.dtype if isinstance(tensor, Tensor) else None


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are equal whatever the shapes of the inputs."""
    return len(a) == len(b) and all(map(statically_equal, a, b))


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are one, or equal floats, or lists, of dimensions for one."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)


def _match_cast(pattern: Wide | Narrow, value: Any, bound: Bound) -> Iterator[Bound]:
    """Match a tensor behind its cast, and without one."""
    dtype = dtype_of(value)
    if dtype is None:
        return
    if value.target is CAST:
        before = dtype_of(value.args[0])
        narrow, wide = (before, dtype) if isinstance(pattern, Wide) else (dtype, before)
        if wide == torch.float32 and narrow in NARROW_DTYPES:
            yield from match(pattern.of, value.args[0], bound)
    if dtype == torch.float32:
        yield from match(pattern.of, value, bound)


def _match_call(pattern: Call, value: Any, bound: Bound) -> Iterator[Bound]:
    """Match the arguments of a call, for a commutative operator in either order."""
    if not isinstance(value, fx.Node) or value.target not in pattern.targets:
        return
    # Other keyword arguments change the result: another dtype, alpha or correction.
    plain = _PLAIN.get(value.target, ({},))
    if dict(value.kwargs) not in plain or len(value.args) != len(pattern.args):
        return
    orders = [value.args]
    if value.target in COMMUTATIVE:
        orders.append(value.args[::-1])
    for args in orders:
        yield from _match_all(pattern.args, args, bound)


def _match_all(patterns: Sequence[Any], values: Sequence[Any], bound: Bound) -> list[Bound]:
    """Match each of some values by its pattern, with one meaning of all variables."""
    found = [bound]
    for pattern, value in zip(patterns, values, strict=True):
        found = [more for so_far in found for more in match(pattern, value, so_far)]
    return found
