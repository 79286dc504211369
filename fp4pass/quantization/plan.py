"""Sites: every linear of a model, and what is to become of it.

Rules, built-in exceptions and the shape of the weight decide in this one place. What is left
alone is a site too, with its reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..config import Rule, Settings, check_rules, make_settings
from ..errors import (
    NonFiniteError,
    RuleError,
    ShapeError,
    StateError,
    nearest,
)
from ..graph.match import LinearNode, find_linears, is_conv1d, is_linear, weight_readers
from ..linear import PACKED, QuantizedLinear
from ..methods import Stats, weight_amax, weight_problem
from .observer import OBSERVERS, Observer, collect

_ROUTER_NAMES = ("router", "gate", "shared_expert_gate")

# Modules whose parameters are not the weights of a product with the activations.
_NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.utils.parametrize.ParametrizationList,
)


# Operators whose weights are not those of a product with the activations.
_EMBEDDINGS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
_NO_PRODUCTS = _EMBEDDINGS | {
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "layer_norm",
    "native_layer_norm",
}


@dataclass
class Site:
    """A linear (or a matrix that looks like one) and its fate.

    module: holds the weight, at `name`; weight_key: equal for sites that share one weight;
    reason: why it is left alone, "" if it is not; transposed: the weight is stored as [K, N].
    """

    name: str
    module: nn.Module
    weight_key: int
    shape: tuple[int, ...]
    transposed: bool = False
    settings: Settings | None = None
    reason: str = ""
    global_scale: float = 1.0
    stats: Stats = field(default_factory=Stats)

    @property
    def columns(self) -> int:
        """K, the width of the input."""
        return self.shape[0] if self.transposed else self.shape[1]


def find_sites(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    fmt: str,
    method: object,
    block: int | str = "default",
    weight_only: bool = False,
    activation_scales: str = "naive",
    rotation: int = 0,
) -> list[Site]:
    """Every linear of `model` in the order of its modules, with its settings or a reason.

    Raises RuleError for a rule that matches none of them or takes apart what shares a weight, and
    ShapeError for a rule that names one linear, without a wildcard, that cannot be quantized.
    """
    rules = check_rules(rules)
    defaults: dict[str, Any] = {
        "fmt": fmt,
        "method": method,
        "block": block,
        "weight_only": weight_only,
        "activation_scales": activation_scales,
        "rotation": rotation,
    }
    default = make_settings(**defaults)
    sites = list(module_sites(model))
    called = {site.name for site in sites}
    sites += [site for site in graph_sites(model) if site.name not in called]
    tied = embedding_weights(model)
    heads = output_embeddings(model)
    for site in sites:
        rule = next((rule for rule in rules if fnmatch.fnmatchcase(site.name, rule[0])), None)
        if rule is None:
            site.settings = default
            site.reason = site.reason or built_in_reason(site, heads, tied)
            site.reason = site.reason or _weight_reason(site)
        else:
            _apply_rule(site, rule, defaults)
    _require_matches(rules, sites)
    _require_equal_settings(sites)
    return sites


def _apply_rule(site: Site, rule: Rule, defaults: dict[str, Any]) -> None:
    """Decide a site by the first rule that matches it; one that names it must be possible."""
    pattern, options = rule
    if options is None:
        site.reason = f"rule ({pattern!r}, None)"
        return
    if "fmt" in options:
        defaults = defaults | {"block": "default"}
    site.settings = make_settings(**{**defaults, **options})
    ways_out = f"Leave this layer alone with rules=[({site.name!r}, None)]"
    if site.reason and pattern == site.name:
        raise ShapeError(f"{site.name} cannot be quantized: {site.reason}. {ways_out}.")
    site.reason = site.reason or _weight_reason(site)
    if site.reason and pattern == site.name:
        raise ShapeError(
            f"{site.name}: {site.reason}. {ways_out}, or choose a format with a smaller block or "
            "a smaller rotation."
        )


def _require_matches(rules: Sequence[Rule], sites: Sequence[Site]) -> None:
    names = [site.name for site in sites]
    for pattern, _ in rules:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            continue
        raise RuleError(
            f"The rule for {pattern!r} matches no linear of the model, whose names look like "
            f"{names[0] if names else '(there are none)'!r}.{nearest(pattern, names)}"
        )


def _require_equal_settings(sites: Sequence[Site]) -> None:
    """A weight is packed once, whatever shares it."""
    first: dict[int, Site] = {}
    for site in selected(sites):
        other = first.setdefault(site.weight_key, site)
        if site.settings != other.settings:
            raise RuleError(
                f"{other.name} and {site.name} share one weight, but the rules ask for different "
                "things. Give both the same options."
            )
    for site in sites:
        if site.reason.startswith("rule (") and site.weight_key in first:
            raise RuleError(
                f"{first[site.weight_key].name} and {site.name} share one weight, of which the "
                f"{site.reason} leaves one alone. Give it a pattern for both."
            )


def module_sites(model: nn.Module) -> Iterator[Site]:
    """Linears that are modules, and matrices of modules that are not linears."""
    called = _called_modules(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | Observer) or module not in called:
            continue
        if isinstance(module, nn.Linear) or is_conv1d(module):
            weight = getattr(module, "weight", None)
            shape: tuple[int, ...] = ()
            if isinstance(weight, Tensor) and not isinstance(weight, nn.UninitializedParameter):
                shape = tuple(weight.shape)
            site = Site(name, module, id(weight), shape, transposed=is_conv1d(module))
            site.reason = _module_reason(module)
            yield site
        elif not isinstance(module, _NO_MATRICES):
            yield from _loose_matrices(name, module)


def _called_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of a model that run as modules; others of a graph only hold what it reads."""
    if not isinstance(model, fx.GraphModule):
        return set(model.modules())
    targets = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    return {module for target in targets for module in model.get_submodule(target).modules()}


