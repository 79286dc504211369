"""Find the linear layers of a model, the matrices that look like one, and adapters around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.transformers_experts import experts_problem
from ..errors import StateError
from ..graph.rewrite import LinearNode, find_linears, is_conv1d, is_linear, weight_readers
from ..nn.experts import QUANTIZED, ExpertStack, stacks_of
from ..nn.linear import PACKED, QuantizedLinear
from ..record.state import has_adapters
from .observers.observer import Observer

# Modules whose parameters are no weights of a product with the activations.
_NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.utils.parametrize.ParametrizationList,
)

_POINTWISE = "a convolution, whose kernel of 1 is a matrix; nn.Linear is what fp4pass quantizes"
_READ = "nn.MultiheadAttention reads it without calling a layer"
_CHANGED = "an adapter changes a parameter of its module at each call (target_parameters of PEFT)"

# Operators whose weights are not those of a product with the activations.
EMBEDDINGS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
_NORMS = frozenset({"batch_norm", "layer_norm", "native_layer_norm"})
_NO_PRODUCTS = EMBEDDINGS | _NORMS | {"conv1d", "conv2d", "conv3d", "convolution"}


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A linear layer of a model, or a parameter that looks like one: E matrices [N, K]."""

    name: str
    module: nn.Module  # holds the weight
    weight_key: int  # equal for layers that share one weight
    shape: tuple[int, ...]  # [N, K], or [E, N, K] for experts
    transposed: bool = False  # the module has the weight as [K, N]
    parent: str = ""  # the name of the module that calls it and its siblings, adapters aside
    stage: tuple[str, ...] = ()  # of experts: the stacks of their module that read one input

    @property
    def matrices(self) -> int:
        """E, the number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """N, the rows of each matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """K, the width of the input."""
        return self.shape[-1]

    @property
    def label(self) -> str:
        """The name for an error; the root of a model has none."""
        return self.name or "the model"


@dataclass(frozen=True, eq=False, kw_only=True)
class SkippedLayer(LinearLayer):
    """A layer that stays as it is, with the reason."""

    skip_reason: str


def scan_layers(model: nn.Module) -> list[LinearLayer]:
    """Return every linear layer, modules first, as a SkippedLayer if no rule can take it."""
    found = list(module_layers(model))
    called = {layer.name for layer in found}
    read = graph_layers(model) if isinstance(model, fx.GraphModule) else ()
    return found + [layer for layer in read if layer.name not in called]


def skip(layer: LinearLayer, reason: str) -> SkippedLayer:
    """Return a layer as one that is skipped."""
    known = {each.name: getattr(layer, each.name) for each in fields(LinearLayer)}
    return SkippedLayer(**known, skip_reason=reason)


def _layer(
    name: str,
    module: nn.Module,
    weight: object,
    transposed: bool = False,
    reason: str = "",
    parent: str | None = None,
) -> LinearLayer:
    """Return a layer, skipped if there is a reason."""
    parent = name.rpartition(".")[0] if parent is None else parent
    shape: tuple[int, ...] = ()
    stage: tuple[str, ...] = ()
    if isinstance(module, ExpertStack):
        shape, stage = tuple(module.dense.shape), module.stage
    elif isinstance(weight, Tensor) and not isinstance(weight, nn.UninitializedParameter):
        shape = tuple(weight.mT.shape if transposed and weight.ndim == 2 else weight.shape)
    layer = LinearLayer(name, module, id(weight), shape, transposed, parent, stage)
    return skip(layer, reason) if reason else layer


