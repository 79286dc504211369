"""Merge equal calls of functional graphs, observations of a tensor, products of an input, counters.

And choose the largest of a long row, as a token of greedy decoding, by parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import MutatingCall, meta_of
from .fusions import on_gpu
from .pattern import insert, replace_all

aten = torch.ops.aten

# Calls that give equal results for equal arguments, and are worth sharing.
SHARED: tuple[Callable[..., Any], ...] = (
    ops.quantize,
    ops.rotate,
    ops.rotate_quantize,
    ops.dynamic_global_scale,
    torch.ops.prims.convert_element_type.default,
    aten.view.dtype,
)

# Targets that may stand between a stored scale and a product.
VIEWS: tuple[Callable[..., Any], ...] = (aten.view.dtype, aten.detach.default, aten.alias.default)


# The operator that computes several products of one input, how many leading arguments describe the
# input, and where `compute` stands. Those of the weight (packed codes, scales, global scale, bias)
# follow the input, then the format; a rotation is for gradients, which a group has none of.
GROUPS: dict[Callable[..., Any], tuple[Callable[..., Any], int, int]] = {
    ops.linear: (ops.linear_group, 1, 6),
    ops.linear_quantized: (ops.linear_quantized_group, 4, 10),
}
_WEIGHT_ARGUMENTS = 4


def share_calls(graph: fx.Graph) -> int:
    """Leave one of several equal calls; return how many were removed."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target not in SHARED or node.kwargs:
            continue
        first = seen.setdefault((node.target, node.args), node)
        if first is node:
            continue
        # Equal calls below see equal arguments only when these do.
        items = {user.args[1:]: user for user in first.users if user.target is operator.getitem}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1:] in items:
                user.replace_all_uses_with(items[user.args[1:]])
                graph.erase_node(user)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        count += 1
    return count


def group_linears(graph: fx.Graph) -> int:
    """Make one call of the products of one input; return how many calls were removed."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in GROUPS and not node.kwargs:
            # x of a quantized product only gives the dtype and the shape of the result.
            _, inputs, compute = GROUPS[node.target]
            options = (node.args[inputs + _WEIGHT_ARGUMENTS], *node.args[compute:])
            key = (node.target, node.args[:inputs], options)
            found.setdefault(key, []).append(node)
    # The operator of a group launches one kernel for few rows, and one for each weight otherwise.
    count = 0
    for (target, inputs, options), nodes in found.items():
        members = [node for node in nodes if _hoist(node, nodes[0])]
        if len(members) < 2:
            continue
        weights = (node.args[len(inputs) :][:_WEIGHT_ARGUMENTS] for node in members)
        columns = (list(each) for each in zip(*weights, strict=True))
        replace_all(members, GROUPS[target][0], (*inputs, *columns, *options))
        count += len(members) - 1
    return count


def _hoist(node: fx.Node, target: fx.Node) -> bool:
    """Move views that a node reads to before `target`; return whether all it reads is there now."""
    moved = []
    waiting = [each for each in node.all_input_nodes if target < each]
    while waiting:
        each = waiting.pop()
        if each.target not in VIEWS:
            return False
        moved.append(each)
        waiting += [read for read in each.all_input_nodes if target < read]
    for each in sorted(moved):
        target.prepend(each)
    return True


# Operators that add to a Hessian and a token count and raise an amax, and how each is combined.
OBSERVERS = (ops.observe, ops.observe_full)
COMBINE = (aten.add.Tensor, aten.add.Tensor, aten.maximum.default)


def share_observers(graph: fx.Graph) -> int:
    """Leave one of several observations of a tensor; return how many were removed."""
    groups: dict[tuple[object, ...], list[tuple[fx.Node, MutatingCall]]] = {}
    for node in graph.nodes:
        call = MutatingCall.of(node)
        if call is not None and call.operator in OBSERVERS:
            groups.setdefault((call.operator, call.inputs["x"]), []).append((node, call))
    shared = [members for members in groups.values() if len(members) > 1]
    for members in shared:
        _share(graph, members)
    return sum(len(members) - 1 for members in shared)


def _share(graph: fx.Graph, members: list[tuple[fx.Node, MutatingCall]]) -> None:
    """Observe once, into zeros, and add what that finds to the statistics of all nodes."""
    first, call = members[0]
    with graph.inserting_before(first):
        zeros, found = [], []
        for value in (state.meta["val"] for state in call.changed):
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            zeros.append(graph.call_function(aten.full.default, (list(value.shape), 0), options))
            zeros[-1].meta["val"] = torch.zeros_like(value)
        seen = replace(call, changed=tuple(zeros)).insert(graph)
        for i in range(len(zeros)):
            found.append(graph.call_function(operator.getitem, (seen, i + 1)))
            found[-1].meta["val"] = seen.meta["val"][i + 1]
    for node, _ in members:
        # A layer called twice adds to what the node before has put in its place.
        states = MutatingCall.of(node).changed  # type: ignore[union-attr]
        with graph.inserting_before(node):
            for i, (state, new) in enumerate(zip(states, found, strict=True)):
                total = graph.call_function(COMBINE[i], (state, new))
                total.meta["val"] = state.meta["val"]
                for user in [user for user in node.users if user.args[1] == i + 1]:
                    user.replace_all_uses_with(total)
                    graph.erase_node(user)
        for user in list(node.users):
            # The operator's own result, which is None.
            graph.erase_node(user)
        graph.erase_node(node)


def join_counters(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Count the tokens of all layers of a static cache in one call; return the calls removed."""
    # Inductor writes a kernel for each layer: 2 to 4 % of a step of a few rows.
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        counter: Any
        total: Any
        counter, total = copy.args[:2]
        if counter.op != "placeholder" or total.target is not aten.add.Tensor or total.kwargs:
            continue
        value, number = counter.meta["val"], total.args[1]
        is_count = value.ndim == 0 and value.dtype == torch.int64 and isinstance(number, int)
        if is_count and total.args[0] is counter and eligible(counter):
            same = groups.setdefault((value.device, number), [])
            if total not in same:
                same.append(total)
    joined = [each for each in groups.items() if len(each[1]) > 1]
    for (_, number), totals in joined:
        # Late, for counters that nothing reads any more are written in place.
        first = min(user for each in totals for user in each.users)
        counters = [each.args[0] for each in totals]
        with graph.inserting_before(first):
            call = graph.call_function(aten._foreach_add.Scalar, (counters, number))
            items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(totals))]
        call.meta = meta_of(totals[0], val=[each.meta["val"] for each in totals])
        for old, new in zip(totals, items, strict=True):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    return sum(len(totals) - 1 for _, totals in joined)


