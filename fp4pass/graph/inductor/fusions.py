"""Passes that fuse what computes an activation with its quantizer, for the graphs of Inductor.

They read ATen after decompositions and functionalization (a GPU's post-grad graph), where every
node has a fake tensor in meta["val"] and each tensor is quantized once. A pattern reads like the
formula; for float32 its casts are no nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..match import meta_of

aten = torch.ops.aten
ops = torch.ops.fp4pass
CAST = torch.ops.prims.convert_element_type.default
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Var:
    """Any node, or number, the same one wherever it stands."""

    name: str


@dataclass(frozen=True)
class Wide:
    """A tensor, cast to float32 if it is a narrower one."""

    of: Any


@dataclass(frozen=True)
class Narrow:
    """A float32 tensor, cast to a narrower dtype if that is the source's."""

    of: Any


@dataclass(frozen=True)
class Call:
    """A call of one of some operators; of those in COMMUTES the arguments come in any order."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Either:
    """One of some patterns."""

    of: tuple[Any, ...]


COMMUTES = (aten.add.Tensor, aten.mul.Tensor)


def _mul(a: Any, b: Any) -> Call:
    return Call((aten.mul.Tensor, aten.mul.Scalar), (a, b))


def _add(a: Any, b: Any) -> Call:
    return Call((aten.add.Tensor, aten.add.Scalar), (a, b))


def _call(target: Any, *args: Any) -> Call:
    return Call((target,), args)


X, UP, WEIGHT, BIAS, EPS = (Var(name) for name in ("x", "up", "weight", "bias", "eps"))
LAST = Var("dims")
WIDE = Wide(X)


def _rms_norm() -> Any:
    square = Either((_call(aten.pow.Tensor_Scalar, WIDE, 2), _mul(WIDE, WIDE)))
    mean = _call(aten.mean.dim, square, LAST, True)
    return _mul(Narrow(_mul(WIDE, _call(aten.rsqrt.default, _add(mean, EPS)))), WEIGHT)


def _layer_norm(weight: bool, bias: bool) -> Any:
    both = _call(aten.var_mean.correction, WIDE, LAST)
    variance, mean = (_call(operator.getitem, both, i) for i in range(2))
    inverse = _call(aten.rsqrt.default, _add(variance, EPS))
    normal = _mul(_call(aten.sub.Tensor, WIDE, mean), inverse)
    if weight:
        normal = _mul(normal, Either((WEIGHT, Wide(WEIGHT))))
    if bias:
        normal = _add(normal, Either((BIAS, Wide(BIAS))))
    return Narrow(normal)


def _silu() -> Any:
    grown = _add(_call(aten.exp.default, _call(aten.neg.default, WIDE)), 1)
    by_sigmoid = _mul(WIDE, _call(aten.sigmoid.default, WIDE))
    return Narrow(Either((_call(aten.div.Tensor, WIDE, grown), by_sigmoid)))


def _gelu() -> Any:
    erf = _call(aten.erf.default, _mul(WIDE, 0.7071067811865476))
    return Narrow(_mul(_mul(WIDE, 0.5), _add(erf, 1)))


def _gelu_by_tanh(x: Any, cube: Any) -> Any:
    inner = _mul(_add(x, _mul(cube, 0.044715)), 0.7978845608028654)
    return _mul(_mul(x, 0.5), _add(_call(aten.tanh.default, inner), 1))


RMS_NORM = _rms_norm()
# With weight and bias, and without what is missing.
LAYER_NORMS = tuple(_layer_norm(w, b) for w in (True, False) for b in (True, False))
ACTIVATIONS = {
    "silu": _silu(),
    "gelu": _gelu(),
    "gelu_tanh": Narrow(_gelu_by_tanh(WIDE, _mul(_mul(WIDE, WIDE), WIDE))),
    "gelu_new": _gelu_by_tanh(X, _call(aten.pow.Tensor_Scalar, X, 3)),
}


def match(pattern: Any, value: Any, bound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every way in which `value`, a node or an argument, is an instance of a pattern.

    bound: what variables stand for so far.
    """
    if isinstance(pattern, Var):
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}
        elif bound[pattern.name] is value or _same_list(bound[pattern.name], value):
            yield bound
    elif isinstance(pattern, Either):
        for each in pattern.of:
            yield from match(each, value, bound)
    elif isinstance(pattern, Wide | Narrow):
        yield from _match_cast(pattern, value, bound)
    elif isinstance(pattern, Call):
        yield from _match_call(pattern, value, bound)
    elif not isinstance(value, fx.Node) and value == pattern:
        yield bound


def _same_list(a: Any, b: Any) -> bool:
    return isinstance(a, list | tuple) and isinstance(b, list | tuple) and list(a) == list(b)