def module_layers(model: nn.Module) -> Iterator[LinearLayer]:
    """Yield linear layers that are modules, and matrices of modules that are not linear."""
    called, parent_of, peft = _called_modules(model), parents(model), peft_of(model)
    adapters: set[nn.Module] = peft.adapter_modules(model) if peft else set()
    # The names of the parameters that adapters replace while they run, by module.
    changed: dict[nn.Module, set[str]] = peft.changed_parameters(model) if peft else {}
    # The stacks of experts that each module holds, for itself or for its parent.
    known: dict[nn.Module, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (*QUANTIZED, Observer, ExpertStack)) or module not in called:
            continue
        adapter = "an adapter" if module in adapters else ""
        if isinstance(module, nn.Linear) or is_conv1d(module):
            weight = getattr(module, "weight", None)
            held = _CHANGED if "weight" in changed.get(module, ()) else ""
            reason = adapter or held or _module_problem(module)
            yield _layer(name, module, weight, is_conv1d(module), reason, parent_of(name))
            if weight is module._parameters.get("weight"):
                # A subclass may have further ones.
                yield from _loose_matrices(name, module, adapter, ("weight",))
        elif _is_pointwise(module):
            yield _layer(name, module, module.weight, reason=adapter or _POINTWISE)
        elif not isinstance(module, _NO_MATRICES):
            stacks = stacks_of(module)
            # Experts that are packed in part read the other part without the adapter.
            adapted = any(s.last in changed.get(s.holder, ()) for s in stacks.values())
            reason = adapter or (_CHANGED if adapted else "")
            if stacks and not reason:
                reason = experts_problem(module) or ("a router" if is_router(name) else "")
            for key, stack in stacks.items():
                known.setdefault(stack.holder, set()).add(stack.last)
                path = f"{name}.{key}" if name else key
                yield _layer(path, stack, stack.weight, stack.view.transposed, reason)
            read = _READ if isinstance(module, nn.MultiheadAttention) else ""
            yield from _loose_matrices(name, module, adapter or read, known.get(module, ()))


def _called_modules(model: nn.Module) -> set[nn.Module]:
    if not isinstance(model, fx.GraphModule):
        return set(model.modules())
    targets = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    return {module for target in targets for module in model.get_submodule(target).modules()}


def _module_problem(module: nn.Module) -> str:
    """Return why an nn.Linear cannot be converted, whatever its shape, or ""."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return _READ
    if PACKED in module._buffers:
        return f"its weight is packed already, by {type(module).__name__}"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is computed (a parametrization or weight norm), not a parameter"
    weight = module._parameters["weight"]
    if weight is None:
        return "it has no weight"
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not there yet: run the model once before it is prepared"
    if weight.layout is not torch.strided:
        return f"its weight is not dense ({weight.layout})"
    if not is_linear(module):
        return f"its class {type(module).__name__} is more than an nn.Linear"
    # The weight says how large it is: pruning may leave in_features as they were.
    if weight.ndim != 2:
        order = "[K, N]" if is_conv1d(module) else "[N, K]"
        return f"its weight has shape {tuple(weight.shape)}, not {order}"
    rows, bias = weight.shape[1 if is_conv1d(module) else 0], module._parameters["bias"]
    if bias is not None and bias.shape != (rows,):
        return f"its bias has shape {tuple(bias.shape)}, not [N] = ({rows},)"
    return ""


def _loose_matrices(
    name: str, module: nn.Module, reason: str, known: Container[str]
) -> Iterator[LinearLayer]:
    """Yield matrices that a module multiplies by without an nn.Linear, but for known stacks."""
    for key, parameter in module._parameters.items():
        if key not in known and parameter is not None and _is_matrix(key, parameter):
            path = f"{name}.{key}" if name else key
            why = reason or _loose_reason(path, parameter, type(module).__name__)
            yield _layer(path, module, parameter, reason=why)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter may be multiplied by: no vector, row, filter or bias."""
    if isinstance(parameter, nn.UninitializedParameter):
        return False
    # A stack may have one matrix, and its size counts.
    large = min(parameter.shape[-2:], default=0) > 1 and parameter.shape[-1] >= 16
    return parameter.ndim > 1 and large and not name.endswith("bias")


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether a convolution multiplies each position by one matrix."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.groups > 1:
        return False
    return set(module.kernel_size) == {1} and min(module.in_channels, module.out_channels) > 1


def _loose_reason(path: str, parameter: Tensor, reader: str) -> str:
    """Return why a matrix that `reader` uses in a way of its own is skipped."""
    if is_router(path.rpartition(".")[0]):
        return "a router"
    if parameter.ndim > 2 and "expert" in f"{path} {reader}".lower():
        return f"stacked experts of {reader}, which does not say how it computes with them"
    if parameter.ndim > 2:
        return f"{reader} uses it: {parameter.ndim} dimensions, not the matrix of a linear layer"
    return f"{reader} uses it without a linear layer"


