"""Find linear layers in a graph, put observers before them, replace them, and share repeated work.

A linear layer is a node that multiplies by a stored weight.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .. import ops
from ..nn import linear as layers
from ..record.config import LinearConfig

TRANSPOSES = {
    torch.ops.aten.t.default: (),
    torch.ops.aten.numpy_T.default: (),
    torch.ops.aten.permute.default: ([1, 0],),
    torch.ops.aten.transpose.int: (0, 1),
}

# The arguments of products, and whether the weight among them is [K, N].
_PRODUCTS: dict[object, tuple[tuple[str, ...], bool]] = {
    F.linear: (("input", "weight", "bias"), False),
    torch.ops.aten.linear.default: (("input", "weight", "bias"), False),
    torch.ops.aten.addmm.default: (("bias", "input", "weight"), True),
    torch.ops.aten.mm.default: (("input", "weight"), True),
}

# These may stand between two readers of a tensor, and have no schema to say that they write.
_READERS = frozenset({operator.getitem, F.linear, "view"})

# A forward of a linear that names anything else is not run.
_NAMES = {"weight", "bias", "T", "mT", "t", "transpose", "matmul", "linear", "add"}
_NAMES |= {"torch", "nn", "functional", "F"}

# Errors of a forward that computes something else.
_FAILURES = (AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)

# They look at no value.
_CHECKS = frozenset({torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten.sym_size.int})


@dataclass(frozen=True)
class LinearNode:
    """A product by a stored weight."""

    node: fx.Node  # computes it
    source: fx.Node  # its input
    holder: nn.Module  # the module that the weight belongs to
    path: str  # of the holder, in the graph's module
    bias: fx.Node | None  # a bias that is not read through the holder
    transposed: bool  # the weight is stored as [K, N]
    called: bool  # the node calls the holder as a module


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, which stores its weight as [K, N]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes just x W^T + b with its own `weight` and `bias`."""
    # A subclass of nn.Linear may have its own constructor, and a forward that computes just that.
    # Other methods disqualify it: a caller might need them, and they would be lost with its class.
    if not isinstance(module, nn.Linear):
        return is_conv1d(module)
    above = itertools.takewhile(lambda cls: cls is not nn.Linear, type(module).__mro__)
    own = {
        name
        for cls in above
        for name, value in vars(cls).items()
        if callable(value) or not name.startswith("__")
    }
    if own <= {"__init__"}:
        return True
    has_bias = module._parameters.get("bias") is not None
    return own <= {"__init__", "forward"} and _is_product(type(module).forward, has_bias)


@functools.cache
def _is_product(forward: Any, has_bias: bool) -> bool:
    """Return whether a forward is x W^T + b: of what it may name, whether it gives the numbers."""
    if not isinstance(forward, FunctionType):
        return False
    code = forward.__code__
    if code.co_argcount != 2 or code.co_freevars or not _NAMES.issuperset(code.co_names):
        return False
    # Whole numbers, whose sums are exact.
    x, weight, bias = (
        torch.arange(math.prod(shape), dtype=torch.float64, device="cpu").pow(2).view(shape) % 23
        for shape in ((2, 4, 3), (5, 3), (5,))
    )
    layer = SimpleNamespace(weight=weight, bias=bias if has_bias else None)
    try:
        # Of both signs, for a forward that looks at its input.
        found = [(forward(layer, each), F.linear(each, weight, layer.bias)) for each in (x, -x)]
        return all(torch.equal(output, expected) for output, expected in found)
    except _FAILURES:
        return False


def find_linears(graph: fx.Graph) -> list[LinearNode]:
    """Return every linear of a graph, in its order."""
    return [linear for node in graph.nodes if (linear := match_linear(node)) is not None]


def match_linear(node: fx.Node) -> LinearNode | None:
    """Return the linear that a node is: a module, or a product by a parameter called `weight`."""
    if node.op == "call_module":
        module, inputs = module_of(node), [*node.args, *node.kwargs.values()]
        fits = is_linear(module) or isinstance(module, layers.QuantizedLinear)
        if not fits or len(inputs) != 1 or not isinstance(inputs[0], fx.Node):
            return None
        path, transposed = str(node.target), is_conv1d(module)
        return LinearNode(node, inputs[0], module, path, None, transposed, called=True)
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return None
    names, transposed = _PRODUCTS[node.target]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    # alpha and beta of addmm.
    if any(value != 1 for name, value in given.items() if name not in names):
        return None
    source, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    while isinstance(weight, fx.Node) and weight.target in TRANSPOSES:
        if tuple(weight.args[1:]) != TRANSPOSES[weight.target]:
            return None
        weight, transposed = weight.args[0], not transposed
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    if not isinstance(source, fx.Node) or not (bias is None or isinstance(bias, fx.Node)):
        return None
    assert node.graph.owning_module is not None
    path, _, name = str(weight.target).rpartition(".")
    holder = node.graph.owning_module.get_submodule(path)
    is_stored = (
        isinstance(holder._parameters.get(name), nn.Parameter) or layers.PACKED in holder._buffers
    )
    if name != "weight" or not is_stored:
        return None
    return LinearNode(node, source, holder, path, bias, transposed, called=False)


def weight_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that use what a node reads, or its transpose."""
    for user in node.users:
        if user.target in TRANSPOSES:
            yield from weight_readers(user)
        else:
            yield user


def value_users(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read the values of a node, without observers and checks of shapes."""
    return {user for user in node.users if user.target not in _CHECKS and not only_reads(user)}


