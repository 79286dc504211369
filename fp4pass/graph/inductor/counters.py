"""The pass that adds to the counters of a static cache in one launch.

Each layer of such a cache counts its tokens, for which Inductor writes a kernel each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._compat.torch import meta_of
from .fusions import on_gpu

aten = torch.ops.aten


def join_counters(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Make one call of additions to integers that are kept; return how many calls were removed."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        counter: Any
        total: Any
        counter, total = copy.args[:2]
        if _is_count(counter, total) and eligible(counter):
            same = groups.setdefault((counter.meta["val"].device, total.args[1]), [])
            if total not in same:
                same.append(total)
    joined = [each for each in groups.items() if len(each[1]) > 1]
    for (_, number), totals in joined:
        _join(graph, totals, number)
    return sum(len(totals) - 1 for _, totals in joined)


def _is_count(counter: Any, total: Any) -> bool:
    """Return whether a node is an integer of the caller's plus a number."""
    if counter.op != "placeholder" or total.target is not aten.add.Tensor or total.kwargs:
        return False
    value = counter.meta["val"]
    is_integer = value.ndim == 0 and value.dtype == torch.int64
    return is_integer and total.args[0] is counter and isinstance(total.args[1], int)


def _join(graph: fx.Graph, totals: list[fx.Node], number: int) -> None:
    """Put results of one call in the place of additions of a number."""
    # Late, for counters that nothing reads any more are written in place.
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = min((user for each in totals for user in each.users), key=order.__getitem__)
    counters = [each.args[0] for each in totals]
    with graph.inserting_before(first):
        call = graph.call_function(aten._foreach_add.Scalar, (counters, number))
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(totals))]
    call.meta = meta_of(totals[0], val=[each.meta["val"] for each in totals])
    for old, new in zip(totals, results, strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