def graph_layers(model: fx.GraphModule) -> Iterator[LinearLayer]:
    """Yield matrices that a graph reads without calling a module."""
    linears: dict[str, list[LinearNode]] = {}
    for linear in find_linears(model.graph):
        if not linear.called:
            name = f"{linear.path}.weight" if linear.path else "weight"
            linears.setdefault(name, []).append(linear)
    readers: dict[str, set[fx.Node]] = {}
    for node in model.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), set()).update(weight_readers(node))
    for target, nodes in readers.items():
        path, _, name = target.rpartition(".")
        holder = model.get_submodule(path)
        parameter = holder._parameters.get(name)
        if parameter is None:
            continue
        found = linears.get(target, [])
        others = sorted({operator_of(n) for n in nodes - {linear.node for linear in found}})
        if not found:
            if others and _is_matrix(name, parameter) and not _NO_PRODUCTS.issuperset(others):
                reason = _loose_reason(target, parameter, ", ".join(others))
                yield _layer(target, holder, parameter, reason=reason)
            continue
        transposed, reason = found[0].transposed, ""
        if any(linear.transposed != transposed for linear in found):
            reason = "the graph multiplies by it and by its transpose"
        elif not _NO_PRODUCTS.issuperset(others):
            reason = f"{', '.join(others)} reads it, too"
        yield _layer(path, holder, parameter, transposed, reason)


def operator_of(node: fx.Node) -> str:
    """Return the name of the function that a node calls, without an overload."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0] if node.op == "call_function" else name


def is_router(name: str) -> bool:
    """Return whether a part of a name says router: in "mlp.gate.wg", not in "mlp.gate_proj"."""
    parts = name.split(".")
    # A gated MLP that is called "gate" has projections.
    return any(
        part in ("router", "shared_expert_gate") or (part == "gate" and not below.endswith("_proj"))
        for part, below in zip(parts, [*parts[1:], ""], strict=True)
    )


def dense_stack(module: nn.Module, transposed: bool) -> Tensor:
    """Return the weight of a layer as a view [E, N, K]; transposed: the module has it as [K, N]."""
    if isinstance(module, ExpertStack):
        return module.dense.detach()
    weight = module.get_parameter("weight").detach()
    return (weight.mT if transposed else weight).unsqueeze(0)


def caller_of(module: nn.Module) -> nn.Module:
    """Return the module that reads a weight when it is called: the layer, or its experts."""
    return module.owner if isinstance(module, ExpertStack) else module


def peft_of(model: nn.Module) -> Any:
    """Return the module `_compat.peft`, None for a model without adapters."""
    if not has_adapters(model):
        return None
    from .._compat import peft

    return peft


def parents(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the path of a module to that of its parent, adapters aside."""
    peft = peft_of(model)
    named = model.named_modules() if peft else ()
    around = {path for path, module in named if peft.wrapped(module) is not None}

    def parent(name: str) -> str:
        path = name.rpartition(".")[0]
        while path in around:
            path = path.rpartition(".")[0]
        return path

    return parent


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that PEFT has put adapters into, which may be the one that is given."""
    peft = peft_of(model)
    return peft.base_of(model) if peft else model


def around_packed(model: nn.Module) -> dict[nn.Module, Any]:
    """Return what PEFT has put around each packed layer that has adapters, by the layer."""
    peft = peft_of(model)
    return peft.around_packed(model, _is_packed) if peft else {}


def forbid_adapter_merge(model: nn.Module) -> None:
    """Have the adapters of a converted model refuse to be merged into packed layers one by one."""
    if peft := peft_of(model):
        peft.refuse_merging(model, _is_packed, refuse_merge)


def _is_packed(layer: object) -> bool:
    return isinstance(layer, QuantizedLinear)


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Raise StateError: a packed layer takes no adapter in by itself, nor gives one back."""
    raise StateError(
        "An adapter cannot be merged into one packed layer and taken out again: the sum is rounded "
        "to 4 bits, in scales that several layers share. Merge for good with fp4pass.merge(model), "
        "keep the adapter beside the model (model.save_pretrained), or call "
        "fp4pass.dequantize(model) and merge into dense weights."
    )
