"""Fuse a quantizer with the node that computes its input, by a table of fusions.

An entry of FUSIONS is a pattern, a check, and the operator that replaces both nodes. To fuse
something else, write the operator (ops/__init__.py), its formula here as the nodes that Inductor
makes of it, and an entry. The graphs are Inductor's after decompositions and functionalization:
every node has a fake tensor in `meta["val"]`, and each tensor is quantized once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import ops
from ..._compat.torch import meta_of
from .pattern import (
    FLOAT_DTYPES,
    Bound,
    Either,
    Narrow,
    Var,
    Wide,
    add,
    call,
    dtype_of,
    match,
    mul,
    node_pass,
    same_shape,
)

aten = torch.ops.aten

X, UP, WEIGHT, BIAS, EPS, DIMS = map(Var, ("x", "up", "weight", "bias", "eps", "dims"))
WIDE = Wide(X)


def rms_norm() -> Any:
    """Llama's RMSNorm, which rounds before it multiplies by the weight."""
    square = Either((call(aten.pow.Tensor_Scalar, WIDE, 2), mul(WIDE, WIDE)))
    mean = call(aten.mean.dim, square, DIMS, True)
    return mul(Narrow(mul(WIDE, call(aten.rsqrt.default, add(mean, EPS)))), WEIGHT)


def _layer_norm(weight: bool, bias: bool) -> Any:
    """F.layer_norm, with a weight and a bias or without."""
    both = call(aten.var_mean.correction, WIDE, DIMS)
    variance, mean = (call(operator.getitem, both, i) for i in range(2))
    inverse = call(aten.rsqrt.default, add(variance, EPS))
    result = mul(call(aten.sub.Tensor, WIDE, mean), inverse)
    if weight:
        result = mul(result, Either((WEIGHT, Wide(WEIGHT))))
    if bias:
        result = add(result, Either((BIAS, Wide(BIAS))))
    return Narrow(result)


_BY_EXP = call(aten.div.Tensor, WIDE, add(call(aten.exp.default, call(aten.neg.default, WIDE)), 1))
_ERF = call(aten.erf.default, mul(WIDE, 0.7071067811865476))


def _gelu_by_tanh(x: Any, cube: Any) -> Any:
    inner = mul(add(x, mul(cube, 0.044715)), 0.7978845608028654)
    return mul(mul(x, 0.5), add(call(aten.tanh.default, inner), 1))


def is_norm(source: fx.Node, bound: Bound) -> bool:
    """Return whether a norm is one of the last dimension, with parameters of its size."""
    shape = source.meta["val"].shape
    if list(bound["dims"]) not in ([-1], [len(shape) - 1]) or not isinstance(bound["eps"], float):
        return False
    parameters = [bound[name] for name in ("weight", "bias") if name in bound]
    return is_like(bound["x"], source, shape) and all(
        is_like(each, source, shape[-1:]) for each in parameters
    )


def norm_of(node: fx.Node) -> Bound | None:
    """Return x, the weight and eps of the RMSNorm that a node is, or None."""
    return next((each for each in match(rms_norm(), node) if is_norm(node, each)), None)


def is_activation(source: fx.Node, bound: Bound) -> bool:
    """Return whether the input, and the factor beside it, have the shape of the result."""
    shape = source.meta["val"].shape
    return all(is_like(bound[name], source, shape) for name in ("x", "up") if name in bound)


# By the names that `activate_quantize` takes.
ACTIVATIONS = {
    "silu": Narrow(Either((_BY_EXP, mul(WIDE, call(aten.sigmoid.default, WIDE))))),
    "gelu": Narrow(mul(mul(WIDE, 0.5), add(_ERF, 1))),
    "gelu_tanh": Narrow(_gelu_by_tanh(WIDE, mul(mul(WIDE, WIDE), WIDE))),
    # GPT-2's, which rounds after every step.
    "gelu_new": _gelu_by_tanh(X, call(aten.pow.Tensor_Scalar, X, 3)),
}


def is_like(value: Any, source: fx.Node, shape: Sequence[Any]) -> bool:
    """Return whether a node gives a tensor of a shape with the dtype and device of another."""
    if dtype_of(value) is None:
        return False
    tensor, like = value.meta["val"], source.meta["val"]
    alike = (tensor.dtype, tensor.device) == (like.dtype, like.device)
    return alike and same_shape(tensor.shape, shape)


# Rows whose products are one launch, in which what is around them may be computed.
FEW_ROWS = 8


