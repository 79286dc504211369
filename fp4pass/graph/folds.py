"""Folds that a whole graph proves: scales of channels and rotations go into weights.

Scales: dividing channel j of a fold's parameters by s_j divides channel j of a tensor, and
multiplying the columns j of the linears that alone read it by s_j makes up for it: every result
stays as it was, to the bit if s_j is a power of two and no value leaves the range of its dtype.
Rotations: D goes into the rows of the linear before the linears that would rotate their input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .rewrite import LinearNode, find_linears, match_linear, module_of, value_users, weight_readers

_aten = torch.ops.aten

# f(x / s, ...) = f(x, ...) / s for every s > 0 in each channel, x the first argument.
_HOMOGENEOUS = {
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.dropout.default,
    _aten.leaky_relu.default,
    _aten.relu.default,
}
_CASTS = {_aten.to.dtype, _aten._to_copy.default}
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}

# The parameters that scale and shift their results, after (input, normalized_shape).
_NORMS: dict[object, tuple[str, ...]] = {
    _aten.layer_norm.default: ("weight", "bias"),
    _aten.rms_norm.default: ("weight",),
}

# These commute with a product along the last dimension, as long as that stays as it is.
_KEEPS = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.detach.default,
    _aten.dropout.default,
    _aten.reshape.default,
    _aten.view.default,
}


@dataclass(frozen=True)
class Channels:
    """A parameter `name` of `holder` whose slices along `dim` belong to the channels."""

    holder: nn.Module
    name: str
    dim: int

    @property
    def tensor(self) -> Tensor:
        """The parameter, channels first."""
        parameter = self.holder._parameters[self.name]
        assert parameter is not None
        return parameter.detach().movedim(self.dim, 0)


@dataclass(frozen=True)
class ScaleFold:
    """Linears that alone read one tensor, and the parameters that scale its channels."""

    linears: tuple[LinearNode, ...]  # the readers
    divided: tuple[Channels, ...]  # parameters to be divided by the scales
    weights: tuple[Channels, ...]  # those of the linears, to be multiplied by the scales


def fold_scales(
    graph: fx.Graph, own: Collection[int], choose: Callable[[ScaleFold], Tensor | None]
) -> list[tuple[ScaleFold, Tensor]]:
    """Fold scales into the parameters of a graph; return the folds in its order, and exponents."""
    # `choose` gives the exponents [K] of the scales of a fold, or None; a channel whose parameters
    # would lose a bit keeps scale 1. `own` are the addresses of parameters that only the graph has.
    done = []
    # The last first: a linear's rows are divided before its columns are looked at.
    for fold in reversed(_Finder(graph, own).find()):
        exponents = choose(fold)
        if exponents is None:
            continue
        changes = [(each, -exponents) for each in fold.divided]
        changes += [(each, exponents) for each in fold.weights]
        for each, change in changes:
            exact = _is_exact(each.tensor, change).to(exponents.device)
            exponents = torch.where(exact, exponents, 0)
        if not exponents.any():
            continue
        scale(fold, exponents)
        done.append((fold, exponents))
    return done[::-1]


def scale(fold: ScaleFold, exponents: Tensor) -> None:
    """Multiply the columns of the weights of a fold by 2^exponents, and divide its parameters."""
    with torch.no_grad():
        for each in fold.divided:
            each.tensor.mul_(_factors(-exponents, each.tensor))
        for each in fold.weights:
            each.tensor.mul_(_factors(exponents, each.tensor))


class _Finder:
    """Finds the folds of a graph."""

    def __init__(self, graph: fx.Graph, own: Collection[int]) -> None:
        assert graph.owning_module is not None
        self.graph, self.module, self.own = graph, graph.owning_module, own
        # By the identity of a parameter: how many nodes read it.
        self.readers: Counter[int] = Counter()
        for node in graph.nodes:
            if node.op == "get_attr":
                holder, name = self._place_of(node)
                count = len(list(weight_readers(node)))
                self.readers[id(holder._parameters.get(name))] += count
            elif node.op == "call_module":
                self.readers.update(map(id, module_of(node).parameters()))

    def find(self) -> list[ScaleFold]:
        """Return every fold, in the order of the graph."""
        groups: dict[fx.Node, list[LinearNode]] = {}
        for linear in find_linears(self.graph):
            groups.setdefault(linear.source, []).append(linear)
        folds = []
        for source, linears in groups.items():
            found = [self._weight(linear, rows=False) for linear in linears]
            weights = [each for each in found if each is not None]
            if len(weights) < len(found) or any(linear.bias is source for linear in linears):
                continue
            readers = {linear.node for linear in linears}
            divided = self._divided(source, readers, len(weights[0].tensor))
            if divided is not None:
                folds.append(ScaleFold(tuple(linears), tuple(divided), tuple(weights)))
        return folds

    def _divided(self, node: object, readers: set[fx.Node], width: int) -> list[Channels] | None:
        """Return the parameters that scale the channels of a value [..., width], or None."""
        # Nothing else may read it.
        if not isinstance(node, fx.Node) or value_users(node) != readers:
            return None

        def all_of(values: Iterable[object]) -> list[Channels] | None:
            parts = [self._divided(each, {node}, width) for each in values]
            return None if None in parts else [each for part in parts for each in part or ()]

        linear = match_linear(node)
        if linear is not None:
            weight = self._weight(linear, rows=True)
            if weight is None or len(weight.tensor) != width:
                return None
            biases = all_of([] if linear.bias is None else [linear.bias])
            return None if biases is None else [weight, *biases]
        if node.op == "get_attr":
            vector = self._channels(*self._place_of(node), 0)
            return None if vector is None or vector.tensor.shape != (width,) else [vector]
        if node.target in _NORMS:
            names = ("input", "normalized_shape", *_NORMS[node.target])
            given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
            vectors = [given.get(name) for name in names[2:]]
            # A sum or a product there would be found as well.
            return None if vectors[0] is None else all_of(v for v in vectors if v is not None)
        operands = node.args[:2]
        # Views of rows as such rows, by the shapes of export.
        both: tuple[Any, ...] = (node, operands[0]) if node.target in _VIEWS else ()
        shapes: list[Any] = [getattr(each.meta.get("val"), "shape", ()) for each in both]
        are_rows = all(shape and type(shape[-1]) is int and shape[-1] == width for shape in shapes)
        if (
            node.target in _HOMOGENEOUS
            or (node.target in _CASTS and _is_to_float(node))
            or (node.target in _VIEWS and are_rows)
        ):
            return all_of(operands[:1])
        if len(operands) < 2 or operands[0] is operands[1]:
            return None
        if node.target is _aten.mul.Tensor:
            # Of act(gate) * up, the second.
            found = (all_of([each]) for each in reversed(operands))
            return next((each for each in found if each is not None), None)
        return all_of(operands) if node.target is _aten.add.Tensor else None

    def _weight(self, linear: LinearNode, rows: bool) -> Channels | None:
        """Return the weight of a linear, by its rows, which make outputs, or by its columns."""
        found = self._channels(linear.holder, "weight", int(rows == linear.transposed))
        return None if found is None or found.tensor.ndim != 2 or linear.called else found

    def _channels(self, holder: nn.Module, name: str, dim: int) -> Channels | None:
        """Return a parameter that one node alone reads, and that may be written to, or None."""
        parameter = holder._parameters.get(name)
        known = (
            parameter is not None
            and dim < parameter.ndim
            and self.readers[id(parameter)] == 1
            and parameter.data_ptr() in self.own
            and parameter.is_floating_point()
            and not parameter.is_inference()
        )
        return Channels(holder, name, dim) if known else None

    def _place_of(self, node: fx.Node) -> tuple[nn.Module, str]:
        """Return the module that has what a node reads, and its name there."""
        path, _, name = str(node.target).rpartition(".")
        return self.module.get_submodule(path), name


def _is_to_float(node: fx.Node) -> bool:
    """Return whether a cast is to a floating point dtype."""
    dtypes = [*node.args[1:], *node.kwargs.values()]
    # A node is the dtype of an input, which norms cast back to: a linear takes floats alone.
    return all(
        isinstance(each, fx.Node) or (isinstance(each, torch.dtype) and each.is_floating_point)
        for each in dtypes
    )


def _factors(exponents: Tensor, tensor: Tensor) -> Tensor:
    """Return 2^exponents [K] beside a tensor [K, ...], in its dtype."""
    scales = torch.exp2(exponents.double()).to(tensor.device, tensor.dtype)
    return scales.view(-1, *[1] * (tensor.ndim - 1))


def _is_exact(tensor: Tensor, exponents: Tensor) -> Tensor:
    """Return which channels of a tensor [K, ...] keep all bits when they are scaled: bool [K]."""
    factors = _factors(exponents, tensor)
    scaled = tensor * factors
    same = (scaled / factors == tensor) & scaled.isfinite()
    return same.reshape(len(tensor), -1).all(1)


def fold_rotations(
    model: fx.GraphModule, rotations: Mapping[nn.Module, int]
) -> dict[nn.Module, dict[str, Any]]:
    """Find the linears that can give rotated outputs to those that would rotate them."""
    # Only a whole graph proves that nothing else reads an output. All linears of a fold occur once,
    # and nothing shares their parameters; the bias of the first is a parameter beside its weight.
    # By holder, `rotations` are the columns of its input that it rotates together, and the result
    # the fields of its config that change: `output_rotation` of a first linear, `folded` of the
    # others.
    named = model.named_parameters(remove_duplicate=False)
    shared = Counter(id(parameter) for _, parameter in named)
    linears = find_linears(model.graph)
    uses = Counter(linear.holder for linear in linears)

    def is_free(linear: LinearNode) -> bool:
        own = linear.holder._parameters.values()
        is_shared = any(shared[id(parameter)] > 1 for parameter in own)
        return linear.holder in rotations and uses[linear.holder] == 1 and not is_shared

    by_node = {linear.node: linear for linear in linears}
    changes: dict[nn.Module, dict[str, Any]] = {}
    for first in linears:
        readers = _readers(first.node, by_node)
        if not readers or not all(map(is_free, (first, *readers))):
            continue
        # Its bias is read beside its weight, and nowhere else.
        bias, path = first.bias, f"{first.path}.bias".removeprefix(".")
        if bias is not None and (
            (bias.op, bias.target) != ("get_attr", path) or len(bias.users) > 1
        ):
            continue
        size, *others = {rotations[each.holder] for each in readers}
        if size and not others:
            changes.setdefault(first.holder, {})["output_rotation"] = size
            for each in readers:
                changes.setdefault(each.holder, {})["folded"] = True
    return changes


def _readers(node: fx.Node, by_node: dict[fx.Node, LinearNode]) -> list[LinearNode]:
    """Return the linears that a value reaches as it is, none if it reaches anything else."""
    found, waiting = [], [node]
    while waiting:
        value = waiting.pop()
        for user in value_users(value):
            linear = by_node.get(user)
            if linear is not None and linear.source is value and linear.bias is not value:
                found.append(linear)
            elif _keeps(user, value):
                waiting.append(user)
            else:
                return []
    return found


def _keeps(node: fx.Node, value: fx.Node) -> bool:
    """Return whether each last dimension of a value is one of the node's result, unchanged."""
    if node.target not in _KEEPS or node.args[0] is not value:
        return False
    if node.target is _aten.dropout.default:
        return node.args[2] is False
    if node.target not in _VIEWS:
        return True
    before, after = value.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape[-1] == after.shape[-1]
