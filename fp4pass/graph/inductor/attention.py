"""Replace attention of few queries, and what is before it, by one call that reads the cache.

Models copy keys and values for each head of a group, and read all of a static cache, with a mask
for its empty part. A second pass adds what is between the products of a layer and attention: the
norms of heads, if any, the rotary embedding, and the write of keys and values into the cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import MutatingCall, meta_of, statically_equal
from .fusions import on_gpu, rms_norm
from .pattern import (
    NARROW_DTYPES,
    Bound,
    Either,
    Var,
    add,
    call,
    dtype_of,
    insert,
    match,
    mul,
    node_pass,
    same_shape,
)

aten = torch.ops.aten

# The limits of the kernel: queries of a text, columns of a head, and numbers of all queries that
# read one head of keys, in powers of two.
_QUERIES, _WIDTH, _NUMBERS = 16, 256, 1 << 13

_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default

# PyTorch's number for False in a mask for cuDNN, which takes no -inf.
_CUDNN_MASKED = -65536.0


def narrow_on_gpu(node: fx.Node) -> bool:
    """Return whether a node gives a tensor of 16 bits on an NVIDIA GPU."""
    return on_gpu(node) and dtype_of(node) in NARROW_DTYPES


@node_pass
def fuse_attention(node: fx.Node, eligible: Callable[[fx.Node], bool] = narrow_on_gpu) -> bool:
    """Compute attention of few queries from keys and values in place; return how often."""
    if node.target not in (_CUDNN, _EFFICIENT, _CPU) or len(node.users) != 1:
        return False
    result = next(iter(node.users))
    found = _read(node) if result.args[1:] == (0,) and eligible(result) else None
    if found is None:
        return False
    *tensors, mask, scale = found
    graph = node.graph
    with graph.inserting_before(node):
        # One span of keys, with its counters, for each mask.
        spans = [user for user in mask.users if user.target is ops.attention_span]
        if not spans:
            spans = [insert(graph, result, ops.attention_span, mask)]
            for i in range(2):
                insert(graph, result, operator.getitem, spans[0], i)
        fused = insert(graph, result, ops.attention, *tensors, mask, *spans[0].users, scale)
        turned = insert(graph, result, aten.permute.default, fused, [0, 2, 1, 3])
    result.replace_all_uses_with(turned)
    # A search for dead code would keep what may drop out numbers.
    graph.erase_node(result)
    graph.erase_node(node)
    return True


def _read(node: fx.Node) -> tuple[Any, ...] | None:
    """Return q, k, v, mask and scale of softmax(q k^T scale + mask) v, if the kernel serves it."""
    # After q, k, v and, on a GPU, the mask: a gradient, dropout, causality, and debugging.
    args: list[Any] = list(node.args)
    mask: Any = node.kwargs.get("attn_mask") if node.target is _CPU else args.pop(3)
    scale: Any = node.kwargs.get("scale")
    if any(args[3:]) or not isinstance(mask, fx.Node):
        return None
    q, k, v = args[0], _grouped(args[1]), _grouped(args[2])
    # Back to the mask before it was expanded, padded, or made of bool.
    while (before := _mask_before(mask, node.target is _CUDNN)) is not None:
        mask = before
    if {dtype_of(each) for each in (q, k, v)} - {dtype_of(q)} or mask.meta["val"].ndim != 4:
        return None
    sizes = [*q.meta["val"].shape, *k.meta["val"].shape, *v.meta["val"].shape]
    if dtype_of(q) not in (*NARROW_DTYPES, torch.float32) or not all(
        isinstance(each, int) for each in sizes
    ):
        return None
    _, heads, queries, width, _, groups, size, _, _, of_values, _, out_width = sizes
    columns = max(width, out_width)
    # In powers of two.
    numbers = 1 << (heads // groups * queries - 1).bit_length() + (columns - 1).bit_length()
    known = groups == of_values and heads % groups == 0 and queries <= _QUERIES
    known = known and columns <= _WIDTH and numbers <= _NUMBERS
    if not known or not statically_equal(mask.meta["val"].shape[-1], size):
        return None
    return q, k, v, mask, float(width**-0.5 if scale is None else scale)


_REPEATED = call(
    aten.expand.default, call(aten.unsqueeze.default, Var("found"), 2), Var("repeated")
)
_COPIED = call(
    aten.reshape.default, Either((_REPEATED, call(aten.clone.default, _REPEATED))), Var("shape")
)


def _grouped(node: Any) -> Any:
    """Return the keys [B, groups, S, D] that a node copies to all heads, or the node."""
    for bound in match(_COPIED, node):
        found, repeated = bound["found"], node.args[0].meta["val"].shape
        batch, groups, count, *rest = repeated
        same = len(repeated) == 5 and same_shape(found.meta["val"].shape, (batch, groups, *rest))
        if same and same_shape(node.meta["val"].shape, (batch, groups * count, *rest)):
            return found
    return node


def _mask_before(node: Any, cudnn: bool) -> fx.Node | None:
    """Return the mask that a node makes another shape or dtype of."""
    found: Any = None
    if node.target is aten.expand.default:
        shape, expanded = node.args[0].meta["val"].shape, node.meta["val"].shape
        fits = len(shape) == len(expanded) == 4 and statically_equal(shape[3], expanded[3])
        return node.args[0] if fits else None
    if node.target is aten.slice.Tensor and node.args[1:3] == (3, 0):
        # It was padded, for the strides of the memory, and is whole again.
        padded = node.args[0]
        if padded.target is aten.constant_pad_nd.default and padded.args[1][0] == 0:
            found = padded.args[0]
    elif node.target is aten.where.self:
        # 0 where it is true, and -inf elsewhere.
        mask, kept, masked = node.args
        if mask.target in (aten.logical_not.default, aten.bitwise_not.default):
            mask, kept, masked = mask.args[0], masked, kept
        lowest = (-torch.inf, _CUDNN_MASKED) if cudnn else (-torch.inf,)
        if dtype_of(mask) == torch.bool and _filled(kept) == 0 and _filled(masked) in lowest:
            found = mask
    same = found is not None and same_shape(found.meta["val"].shape, node.meta["val"].shape)
    return found if same else None


def _filled(node: Any) -> Any:
    """Return the number that a tensor is full of, or None."""
    if node.target is aten.full.default:
        return node.args[1]
    return node.args[0] if node.target is aten.scalar_tensor.default else None


_ROTARY_ATTENTION: Any = ops.rotary_attention

# Heads [B, T, heads, D] are transposed, and multiplied by [B or 1, T, D] for all heads.
_TURNED = call(aten.permute.default, Var("heads"), [0, 2, 1, 3])
_HALVES = [
    call(aten.neg.default, call(aten.slice.Tensor, _TURNED, 3, Var("half"), Var("end"))),
    call(aten.slice.Tensor, _TURNED, 3, 0, Var("half")),
]
_ROTATED = add(
    mul(_TURNED, call(aten.unsqueeze.default, Var("cos"), 1)),
    mul(
        call(aten.cat.default, _HALVES, Either((-1, 3))),
        call(aten.unsqueeze.default, Var("sin"), 1),
    ),
)
_WRITTEN = call(aten.index_put.default, Var("cache"), [None, None, Var("places")], Var("rows"))


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
        called = MutatingCall(_ROTARY_ATTENTION, inputs, caches).insert(graph)
        results = [graph.call_function(operator.getitem, (called, i)) for i in range(3)]
    for old, new in zip((node, *written), results, strict=True):
        new.meta = meta_of(old)
        old.replace_all_uses_with(new)
    called.meta["val"] = tuple(each.meta["val"] for each in results)
    graph.erase_node(node)
    return True


def _inputs(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of the call for attention, or None if something else is before it."""
    given: Any = node.args
    q, keys, values, mask, span, counters, scale = given
    written = [bound for each in (keys, values) for bound in match(_WRITTEN, each)]
    if len(written) < 2:
        return None
    (cached_keys, places, new_keys), (cached_values, same_places, new_values) = (
        (bound["cache"], bound["places"], bound["rows"]) for bound in written
    )
    dimensions = [each.meta["val"].ndim for each in (cached_keys, cached_values, places)]
    if same_places is not places or dimensions != [4, 4, 1]:
        return None
    query, key, value = _rotated(q), _rotated(new_keys), next(match(_TURNED, new_values), None)
    if query is None or key is None or value is None:
        return None
    eps = {each["eps"] for each in (query, key)} - {None}
    if (query["cos"], query["sin"]) != (key["cos"], key["sin"]) or len(eps) > 1:
        return None
    tensors = {
        "q": query["x"],
        "k": key["x"],
        "v": value["heads"],
        "q_weight": query["weight"],
        "k_weight": key["weight"],
        "cos": query["cos"],
        "sin": query["sin"],
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


def _start_of(places: fx.Node) -> Any:
    """Return the count c of positions c, c + 1, ..., which need no kernel then, or positions."""
    for found in match(add(Var("steps"), Var("start")), places):
        steps, start = found["steps"], found["start"]
        if not isinstance(steps, fx.Node) or steps.target is not torch.ops.prims.iota.default:
            continue
        is_range = (steps.kwargs["start"], steps.kwargs["step"]) == (0, 1)
        if is_range and dtype_of(start) == torch.int64 and start.meta["val"].ndim == 0:
            return start
    return places


def _rotated(node: Any) -> Bound | None:
    """Return x, a weight and eps of heads that are normed and rotated, with the tables cos, sin."""
    for found in match(_ROTATED, node):
        heads = found["heads"]
        batch, *rest, _, width = heads.meta["val"].shape
        tables = [found[name].meta["val"].shape for name in ("cos", "sin")]
        known = all(
            len(each) == 3
            and same_shape(each[1:], (*rest, width))
            and any(statically_equal(each[0], n) for n in (1, batch))
            for each in tables
        )
        half, end = found["half"], found["end"]
        if not known or not all(isinstance(each, int) for each in (width, half, end)):
            continue
        if 2 * half != width or end < width:
            continue
        for bound in match(rms_norm(), heads):
            if list(bound["dims"]) in ([-1], [3]) and bound["weight"].meta["val"].ndim == 1:
                return {**found, **bound}
        return {**found, "x": heads, "weight": None, "eps": None}
    return None