# Inductor looks through a row in one program. From this many numbers on that takes longer than
# launching a second kernel, and up to this many rows leave most of a GPU idle.
_LONG, _ROWS = 1 << 14, 64

# Parts of a row, each looked through by a program: about the multiprocessors of a GPU.
_PARTS = 128


def split_argmax(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Look for the largest of few long rows in many programs a row; return how often."""
    found = graph.find_nodes(op="call_function", target=aten.argmax.default)
    nodes = [node for node in found if _is_of_few_long_rows(node) and eligible(node)]
    for node in nodes:
        x: Any
        x, _, keeps = (*node.args, False)[:3]
        *rows, columns = x.meta["val"].shape
        size = -(-columns // _PARTS)
        with graph.inserting_before(node):
            if rest := size * _PARTS - columns:
                # Behind the row: of equal numbers the first is chosen.
                x = insert(graph, node, aten.constant_pad_nd.default, x, [0, rest], -math.inf)
            x = insert(graph, node, aten.reshape.default, x, [*rows, _PARTS, size])
            best = insert(graph, node, aten.amax.default, x, [-1])
            places = insert(graph, node, aten.argmax.default, x, -1)
            # As argmax does, both take NaN for the largest number.
            part = insert(graph, node, aten.argmax.default, best, -1, True)
            inside = insert(graph, node, aten.gather.default, places, -1, part)
            before = insert(graph, node, aten.mul.Tensor, part, size)
            place = insert(graph, node, aten.add.Tensor, before, inside)
            if not keeps:
                place = insert(graph, node, aten.squeeze.dim, place, -1)
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    return len(nodes)


def _is_of_few_long_rows(node: fx.Node) -> bool:
    """Return whether a node is the argmax of each row, for every size that its graph is for."""
    x: Any
    x, dim, *_ = (*node.args, None)
    value = x.meta["val"]
    if node.kwargs or dim is None or dim not in (-1, value.ndim - 1):
        return False
    known = all(isinstance(size, int) for size in value.shape) and value.is_floating_point()
    return known and value.shape[-1] >= _LONG and math.prod(value.shape[:-1]) <= _ROWS
