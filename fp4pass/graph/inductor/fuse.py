"""Fuse a quantizer with what computes its input, by a table of fusions.

The graphs are Inductor's after decompositions and functionalization: every node has a fake tensor
in `meta["val"]`, and each tensor is quantized once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ... import ops
from ..._compat.torch import is_erased, meta_of, statically_equal
from .pattern import NARROW_DTYPES, Bound, Var, dtype_of, match

aten = torch.ops.aten


@dataclass(frozen=True)
class Fusion:
    """One way to compute the input of a quantizer together with its codes.

    Attributes:
        pattern: what computes the input, from a tensor called `x`.
        check: whether a match, given the input's node and what was bound, is what it looks like.
        operator: returns the codes and scales of the input; its arguments are x, `operands`, and
            those of the quantizer but its input.
        operands: variables of the pattern, None for one that is not in it, or plain values.
        of_sum: the same for x = a + b, where this sum can be computed here too; its first two
            arguments are a and b, and its first result is the sum. None without such an operator.
    """

    pattern: Any
    check: Callable[[fx.Node, Bound], bool]
    operator: Any
    operands: tuple[Any, ...]
    of_sum: Any = None


@dataclass(frozen=True)
class Quantizer:
    """A call of `quantize` whose input nothing else reads."""

    node: fx.Node
    source: fx.Node  # its input
    # Calls of `linear_quantized` that take their result's dtype from the input.
    products: tuple[fx.Node, ...]


def apply_fusions(
    graph: fx.Graph, fusions: Sequence[Fusion], eligible: Callable[[fx.Node], bool]
) -> int:
    """Fuse each eligible quantizer by the first fusion that matches; return how many were fused."""
    count = 0
    for quantizer in _find_quantizers(graph, eligible):
        source = quantizer.source
        matches = ((fusion, bound) for fusion in fusions for bound in match(fusion.pattern, source))
        found = next((each for each in matches if each[0].check(source, each[1])), None)
        if found is not None:
            _fuse(quantizer, *found)
            count += 1
    return count


def is_like(value: Any, source: fx.Node, shape: Iterable[Any]) -> bool:
    """Return whether a node gives a tensor of a shape with the dtype and device of another."""
    if dtype_of(value) is None:
        return False
    tensor, like, expected = value.meta["val"], source.meta["val"], tuple(shape)
    return (
        tensor.dtype == like.dtype
        and tensor.device == like.device
        and len(tensor.shape) == len(expected)
        and all(statically_equal(a, b) for a, b in zip(tensor.shape, expected, strict=True))
    )


def _find_quantizers(graph: fx.Graph, eligible: Callable[[fx.Node], bool]) -> Iterator[Quantizer]:
    """Yield the quantizers that may be fused with what computes their input."""
    dtypes = (*NARROW_DTYPES, torch.float32)
    for node in list(graph.nodes):
        if node.target is not ops.quantize:
            continue
        source, divisor = node.args[:2]
        if not isinstance(source, fx.Node) or dtype_of(source) not in dtypes:
            continue
        products = tuple(user for user in source.users if user is not node)
        alone = all(_reads_dtype_only(product, source) for product in products)
        if alone and eligible(source) and not _depends_on(divisor, source):
            yield Quantizer(node, source, products)


def _reads_dtype_only(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node is a product that takes no more than the dtype of its result."""
    if node.target is not ops.linear_quantized:
        return False
    return node.args[0] is source and source not in node.args[1:] and not node.kwargs


def _depends_on(node: Any, source: fx.Node) -> bool:
    """Return whether a node is computed from another one, or is it; None is not."""
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if each is source:
            return True
        if isinstance(each, fx.Node) and each not in seen:
            seen.add(each)
            waiting.extend(each.all_input_nodes)
    return False


def _fuse(quantizer: Quantizer, fusion: Fusion, bound: Bound) -> None:
    """Put the operator of a fusion in a quantizer's place."""
    graph, x = quantizer.node.graph, bound["x"]
    operands = [bound.get(o.name) if isinstance(o, Var) else o for o in fusion.operands]
    # What follows the input: global divisor, format, and how scales are chosen.
    arguments = (*operands, *quantizer.node.args[1:])
    inputs = {each for each in (x, *arguments) if isinstance(each, fx.Node)}
    addends = None if fusion.of_sum is None else _addends(x, inputs - {x})
    if addends is None:
        with graph.inserting_before(quantizer.node):
            fused = graph.call_function(fusion.operator, (x, *arguments))
        fused.meta = meta_of(quantizer.node)
        quantizer.node.replace_all_uses_with(fused)
        _erase(quantizer, x)
        return
    last = next(node for node in reversed(graph.nodes) if node in inputs)
    with graph.inserting_after(last):
        fused = graph.call_function(fusion.of_sum, (*addends, *arguments))
    _replace_sum(quantizer, fused, x)


def _addends(x: fx.Node, others: set[fx.Node]) -> tuple[Any, ...] | None:
    """Return the terms of x, if it is a sum that nothing reads before all `others` are computed."""
    if x.target is not aten.add.Tensor or x.kwargs or not x.meta["val"].is_contiguous():
        return None
    shape = x.meta["val"].shape
    if not all(is_like(each, x, shape) for each in x.args):
        return None
    if any(_depends_on(other, x) for other in others):
        return None
    order = {node: i for i, node in enumerate(x.graph.nodes)}
    last = max(order[node] for node in (x, *others))
    return None if any(order[user] <= last for user in x.users) else x.args


def _replace_sum(quantizer: Quantizer, fused: fx.Node, x: fx.Node) -> None:
    """Put a fused node in the place of a quantizer, and its first result in that of the sum x."""
    graph = fused.graph
    values: tuple[Tensor, ...] = (x.meta["val"], *quantizer.node.meta["val"])
    fused.meta = meta_of(quantizer.node, val=values)
    parts, place = [], fused
    for i, value in enumerate(values):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (fused, i))
        place.meta = meta_of(quantizer.node, val=value)
        parts.append(place)
    parts[0].meta = dict(x.meta)
    for user in list(quantizer.node.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(parts[1 + index])
        graph.erase_node(user)
    x.replace_all_uses_with(parts[0])
    _erase(quantizer, parts[0])
    graph.erase_node(x)


def _erase(quantizer: Quantizer, x: fx.Node) -> None:
    """Erase a quantizer and what only its input was computed from."""
    graph = quantizer.node.graph
    for product in quantizer.products:
        product.replace_input_with(quantizer.source, x)
        product.meta = meta_of(product)
    graph.erase_node(quantizer.node)
    waiting = [quantizer.source]
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or is_erased(node) or node is x:
            continue
        waiting.extend(node.all_input_nodes)
        graph.erase_node(node)
