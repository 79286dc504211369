"""The pass that chooses the largest of a long row, as a token of greedy decoding, by parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .fusions import on_gpu
from .pattern import insert

aten = torch.ops.aten

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
