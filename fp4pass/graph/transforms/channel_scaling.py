"""Finding what scales the channels of a tensor that only linears read.

Dividing channel j of a fold's parameters by s_j divides channel j of the tensor, and multiplying
the columns j of the linears by s_j makes up for it: every result stays as it was, to the bit if
s_j is a power of two and no value leaves the range of its dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...quantization.observer import OBSERVERS, Observer, is_hooked
from ..match import LinearNode, find_linears, match_linear, weight_readers

_aten = torch.ops.aten

# f(x / s, ...) = f(x, ...) / s for every s > 0 in each channel, x the first argument.
_HOMOGENEOUS = frozenset(
    {
        F.dropout,
        F.leaky_relu,
        F.relu,
        torch.relu,
        "bfloat16",
        "clone",
        "contiguous",
        "float",
        "half",
        "relu",
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.dropout.default,
        _aten.leaky_relu.default,
        _aten.relu.default,
    }
)
_HOMOGENEOUS_MODULES = (nn.Dropout, nn.Identity, nn.LeakyReLU, nn.ReLU)
_CASTS = frozenset({"to", _aten.to.dtype, _aten._to_copy.default})
_VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})
_PRODUCTS = frozenset({operator.mul, torch.mul, "mul", _aten.mul.Tensor})
_SUMS = frozenset({operator.add, torch.add, "add", _aten.add.Tensor})

# The parameters of what they return, after (input, normalized_shape).
_NORMS = {
    F.layer_norm: ("weight", "bias"),
    F.rms_norm: ("weight",),
    _aten.layer_norm.default: ("weight", "bias"),
    _aten.rms_norm.default: ("weight",),
}
_NORM_MODULES = (nn.LayerNorm, nn.RMSNorm)

# They look at no value.
_CHECKS = frozenset({_aten._assert_tensor_metadata.default})


@dataclass(frozen=True)
class Channels:
    """A parameter `name` of `holder` whose slices along `dim` belong to the channels."""

    holder: nn.Module
    name: str
    dim: int

    @property
    def tensor(self) -> Tensor:
        """The parameter, channels first."""
        return self.holder._parameters[self.name].detach().movedim(self.dim, 0)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Fold:
    """Linears that alone read one tensor, and the parameters that scale its channels.

    divided: to be divided by the scales; weights: those of the linears, to be multiplied by them.
    """

    linears: tuple[LinearNode, ...]
    divided: tuple[Channels, ...]
    weights: tuple[Channels, ...]

    @property
    def observers(self) -> list[Observer]:
        """What observes the tensor before one or several of the linears."""
        found = (o for each in self.linears for o in each.holder.__dict__.get(OBSERVERS, ()))
        return list({id(observer): observer for observer in found}.values())


def find_folds(graph: fx.Graph, own: Collection[int]) -> list[Fold]:
    """Every fold of a graph, in its order.

    own: the addresses of parameters that nothing outside the graph has.
    """
    return _Finder(graph, own).find()


class _Finder:
    """Finds the folds of a graph."""

    def __init__(self, graph: fx.Graph, own: Collection[int]) -> None:
        assert graph.owning_module is not None
        self.graph = graph
        self.module = graph.owning_module
        self.own = own
        # By the identity of a parameter: the nodes that read it.
        self.readers: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                parameter = self._parameter(node)
                self.readers.setdefault(id(parameter), []).extend(weight_readers(node))
            elif node.op == "call_module":
                for parameter in self._called(node).parameters():
                    self.readers.setdefault(id(parameter), []).append(node)

    def find(self) -> list[Fold]:
        """In the order of the graph."""
        groups: dict[fx.Node, list[LinearNode]] = {}
        for linear in find_linears(self.graph):
            groups.setdefault(linear.source, []).append(linear)
        found = (self._fold(source, linears) for source, linears in groups.items())
        return [fold for fold in found if fold is not None]

    def _fold(self, source: fx.Node, linears: list[LinearNode]) -> Fold | None:
        weights = [self._weight(linear, rows=False) for linear in linears]
        known = self._all(weights)
        if known is None or any(linear.bias is source for linear in linears):
            return None
        readers = {linear.node for linear in linears}
        divided = self._divided(source, readers, len(known[0].tensor))
        if divided is None or not _observe_no_other(linears):
            return None
        return Fold(tuple(linears), tuple(divided), tuple(known))

    def _divided(self, node: object, readers: set[fx.Node], width: int) -> list[Channels] | None:
        """The parameters that scale the channels of a node's value, [..., width], for `readers`
        alone; None if there are none."""
        if not isinstance(node, fx.Node) or self._users(node) != readers:
            return None
        linear = match_linear(node)
        if linear is not None:
            return self._rows(linear, width)
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            return self._all([self._vector(self.module.get_submodule(path), name, width)])
        if node.op == "call_module":
            return self._of_module(node, width)
        if node.target in _NORMS:
            return self._of_norm(node, width)
        operands = node.args[:2]
        if node.op not in ("call_function", "call_method") or not operands:
            return None
        if (
            node.target in _HOMOGENEOUS
            or (node.target in _CASTS and _is_to_float(node))
            or (node.target in _VIEWS and _are_rows(node, width))
        ):
            return self._divided(operands[0], {node}, width)
        if node.target in _PRODUCTS and len(operands) == 2 and operands[0] is not operands[1]:
            # Of act(gate) * up, the second.
            found = (self._divided(each, {node}, width) for each in reversed(operands))
            return next((each for each in found if each is not None), None)
        if node.target in _SUMS and len(operands) == 2 and operands[0] is not operands[1]:
            parts = [self._divided(each, {node}, width) for each in operands]
            return None if None in parts else [each for part in parts for each in part or ()]
        return None

    def _of_module(self, node: fx.Node, width: int) -> list[Channels] | None:
        """Of what a module of torch.nn returns."""
        module = self._called(node)
        if is_hooked(module):
            return None
        if type(module) in _HOMOGENEOUS_MODULES:
            return self._divided(node.args[0] if node.args else None, {node}, width)
        if type(module) not in _NORM_MODULES or module._parameters.get("weight") is None:
            return None
        names = [name for name, value in module._parameters.items() if value is not None]
        return self._all([self._vector(module, name, width) for name in names])

    def _of_norm(self, node: fx.Node, width: int) -> list[Channels] | None:
        """Of what a function that normalizes returns."""
        names = ("input", "normalized_shape", *_NORMS[node.target])
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        vectors = [given.get(name) for name in names[2:]]
        if vectors[0] is None:
            return None
        found: list[Channels] = []
        for vector in vectors:
            # A sum or a product there would be found as well.
            part = [] if vector is None else self._divided(vector, {node}, width)
            if part is None:
                return None
            found += part
        return found

    def _rows(self, linear: LinearNode, width: int) -> list[Channels] | None:
        """The rows of a linear's weight, and its bias."""
        found = [self._weight(linear, rows=True)]
        if found[0] is None or len(found[0].tensor) != width:
            return None
        if linear.called and linear.holder._parameters.get("bias") is not None:
            found.append(self._vector(linear.holder, "bias", width))
        rows = self._all(found)
        if linear.bias is None or rows is None:
            return rows
        bias = self._divided(linear.bias, {linear.node}, width)
        return None if bias is None else rows + bias

    def _weight(self, linear: LinearNode, rows: bool) -> Channels | None:
        """The weight of a linear, by its rows, which make outputs, or by its columns."""
        weight = linear.holder._parameters.get("weight")
        if weight is None or weight.ndim != 2 or (linear.called and is_hooked(linear.holder)):
            return None
        dim = int(rows == linear.transposed)
        return Channels(linear.holder, "weight", dim) if self._is_own(weight) else None

    def _vector(self, holder: nn.Module, name: str, width: int) -> Channels | None:
        """A parameter of one number for each channel."""
        vector = holder._parameters.get(name)
        if vector is None or tuple(vector.shape) != (width,) or not self._is_own(vector):
            return None
        return Channels(holder, name, 0)

    def _all(self, found: list[Channels | None]) -> list[Channels] | None:
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def _is_own(self, parameter: Tensor) -> bool:
        """Whether one node alone reads a parameter, and it may be written to."""
        return (
            len(self.readers.get(id(parameter), ())) == 1
            and parameter.data_ptr() in self.own
            and parameter.is_floating_point()
            and not parameter.is_inference()
        )

    def _users(self, node: fx.Node) -> set[fx.Node]:
        """What reads the value of a node, observers and checks aside."""
        return {
            user
            for user in node.users
            if user.target not in _CHECKS
            and not (user.op == "call_module" and isinstance(self._called(user), Observer))
        }

    def _called(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def _parameter(self, node: fx.Node) -> object:
        path, _, name = str(node.target).rpartition(".")
        return self.module.get_submodule(path)._parameters.get(name)


def _observe_no_other(linears: list[LinearNode]) -> bool:
    """Whether observers of these linears observe for no other, as those of an old trace might."""
    lists = [each.holder.__dict__.get(OBSERVERS, ()) for each in linears]
    return all(
        not observer.sharers or sum(observer in each for each in lists) == observer.sharers
        for observers in lists
        for observer in observers
    )


def _is_to_float(node: fx.Node) -> bool:
    """Whether a cast is to a floating point dtype."""
    dtypes = [*node.args[1:], *node.kwargs.values()]
    # An input's dtype, as norms cast back to: what it is of multiplied a linear's weight.
    return all(
        isinstance(each, fx.Node) or (isinstance(each, torch.dtype) and each.is_floating_point)
        for each in dtypes
    )


def _are_rows(node: fx.Node, width: int) -> bool:
    """Whether a node views rows of `width` as such rows, by the shapes that export noted."""
    shapes: list[Any] = [
        getattr(each.meta.get("val"), "shape", ()) for each in (node, *node.all_input_nodes)
    ]
    return all(len(shape) > 0 and type(shape[-1]) is int and shape[-1] == width for shape in shapes)