def is_written_between(first: fx.Node, last: fx.Node) -> bool:
    """Return whether a node between two others may write to any tensor, as exported graphs do."""
    node = first.next
    while node is not last:
        if _may_write(node):
            return True
        node = node.next
    return False


def _may_write(node: fx.Node) -> bool:
    if node.op == "call_module":
        module = module_of(node)
        known = is_linear(module) or isinstance(module, layers.QuantizedLinear)
        return not (known or only_reads(node))
    if isinstance(node.target, torch._ops.OpOverload):
        # `observe` writes to statistics alone.
        return node.target._schema.is_mutable and node.target.namespace != "fp4pass"
    return node.op.startswith("call_") and node.target not in _READERS


def only_reads(node: fx.Node) -> bool:
    """Return whether a node calls a module that declares to read its input and do no more to it."""
    return node.op == "call_module" and getattr(module_of(node), "only_reads", False)


def module_of(node: fx.Node) -> nn.Module:
    """Return the module that a node calls."""
    assert node.graph.owning_module is not None
    return node.graph.owning_module.get_submodule(str(node.target))


# The attribute of a weight's holder with the observers of its input.
OBSERVERS = "_fp4pass_observers"


def insert_observers(
    graph: fx.Graph,
    wanted: Callable[[LinearNode], bool],
    make: Callable[[list[LinearNode]], nn.Module],
) -> int:
    """Put one observer before each group of linears that read one tensor; return how many."""
    module = graph.owning_module
    assert module is not None
    groups: list[list[LinearNode]] = []
    latest: dict[fx.Node, list[LinearNode]] = {}
    for linear in find_linears(graph):
        own = linear.holder.__dict__.get(OBSERVERS, ())
        readers = [module_of(user) for user in linear.source.users if only_reads(user)]
        # One that an observer of its holder sees in the graph already is done.
        if any(reader is each for reader in readers for each in own) or not wanted(linear):
            continue
        group = latest.get(linear.source, [])
        # A weight used twice on one tensor has seen it twice.
        again = any(other.holder.weight is linear.holder.weight for other in group)
        if not group or again or is_written_between(group[0].node, linear.node):
            group = latest[linear.source] = []
            groups.append(group)
        group.append(linear)
    for group in groups:
        names = (f"fp4pass_observer_{i}" for i in itertools.count())
        name = next(name for name in names if not hasattr(module, name))
        module.add_module(name, make(group))
        with graph.inserting_before(group[0].node):
            graph.call_module(name, (group[0].source,))
    return len(groups)


def rewrite_linears(graph: fx.Graph, config_of: Callable[[LinearNode], LinearConfig | None]) -> int:
    """Replace linears by quantize and matmul nodes on the buffers of their holders, and count."""
    count = 0
    # One by one, for what one replaces may be what the next one reads.
    for node in list(graph.nodes):
        linear = match_linear(node)
        how = None if linear is None else config_of(linear)
        if linear is None or how is None:
            continue
        with graph.inserting_before(linear.node):
            new = _emit(graph, linear, how)
        new.meta = dict(linear.node.meta)
        linear.node.replace_all_uses_with(new)
        operands = linear.node.all_input_nodes
        graph.erase_node(linear.node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _emit(graph: fx.Graph, linear: LinearNode, config: LinearConfig) -> fx.Node:
    """Trace what a quantized linear layer computes into the graph."""
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def read(name: str) -> Any:
        if getattr(linear.holder, name) is None:
            return None
        path = f"{linear.path}.{name}" if linear.path else name
        # graph.get_attr warns of the plain tensors that functional_call puts in.
        return fx.Proxy(graph.create_node("get_attr", path), tracer)

    bias: Any = None
    if linear.called:
        bias = read("bias")
    elif linear.bias is not None:
        bias = fx.Proxy(linear.bias, tracer)
    scale = read(layers.SCALE)
    if not config.format.has_float_scale:
        scale = scale.view(torch.uint8)
    packed, global_scale = read(layers.PACKED), read(layers.GLOBAL)
    input_global_scale = None if config.input_format is None else read(layers.INPUT_GLOBAL)
    weight = layers.StoredWeight(packed, scale, global_scale, input_global_scale)
    output: fx.Proxy = layers.quantized_linear(
        fx.Proxy(linear.source, tracer), weight, bias, config
    )
    return output.node


def share_quantize(graph: fx.Graph) -> int:
    """Merge equal quantizations, and rotations, of one tensor; return how many went away."""
    targets = {ops.rotate, ops.dynamic_global_scale, ops.quantize, ops.rotate_quantize}
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in targets:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        key = (node.target, source, *(_constant(a) for a in node.args[1:]))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if is_written_between(first, node):
            seen[key] = node
            continue
        operands = node.all_input_nodes
        # The products must read the scale that was used.
        for old, new in zip(node.args[1:], first.args[1:], strict=True):
            if isinstance(old, fx.Node) and isinstance(new, fx.Node) and old is not new:
                old.replace_all_uses_with(new)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        _erase_unused(graph, operands)
        count += 1
    return count


def _constant(argument: Any) -> Any:
    """Return an argument as a key: a stored scalar is the tensor that it is, under any name."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        module: Any = argument.graph.owning_module
        for name in str(argument.target).split("."):
            module = getattr(module, name)
        if isinstance(module, Tensor) and module.numel() == 1 and not module.is_meta:
            return id(module)
    return argument


def _erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase reads of attributes, and transposes of them, that nothing uses any more."""
    for node in nodes:
        if node.op == "placeholder" or node.users or node._erased:
            continue
        if node.op == "get_attr" or node.target in TRANSPOSES:
            operands = node.all_input_nodes
            graph.erase_node(node)
            _erase_unused(graph, operands)
