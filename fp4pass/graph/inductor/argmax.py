"""Replace the argmax of long rows, the token of greedy decoding, by an operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of
from .fusions import on_gpu
from .pattern import NARROW_DTYPES, dtype_of

aten = torch.ops.aten

# Numbers of a row from which several programs a row pay, and rows that fill a GPU by themselves.
_LONG, _ROWS = 1 << 14, 64


def long_rows_on_gpu(node: fx.Node) -> bool:
    """Return whether a node gives few long rows on an NVIDIA GPU."""
    *rows, size = (1, *node.meta["val"].shape)
    if not on_gpu(node) or not isinstance(size, int) or size < _LONG:
        return False
    count = 1
    for each in rows:
        count *= each if isinstance(each, int) else _ROWS + 1
    return count <= _ROWS


def fuse_argmax(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = long_rows_on_gpu) -> int:
    """Choose the largest number of long rows in an operator; return how often."""
    count = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.argmax.default)):
        x, dim, keepdim = (*node.args, None, False)[:3]
        if not isinstance(x, fx.Node) or dim is None or node.kwargs:
            continue
        last = dim in (-1, x.meta["val"].ndim - 1)
        if not last or dtype_of(x) not in (*NARROW_DTYPES, torch.float32) or not eligible(x):
            continue
        with graph.inserting_before(node):
            found = graph.call_function(ops.last_argmax, (x,))
            found.meta = meta_of(node, val=ops.last_argmax(x.meta["val"]))
            if keepdim:
                found = graph.call_function(aten.unsqueeze.default, (found, -1))
                found.meta = meta_of(node)
        node.replace_all_uses_with(found)
        graph.erase_node(node)
        count += 1
    return count
