"""Replace attention and the nodes between the products of a layer and it by one call.

They are the norms of heads, if any, the rotary embedding, and the write of keys and values into a
static cache. The pass follows `fuse_attention` and starts from its calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ... import ops
from ..._compat.torch import MutatingCall, meta_of, statically_equal
from .fusions import X, on_gpu, rms_norm
from .pattern import Var, add, call, dtype_of, match, mul, node_pass

aten = torch.ops.aten

_FUSED: Any = ops.rotary_attention
_ROTARY = add(mul(X, Var("cos")), mul(Var("turned"), Var("sin")))


@dataclass(frozen=True)
class _Rotated:
    """Heads [B, T, heads, D] that are normed, transposed and rotated."""

    heads: fx.Node
    cos: fx.Node  # [B or 1, T, D], as sin
    sin: fx.Node
    weight: fx.Node | None
    eps: float | None


@node_pass
def fuse_rotary(node: fx.Node, eligible: Callable[[fx.Node], bool] = on_gpu) -> bool:
    """Norm, rotate, write into the cache and attend in one call; return how often."""
    fits = node.target is ops.attention and eligible(node)
    inputs = _inputs(node) if fits else None
    if inputs is None:
        return False
    # The call, with its result and caches, in the place of attention and written caches.
    graph = node.graph
    written: tuple[Any, ...] = node.args[1:3]
    caches = inputs.pop("keys"), inputs.pop("values")
    with graph.inserting_before(node):
        called = MutatingCall(_FUSED, inputs, caches).insert(graph)
        results = [graph.call_function(operator.getitem, (called, i)) for i in range(3)]
    for old, new in zip((node, *written), results, strict=True):
        new.meta = meta_of(old)
        old.replace_all_uses_with(new)
    called.meta["val"] = tuple(each.meta["val"] for each in results)
    graph.erase_node(node)
    return True


def _inputs(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of the call for attention, or None if something else is before it."""
    q, keys, values, mask, span, counters, scale = cast(tuple[Any, ...], node.args)
    of_keys, of_values = _written(keys), _written(values)
    if of_keys is None or of_values is None or of_keys[1] is not of_values[1]:
        return None
    (cached_keys, places, new_keys), (cached_values, _, new_values) = of_keys, of_values
    query, key, value = _rotated(q), _rotated(new_keys), _before_turn(new_values)
    if query is None or key is None or value is None:
        return None
    eps = {each.eps for each in (query, key)} - {None}
    if (query.cos, query.sin) != (key.cos, key.sin) or len(eps) > 1:
        return None
    tensors = {
        "q": query.heads,
        "k": key.heads,
        "v": value,
        "q_weight": query.weight,
        "k_weight": key.weight,
        "cos": query.cos,
        "sin": query.sin,
        "keys": cached_keys,
        "values": cached_values,
    }
    dtypes = {dtype_of(each) for each in tensors.values() if each is not None}
    # Nothing that comes before may read a cache after the write, and nothing else the queries.
    last = all(user >= node for each in (keys, values) for user in each.users)
    if len(dtypes) != 1 or not last or len(q.users) != 1:
        return None
    others = {"mask": mask, "span": span, "counters": counters, "scale": scale}
    return {**tensors, **others, "eps": eps.pop() if eps else 0.0, "places": _start_of(places)}


def _written(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the cache [B, heads, S, D], the places in S and the rows that a node writes there."""
    if node.target is not aten.index_put.default or len(node.args) != 3:
        return None
    cache, indices, rows = node.args
    if len(indices) != 3 or indices[0] is not None or indices[1] is not None:
        return None
    dimensions = cache.meta["val"].ndim, indices[2].meta["val"].ndim
    return (cache, indices[2], rows) if dimensions == (4, 1) else None


def _start_of(places: fx.Node) -> fx.Node:
    """Return the count c of positions c, c + 1, ..., which need no kernel then, or positions."""
    for found in match(add(Var("steps"), Var("start")), places):
        steps, start = found["steps"], found["start"]
        if not isinstance(steps, fx.Node) or steps.target is not torch.ops.prims.iota.default:
            continue
        is_range = (steps.kwargs["start"], steps.kwargs["step"]) == (0, 1)
        if is_range and dtype_of(start) == torch.int64 and start.meta["val"].ndim == 0:
            return cast(fx.Node, start)
    return places


def _before_turn(node: Any) -> fx.Node | None:
    """Return heads as [B, T, heads, D] before their transposition."""
    found = next(match(call(aten.permute.default, X, [0, 2, 1, 3]), node), None)
    return None if found is None else found["x"]


def _rotated(node: Any) -> _Rotated | None:
    """Return x of x * cos + (-second half, first half) * sin, which a node is."""
    for found in match(_ROTARY, node):
        x, turned = found["x"], found["turned"]
        if not all(isinstance(each, fx.Node) for each in found.values()):
            continue
        heads = _before_turn(x) if _is_turned(turned, x) else None
        cos, sin = (_table(found[name], x) for name in ("cos", "sin"))
        if heads is None or cos is None or sin is None:
            continue
        for bound in match(rms_norm(), heads):
            weight = bound["weight"]
            if list(bound["dims"]) in ([-1], [3]) and weight.meta["val"].ndim == 1:
                return _Rotated(bound["x"], cos, sin, weight, bound["eps"])
        return _Rotated(heads, cos, sin, None, None)
    return None


def _is_turned(node: fx.Node, x: fx.Node) -> bool:
    """Return whether a node is (-second half, first half) of x [B, heads, T, D]."""
    parts: Any = node.args[0] if node.args else ()
    width = x.meta["val"].shape[-1]
    if node.target is not aten.cat.default or node.args[1:] not in ((-1,), (3,)) or width % 2:
        return False
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return False
    second, first = parts[0].args[0], parts[1]
    if any(half.target is not aten.slice.Tensor or len(half.args) != 4 for half in (first, second)):
        return False
    starts = first.args == (x, 3, 0, width // 2) and second.args[:3] == (x, 3, width // 2)
    return bool(starts and second.args[3] >= width)


def _table(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """Return [B or 1, T, D] of what multiplies all heads x [B, heads, T, D]."""
    if node.target is not aten.unsqueeze.default or node.args[1] != 1:
        return None
    found: Any = node.args[0]
    shape, (batch, _, *rest) = found.meta["val"].shape, x.meta["val"].shape
    fits = len(shape) == 3 and all(map(statically_equal, shape[1:], rest))
    return found if fits and any(statically_equal(shape[0], n) for n in (1, batch)) else None
