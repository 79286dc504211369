"""Passes for what a decode step does beside its layers: counts of its cache, choice of a token."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._compat.torch import meta_of
from .fusions import on_gpu

aten = torch.ops.aten

# Numbers of a row that one program of Inductor's looks through in the time of a launch, and parts
# of a row, each of which is a program.
_LONG, _PARTS = 1 << 14, 256


def join_counters(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Advance the counters of all layers of a static cache in one call; return how many."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.copy_.default and _advances(node) and eligible(node):
            value = node.meta["val"]
            key = value.device, value.dtype, node.args[1].args[1]
            groups.setdefault(key, []).append(node)
    count = 0
    for (*_, step), copies in groups.items():
        if len(copies) < 2:
            continue
        sums: list[Any] = [each.args[1] for each in copies]
        with graph.inserting_before(copies[0]):
            call = graph.call_function(
                aten._foreach_add.Scalar, ([each.args[0] for each in copies], step)
            )
            results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(sums))]
        call.meta["val"] = [each.meta["val"] for each in sums]
        for total, result in zip(sums, results, strict=True):
            result.meta = meta_of(total)
            total.replace_all_uses_with(result)
            graph.erase_node(total)
        count += len(copies)
    return count


def _advances(node: fx.Node) -> bool:
    """Return whether a copy adds a number to a counter, and is all that reads the sum."""
    counter, total = node.args[:2]
    if not isinstance(counter, fx.Node) or not isinstance(total, fx.Node):
        return False
    is_sum = total.target is aten.add.Tensor and total.args[0] is counter and not total.kwargs
    if not is_sum or not isinstance(total.args[1], int) or len(total.users) > 1:
        return False
    return counter.op == "placeholder" and counter.meta["val"].ndim == 0


def split_argmax(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Look for the largest of a long row in many programs in place of one; return how often."""
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.argmax.default or node.kwargs or not eligible(node):
            continue
        x, dim, keeps = (*node.args, None, False)[:3]
        shape = x.meta["val"].shape
        if len(shape) != 2 or dim not in (-1, 1) or not isinstance(shape[1], int):
            continue
        parts = next((n for n in range(_PARTS, 1, -1) if shape[1] % n == 0), 1)
        if shape[1] >= _LONG and parts > 1:
            _split(graph, node, x, parts, keeps)
            count += 1
    return count


def _split(graph: fx.Graph, node: fx.Node, x: fx.Node, parts: int, keeps: bool) -> None:
    """Put the largest of the largest of parts, of equal ones the first, in the place of argmax."""
    rows, columns = x.meta["val"].shape
    size = columns // parts
    mode = x.meta["val"].fake_mode

    def insert(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        with mode:
            made.meta = meta_of(node, val=target(*values))
        return made

    with graph.inserting_before(node):
        split = insert(aten.reshape.default, x, [rows, parts, size])
        places = insert(aten.argmax.default, split, -1)
        part = insert(aten.argmax.default, insert(aten.amax.default, split, [-1]), -1, True)
        inside = insert(aten.gather.default, places, 1, part)
        found = insert(aten.add.Tensor, insert(aten.mul.Tensor, part, size), inside)
        if not keeps:
            found = insert(aten.squeeze.dim, found, 1)
    node.replace_all_uses_with(found)
    graph.erase_node(node)