def _module_reason(module: nn.Module) -> str:
    """Why an nn.Linear cannot be converted whatever its shape, or ""."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if PACKED in module._buffers:
        return f"its weight is packed already, by {type(module).__name__}"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is computed (a parametrization or weight norm), not a parameter"
    if isinstance(module._parameters["weight"], nn.UninitializedParameter):
        return "its weight is not there yet: run the model once before it is prepared"
    if not is_linear(module):
        return f"its class {type(module).__name__} is more than an nn.Linear"
    return ""


def _loose_matrices(name: str, module: nn.Module) -> Iterator[Site]:
    """Matrices that a module multiplies by without an nn.Linear: experts, routers, in_proj."""
    for key, parameter in module._parameters.items():
        if parameter is None or not _is_matrix(key, parameter):
            continue
        path = f"{name}.{key}" if name else key
        reason = _loose_reason(path, parameter, type(module).__name__)
        yield Site(path, module, id(parameter), tuple(parameter.shape), reason=reason)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter may be multiplied by: not a vector, a table of one row, a filter or
    the stacked biases of experts."""
    large = parameter.ndim > 1 and min(parameter.shape) > 1 and parameter.shape[-1] >= 16
    return large and not name.endswith("bias")


def _loose_reason(path: str, parameter: Tensor, reader: str) -> str:
    """Why a matrix at `path`, which `reader` uses in a way of its own, is left alone."""
    if path.split(".")[-2:-1] in [[name] for name in _ROUTER_NAMES]:
        return "a router"
    if parameter.ndim > 2:
        return "stacked experts: one parameter of several matrices, not linears"
    return f"{reader} uses it without a linear"


def graph_sites(model: nn.Module) -> Iterator[Site]:
    """Matrices that a graph reads without calling a module: linears, and what cannot be one."""
    if not isinstance(model, fx.GraphModule):
        return
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
        others = sorted({_operator(n) for n in nodes - {linear.node for linear in found}})
        shape = tuple(parameter.shape)
        if not found:
            if others and _is_matrix(name, parameter) and not _NO_PRODUCTS.issuperset(others):
                reason = _loose_reason(target, parameter, ", ".join(others))
                yield Site(target, holder, id(parameter), shape, reason=reason)
            continue
        site = Site(path, holder, id(parameter), shape, found[0].transposed)
        if any(linear.transposed != site.transposed for linear in found):
            site.reason = "the graph multiplies by it and by its transpose"
        elif not _NO_PRODUCTS.issuperset(others):
            site.reason = f"{', '.join(others)} reads it, too"
        yield site


def _operator(node: fx.Node) -> str:
    """The name of what a node calls, without an overload."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0] if node.op == "call_function" else name


def embedding_weights(model: nn.Module) -> set[int]:
    """The identities of all parameters that an embedding looks up."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    if isinstance(model, fx.GraphModule):
        for node in model.graph.find_nodes(op="get_attr"):
            if not _EMBEDDINGS.isdisjoint(map(_operator, weight_readers(node))):
                path, _, name = node.target.rpartition(".")
                found.add(id(model.get_submodule(path)._parameters.get(name)))
    return found


