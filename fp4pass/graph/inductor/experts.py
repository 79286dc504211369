"""Replace a whole layer of experts by one call.

A layer is both products, the gate between them and the weighted sum over the experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import statically_equal
from .fusions import ACTIVATIONS, UP, X, on_gpu
from .gates import halves_of, only_for
from .pattern import Bound, Either, Narrow, Var, Wide, add, call, dtype_of, match, mul, replace

aten = torch.ops.aten

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
GATES = (
    *(Formula(mul(ACTIVATIONS[name], UP), name) for name in ("silu", "gelu", "gelu_tanh")),
    Formula(_limited(), "silu", shift=1.0),
)

SUM = Narrow(
    call(aten.sum.dim_IntList, mul(PRODUCT, call(aten.unsqueeze.default, ROUTED, -1)), [1])
)

# Of `experts_linear`, after x and ids: packed codes, scales, global scales and biases.
_STACK = slice(2, 6)


def fuse_experts(graph: fx.Graph, eligible: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Make one call of the products of experts, their gate and sum; return how many were made."""
    count = 0
    for node in list(graph.nodes):
        if dtype_of(node) != torch.bfloat16 or not eligible(node):
            continue
        bound = next(match(SUM, node), None)
        arguments = None if bound is None else _arguments(node, bound)
        if arguments is not None:
            replace(graph, node, ops.experts_mixture, arguments)
            count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _arguments(node: fx.Node, bound: Bound) -> tuple[Any, ...] | None:
    """Return those of the fused call for a sum, or None if it is of something else."""
    second, weights = bound["product"], bound["routed"]
    if not _is_product(second) or not isinstance(weights, fx.Node):
        return None
    ids: Any
    x: Any
    ids, fmt = second.args[1], second.args[6]
    gates = ((gate, found) for gate in GATES for found in match(gate.pattern, second.args[0]))
    for gate, found in gates:
        halves = halves_of(found["x"], found["up"], _is_product)
        if halves is None:
            continue
        first, interleaved = halves
        x = first.args[0]
        limit = found.get("limit")
        if (
            (first.args[1], first.args[6]) == (ids, fmt)
            and dtype_of(x) == torch.bfloat16
            and x.meta["val"].ndim == 2
            and weights.meta["val"].ndim == 2
            and all(map(statically_equal, weights.meta["val"].shape, ids.meta["val"].shape))
            and (limit is None or found["least"] == -limit)
            and only_for(first, node)
        ):
            options = (gate.activation, interleaved, found.get("slope", 1.0), gate.shift, limit)
            return (x, ids, weights, *first.args[_STACK], *second.args[_STACK], *options, fmt)
    return None


def _is_product(node: Any) -> bool:
    """Return whether a node is a product of experts."""
    return isinstance(node, fx.Node) and node.target is ops.experts_linear and not node.kwargs
