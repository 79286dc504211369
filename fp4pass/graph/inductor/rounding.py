"""The pass that rounds inputs of FP8 products where they are computed.

A product of many rows is one of E4M3 rows and an expanded weight. Its input is rounded once for all
products that read it, by ATen calls, which Inductor puts into the kernel before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ...kernels.compute_fp8.naive import E4M3_MAX, SMALLEST, uses_fp8
from .gates import AROUND, has_kernels, put_group
from .pattern import CAST, dtype_of, insert

aten = torch.ops.aten

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
            rounded = _round(graph, readers[0], x)
        for node in readers:
            put_group(node, rounded[0], [node], AROUND(factors=rounded[1]))
    if products:
        graph.eliminate_dead_code()
    return sum(map(len, products.values()))


def _round(graph: fx.Graph, like: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert what rounds rows to E4M3 as `quantize_rows_ref`; return them and their factors."""
    wide = insert(graph, like, CAST, x, torch.float32)
    sizes = insert(graph, like, aten.abs.default, wide)
    largest = insert(graph, like, aten.amax.default, sizes, [-1], True)
    factor = insert(graph, like, aten.div.Tensor, largest, E4M3_MAX)
    factor = insert(graph, like, aten.clamp_min.default, factor, SMALLEST)
    quotient = insert(graph, like, aten.div.Tensor, wide, factor)
    return insert(graph, like, CAST, quotient, torch.float8_e4m3fn), factor
