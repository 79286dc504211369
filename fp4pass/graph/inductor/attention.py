"""Replace attention of few queries by an operator that reads the cache in place.

Models copy keys and values for each head of a group, and read all of a static cache, with a mask
for its empty part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import statically_equal
from .fusions import on_gpu
from .pattern import NARROW_DTYPES, dtype_of, insert, node_pass, same_shape

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
    call = _read(node) if result.args[1:] == (0,) and eligible(result) else None
    if call is None:
        return False
    *tensors, mask, scale = call
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


def _grouped(node: Any) -> Any:
    """Return the keys [B, groups, S, D] that a node copies to all heads, or the node."""
    # As expand -> clone, if any -> reshape.
    copied = node.args[0] if node.target is aten.reshape.default else node
    copied = copied.args[0] if copied.target is aten.clone.default else copied
    if copied is node or copied.target is not aten.expand.default:
        return node
    before = copied.args[0]
    repeated = copied.meta["val"].shape
    if before.target is not aten.unsqueeze.default or before.args[1] != 2 or len(repeated) != 5:
        return node
    found, (batch, groups, count, *rest) = before.args[0], repeated
    same = same_shape(found.meta["val"].shape, (batch, groups, *rest))
    same = same and same_shape(node.meta["val"].shape, (batch, groups * count, *rest))
    return found if same else node


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