@dataclass(frozen=True)
class Fusion:
    """One way to compute the input of a quantizer together with its codes."""

    pattern: Any  # computes the input from a tensor called `x`
    # Whether a match is valid, given the input's node and the bound variables.
    check: Callable[[fx.Node, Bound], bool]
    # Returns the codes and scales of the input; its arguments are x, `operands`, and those of the
    # quantizer but its input.
    operator: Any
    # Variables of the pattern, None for one that is not in it, or plain values.
    operands: tuple[Any, ...]
    # Whether the operator has a residual after x and returns their sum first, so that x = a + b can
    # be computed there too.
    adds: bool = False


FUSIONS = (
    Fusion(rms_norm(), is_norm, ops.norm_quantize, (WEIGHT, None, "rms", EPS), adds=True),
    *(
        Fusion(each, is_norm, ops.norm_quantize, (WEIGHT, BIAS, "layer", EPS), adds=True)
        for each in (
            _layer_norm(weight, bias) for weight in (True, False) for bias in (True, False)
        )
    ),
    *(
        Fusion(pattern, is_activation, ops.activate_quantize, (UP, name))
        for name, activation in ACTIVATIONS.items()
        for pattern in (mul(activation, UP), activation)
    ),
)


def on_gpu(node: fx.Node) -> bool:
    """Return whether a node gives a tensor on an NVIDIA GPU."""
    return node.meta["val"].device.type == "cuda"


def has_few_rows(node: fx.Node) -> bool:
    """Return whether a node gives few rows, for every size that its graph is for."""
    sizes = node.meta["val"].shape[:-1]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= FEW_ROWS


@node_pass
def fuse_quantizers(node: fx.Node, eligible: Callable[[fx.Node], bool] = on_gpu) -> bool:
    """Fuse norms and activations with the quantizers that alone read them, and count these."""
    source, divisor = node.args[:2] if node.target is ops.quantize else (None, None)
    if not isinstance(source, fx.Node) or dtype_of(source) not in FLOAT_DTYPES:
        return False
    # Products that take no more than the dtype of their result.
    products = [user for user in source.users if user is not node]
    alone = all(
        each.target is ops.linear_quantized
        and each.args[0] is source
        and source not in each.args[1:]
        and not each.kwargs
        for each in products
    )
    if not alone or not eligible(source) or _depends_on(divisor, source):
        return False
    for fusion in FUSIONS:
        for bound in match(fusion.pattern, source):
            if fusion.check(source, bound):
                _fuse(node, products, fusion, bound)
                return True
    return False


def _depends_on(node: Any, source: fx.Node) -> bool:
    """Return whether a node is computed from another one, or is it; None is not."""
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if each is source:
            return True
        if isinstance(each, fx.Node) and each not in seen:
            seen.add(each)
            waiting.extend(each.all_input_nodes)
    return False


def _fuse(node: fx.Node, products: Sequence[fx.Node], fusion: Fusion, bound: Bound) -> None:
    """Put the operator of a fusion in a quantizer's place, and its sum in that of x = a + b."""
    source: Any = node.args[0]
    x = bound["x"]
    operands = [bound.get(o.name) if isinstance(o, Var) else o for o in fusion.operands]
    # The quantizer's arguments behind its input: global divisor, format, and method of scales.
    arguments = (*operands, *node.args[1:])
    inputs = {each for each in (x, *arguments) if isinstance(each, fx.Node)}
    addends = addends_of(x, inputs - {x}) if fusion.adds else None
    leading = addends or ((x, None) if fusion.adds else (x,))
    with node.graph.inserting_after(max(inputs)) if addends else node.graph.inserting_before(node):
        fused = node.graph.call_function(fusion.operator, (*leading, *arguments))
    values = node.meta["val"]
    if fusion.adds:
        total = x.meta["val"]
        values = (total if addends else total.new_empty(0), *values)
    fused.meta = meta_of(node, val=values)
    for user in list(node.users):
        index: Any = user.args[1]
        user.args = (fused, index + fusion.adds)
    total = x
    if addends:
        with node.graph.inserting_after(fused):
            total = node.graph.call_function(operator.getitem, (fused, 0))
        total.meta = dict(x.meta)
        x.replace_all_uses_with(total)
    for product in products:
        product.replace_input_with(source, total)
        product.meta = meta_of(product)
    node.graph.erase_node(node)


def addends_of(x: fx.Node, others: set[fx.Node]) -> tuple[Any, ...] | None:
    """Return the terms of x, if it is a sum that nothing reads before all `others` are computed."""
    if x.target is not aten.add.Tensor or x.kwargs or not x.meta["val"].is_contiguous():
        return None
    shape = x.meta["val"].shape
    if not all(is_like(each, x, shape) for each in x.args):
        return None
    if any(_depends_on(other, x) for other in others):
        return None
    last = max(x, *others) if others else x
    return None if any(user <= last for user in x.users) else x.args