def output_embeddings(model: nn.Module) -> set[nn.Module]:
    """The language model heads that the model itself names."""
    getters = (getattr(m, "get_output_embeddings", None) for m in model.modules())
    return {head for get in getters if callable(get) and isinstance(head := get(), nn.Module)}


def built_in_reason(site: Site, heads: set[nn.Module], tied: set[int]) -> str:
    """Why a linear is left alone unless a rule takes it, or ""."""
    last = site.name.rpartition(".")[2]
    if site.module in heads or last == "lm_head":
        return "output embedding; a rule can take it"
    if site.weight_key in tied:
        return "its weight is an embedding's; a rule can take it"
    if last in _ROUTER_NAMES:
        return "a router; a rule can take it"
    return ""


def _weight_reason(site: Site) -> str:
    assert site.settings is not None
    weight = site.module._parameters["weight"]
    assert weight is not None
    meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    problem = weight_problem(meta.t() if site.transposed else meta, site.settings.format)
    rotation = site.settings.rotation
    if problem is None and rotation and site.columns % rotation:
        problem = f"in_features={site.columns} is not a multiple of {rotation} (the rotation)"
    return problem or ""


def selected(sites: Sequence[Site]) -> list[Site]:
    """The sites that are to be converted."""
    return [site for site in sites if not site.reason]


def by_weight(sites: Sequence[Site]) -> list[list[Site]]:
    """The selected sites, those that share one weight together."""
    found: dict[int, list[Site]] = {}
    for site in selected(sites):
        found.setdefault(site.weight_key, []).append(site)
    return list(found.values())


def share_statistics(sites: Sequence[Site]) -> None:
    """Collect what calibration saw; sites that share a weight share the sum of it."""
    for members in by_weight(sites):
        observers: dict[int, Observer] = {}
        for site in members:
            for observer in site.module.__dict__.get(OBSERVERS, ()):
                observers[id(observer)] = observer
        stats = collect(list(observers.values()), members[0].name)
        for site in members:
            # Batches without tokens reach a layer and say nothing about it.
            site.stats = stats if stats.tokens else Stats()


def scale_groups(sites: Sequence[Site]) -> list[list[Site]]:
    """The selected sites, those that share a global scale together.

    Linears that are children of one parent, with equal in_features and format, form a group, for
    servers fuse them; sites that share a weight join their groups.
    """
    groups: dict[object, list[Site]] = {}
    for site in selected(sites):
        known = [groups[key] for key in _sharing_keys(site) if key in groups]
        group, *others = {id(each): each for each in known or [[]]}.values()
        joining = [site, *(member for other in others for member in other)]
        group.extend(joining)
        for member in joining:
            groups.update(dict.fromkeys(_sharing_keys(member), group))
    return list({id(group): group for group in groups.values()}.values())


def _sharing_keys(site: Site) -> tuple[object, object]:
    """Sites with one of these in common have one global scale."""
    assert site.settings is not None
    parent = site.name.rpartition(".")[0]
    return (parent, site.columns, site.settings.format.key), ("weight", site.weight_key)


def share_global_scales(sites: Sequence[Site]) -> None:
    """Give every site the global scale of its group. Raises NonFiniteError."""
    for group in scale_groups(sites):
        largest = max(map(_amax, group))
        for site in group:
            assert site.settings is not None
            site.global_scale = site.settings.format.global_scale_for(largest)


def _amax(site: Site) -> float:
    with dense_weight(site) as weight:
        if weight.is_meta:
            raise StateError(
                f"{site.name or 'the model'}: its weight is on the meta device, without values. "
                "Load the weights before convert."
            )
        assert site.settings is not None
        target = site.settings.target(weight, site.stats)
        largest = weight_amax(target)
        if not largest < float("inf"):
            raise NonFiniteError(
                f"{site.name or 'the model'}: its weight holds NaN or infinity. Repair the "
                "checkpoint, or leave the layer alone with"
                f" rules=[({site.name!r}, None)]."
            )
        stored = site.settings.usage.stored(target)
        if stored is not target:
            largest = weight_amax(stored)
    return largest


@contextmanager
def dense_weight(site: Site) -> Iterator[Tensor]:
    """The weight as [N, K], brought from where accelerate offloaded it for as long as needed."""
    hook = getattr(site.module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(site.module)
    try:
        weight = site.module._parameters["weight"]
        assert weight is not None
        yield weight.detach().t() if site.transposed else weight.detach()
    finally:
        if hook is not None:
            hook.post_forward(site.module, None)