def _match_cast(
    pattern: Wide | Narrow, value: Any, bound: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if _dtype(value) is None:
        return
    wide = isinstance(pattern, Wide)
    if value.target is CAST:
        before, after = _dtype(value.args[0]), _dtype(value)
        narrow, full = (before, after) if wide else (after, before)
        if full == torch.float32 and narrow in DTYPES[:2]:
            yield from match(pattern.of, value.args[0], bound)
    if _dtype(value) == torch.float32:
        yield from match(pattern.of, value, bound)


def _match_call(pattern: Call, value: Any, bound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not isinstance(value, fx.Node) or value.target not in pattern.targets:
        return
    if not _options_are_plain(value) or len(value.args) != len(pattern.args):
        return
    orders = [value.args]
    if value.target in COMMUTES:
        orders.append(value.args[::-1])
    for args in orders:
        found = [bound]
        for each, arg in zip(pattern.args, args, strict=True):
            found = [more for so_far in found for more in match(each, arg, so_far)]
        yield from found


def _options_are_plain(node: fx.Node) -> bool:
    """Whether keyword arguments say nothing unusual: no other dtype, alpha or correction."""
    if node.target is aten.var_mean.correction:
        return dict(node.kwargs) == {"correction": 0, "keepdim": True}
    return not node.kwargs


@dataclass(frozen=True)
class Quantized:
    """A quantizer whose source nothing else reads. products: what reads the source's dtype."""

    node: fx.Node
    source: fx.Node
    divisor: fx.Node | None
    products: tuple[fx.Node, ...]


def on_gpu(node: fx.Node) -> bool:
    """Whether a node gives a tensor on an NVIDIA GPU."""
    return node.meta["val"].device.type == "cuda"


def fuse_norms(graph: fx.Graph, wanted: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Fuse RMSNorm or LayerNorm, and a sum before it, with the quantizer that alone reads it.

    wanted: which tensors to quantize so. Returns how many were fused.
    """
    count = 0
    for quantized in _quantized(graph, wanted):
        found = _match_norm(quantized)
        if found is None:
            continue
        plain, summed, x, rest = found
        arguments = (*rest, *quantized.node.args[1:])
        addends = _addends(x, [*rest, quantized.divisor])
        if addends is None:
            with graph.inserting_before(quantized.node):
                fused = graph.call_function(plain, (x, *arguments))
            _replace(quantized, fused, x)
        else:
            last = _latest(graph, [x, *rest, quantized.divisor])
            with graph.inserting_after(last):
                fused = graph.call_function(summed, (*addends, *arguments))
            _replace_sum(quantized, fused, x)
        count += 1
    return count


def fuse_activations(graph: fx.Graph, wanted: Callable[[fx.Node], bool] = on_gpu) -> int:
    """Fuse SiLU or GELU, and a factor beside it, with the quantizer that alone reads the product.

    wanted: which tensors to quantize so. Returns how many were fused.
    """
    count = 0
    for quantized in _quantized(graph, wanted):
        found = _match_activation(quantized.source)
        if found is None:
            continue
        name, x, up = found
        arguments = (x, up, name, *quantized.node.args[1:])
        with graph.inserting_before(quantized.node):
            fused = graph.call_function(ops.activate_quantize.default, arguments)
        _replace(quantized, fused, x)
        count += 1
    return count


def _quantized(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> Iterator[Quantized]:
    """The quantizers that may be fused with what computes their source."""
    for node in list(graph.nodes):
        if node.target is not ops.quantize.default:
            continue
        source, divisor = node.args[:2]
        if not isinstance(source, fx.Node) or _dtype(source) not in DTYPES or not wanted(source):
            continue
        products = tuple(user for user in source.users if user is not node)
        alone = all(_reads_dtype_only(product, source) for product in products)
        if alone and node.args.count(source) == 1 and not _depends(divisor, source):
            yield Quantized(node, source, divisor, products)


def _reads_dtype_only(node: fx.Node, source: fx.Node) -> bool:
    if node.target is not ops.linear_quantized.default:
        return False
    return node.args[0] is source and source not in node.args[1:] and not node.kwargs


def _depends(node: Any, source: fx.Node) -> bool:
    """Whether a node, or None, is computed from another one."""
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if each is source:
            return True
        if isinstance(each, fx.Node) and each not in seen:
            seen.add(each)
            waiting.extend(each.all_input_nodes)
    return False


def _match_norm(quantized: Quantized) -> tuple[Any, Any, fx.Node, tuple[Any, ...]] | None:
    """The operators of a norm and of that of a sum, its input, and weight, bias and eps."""
    source = quantized.source
    for bound in match(RMS_NORM, source, {}):
        if _is_norm(source, bound):
            rest = (bound["weight"], bound["eps"])
            return (
                ops.rms_norm_quantize.default,
                ops.add_rms_norm_quantize.default,
                bound["x"],
                rest,
            )
    for pattern in LAYER_NORMS:
        for bound in match(pattern, source, {}):
            if _is_norm(source, bound):
                affine = (bound.get("weight"), bound.get("bias"), bound["eps"])
                return (
                    ops.layer_norm_quantize.default,
                    ops.add_layer_norm_quantize.default,
                    bound["x"],
                    affine,
                )
    return None


def _is_norm(source: fx.Node, bound: dict[str, Any]) -> bool:
    """Whether what was matched has the shapes and dtypes of a norm over the last dimension."""
    shape = source.meta["val"].shape
    if list(bound["dims"]) not in ([-1], [len(shape) - 1]) or not isinstance(bound["eps"], float):
        return False
    parameters = [bound[name] for name in ("weight", "bias") if name in bound]
    return _is_like(bound["x"], source, shape) and all(
        _is_like(each, source, shape[-1:]) for each in parameters
    )


def _match_activation(source: fx.Node) -> tuple[str, fx.Node, fx.Node | None] | None:
    """The name of an activation, its input, and the factor beside it, if there is one."""
    shape = source.meta["val"].shape
    for name, pattern in ACTIVATIONS.items():
        for whole in (_mul(pattern, UP), pattern):
            for bound in match(whole, source, {}):
                up = bound.get("up")
                beside = up is None or _is_like(up, source, shape)
                if beside and _is_like(bound["x"], source, shape):
                    return name, bound["x"], up
    return None


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _is_like(node: Any, source: fx.Node, shape: Iterable[Any]) -> bool:
    """Whether a node gives a tensor of this shape, with the dtype and device of the source."""
    if _dtype(node) is None:
        return False
    value, like, wanted = node.meta["val"], source.meta["val"], tuple(shape)
    return (
        value.dtype == like.dtype
        and value.device == like.device
        and len(value.shape) == len(wanted)
        and all(statically_known_true(a == b) for a, b in zip(value.shape, wanted, strict=True))
    )


def _addends(x: fx.Node, others: list[Any]) -> tuple[fx.Node, fx.Node] | None:
    """What x is the sum of, if an operator may compute it beside the norm and all still read it."""
    if x.target is not aten.add.Tensor or x.kwargs or not x.meta["val"].is_contiguous():
        return None
    a, b = x.args
    shape = x.meta["val"].shape
    if not (_is_like(a, x, shape) and _is_like(b, x, shape)):
        return None
    if any(_depends(other, x) for other in others):
        return None
    last = _latest(x.graph, [x, *others])
    order = {node: i for i, node in enumerate(x.graph.nodes)}
    if any(order[user] <= order[last] for user in x.users):
        return None
    return a, b  # type: ignore[return-value]


def _latest(graph: fx.Graph, nodes: list[Any]) -> fx.Node:
    """The last in the graph of some nodes; what is not a node is passed over."""
    present = {node for node in nodes if isinstance(node, fx.Node)}
    return [node for node in graph.nodes if node in present][-1]


def _replace(quantized: Quantized, fused: fx.Node, x: fx.Node) -> None:
    """Put a fused node in a quantizer's place, and x in its source's."""
    fused.meta = meta_of(quantized.node)
    quantized.node.replace_all_uses_with(fused)
    _erase(quantized, x)


def _replace_sum(quantized: Quantized, fused: fx.Node, x: fx.Node) -> None:
    """The same for a fused node whose first output is the sum x, which it replaces too."""
    graph = quantized.node.graph
    values = (x.meta["val"], *quantized.node.meta["val"])
    fused.meta = meta_of(quantized.node, val=values)
    place = fused
    parts = []
    for i in range(3):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (fused, i))
        place.meta = meta_of(quantized.node, val=values[i])
        parts.append(place)
    parts[0].meta = dict(x.meta)
    for user in list(quantized.node.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(parts[1 + index])
        graph.erase_node(user)
    x.replace_all_uses_with(parts[0])
    _erase(quantized, parts[0])
    graph.erase_node(x)


def _erase(quantized: Quantized, x: fx.Node) -> None:
    """Erase a quantizer and all that only its source was computed from."""
    graph = quantized.node.graph
    for product in quantized.products:
        product.replace_input_with(quantized.source, x)
        product.meta = meta_of(product)
    graph.erase_node(quantized.node)
    waiting = [quantized.source]
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or node._erased or node is x:
            continue
        waiting.extend(node.all_input_nodes)
        graph.erase_node(node)
