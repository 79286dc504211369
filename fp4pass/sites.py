"""Sites: every linear of a model, and what is to become of it.

Rules, built-in exceptions and the shape of the weight decide in this one place. What is left
alone is a site too, with its reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .errors import NonFiniteError, OptionError, RuleError, ShapeError, unknown_name
from .formats import Format, get_format
from .graph.match import find_linears, is_conv1d, is_linear
from .graph.observe import OBSERVERS, Observer, collect
from .methods import Method, Stats, resolve_method, weight_problem
from .modules import QuantizedLinear

Rule = tuple[str, Mapping[str, Any] | None]

RULE_KEYS = ("fmt", "method", "block", "weight_only")

_ROUTER_NAMES = ("router", "gate", "shared_expert_gate")

# Modules whose parameters are not the weights of a product with the activations.
_NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
)


@dataclass(frozen=True)
class Settings:
    """What is to be done with one linear."""

    format: Format
    method: Method
    options: Any
    weight_only: bool


def make_settings(fmt: str, method: object, block: int | str, weight_only: bool) -> Settings:
    """Check and resolve the options of `convert`. Raises OptionError."""
    if not isinstance(weight_only, bool):
        raise OptionError(f"weight_only is {weight_only!r}; True or False is wanted.")
    found, options = resolve_method(method)
    return Settings(get_format(fmt, block), found, options, weight_only)


@dataclass
class Site:
    """A linear (or a matrix that looks like one) and its fate.

    module: holds the weight, at `name`; reason: why it is left alone, "" if it is not;
    transposed: the weight is stored as [K, N].
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    transposed: bool = False
    settings: Settings | None = None
    reason: str = ""
    global_scale: float = 1.0
    stats: Stats = field(default_factory=Stats)

    @property
    def weight_key(self) -> int:
        """Equal for sites that share one weight."""
        return id(self.module._parameters["weight"])


def check_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules in the form (glob, None) or (glob, options). Raises RuleError or OptionError."""
    if isinstance(rules, str | Mapping) or not isinstance(rules, Sequence):
        raise RuleError(f"rules is a {type(rules).__name__}; a list of (glob, options) is wanted.")
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
            raise RuleError(
                f"The rule {rule!r} is not (glob, None) or (glob, options), as in "
                "('*.down_proj', None)."
            )
        options = rule[1]
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise RuleError(f"The rule for {rule[0]!r} has {options!r}; None or a dict is wanted.")
        for key in options:
            if key not in RULE_KEYS:
                raise unknown_name(f"In the rule for {rule[0]!r}, the option", key, RULE_KEYS)
    return tuple((pattern, options) for pattern, options in rules)


def find_sites(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    fmt: str,
    method: object,
    block: int | str = "default",
    weight_only: bool = False,
) -> list[Site]:
    """Every linear of `model` in the order of its modules, with its settings or a reason.

    Raises RuleError for a rule that matches none of them, and ShapeError for a rule that names
    one linear, without a wildcard, that cannot be quantized.
    """
    rules = check_rules(rules)
    default = make_settings(fmt, method, block, weight_only)
    sites = [*_module_sites(model), *_graph_sites(model)]
    used: set[int] = set()
    tied = _embedding_weights(model)
    heads = _output_embeddings(model)
    for site in sites:
        matched = next(
            (i for i, r in enumerate(rules) if fnmatch.fnmatchcase(site.name, r[0])), None
        )
        if matched is None:
            site.reason = site.reason or _built_in_reason(site, heads, tied)
            site.settings = default
        else:
            used.add(matched)
            pattern, options = rules[matched]
            if options is None:
                site.reason = f"rule ({pattern!r}, None)"
                continue
            chosen = {"fmt": fmt, "method": method, "block": block, "weight_only": weight_only}
            if "fmt" in options and "block" not in options:
                chosen["block"] = "default"
            site.settings = make_settings(**{**chosen, **options})
            if site.reason and pattern == site.name:
                raise ShapeError(f"{site.name} cannot be quantized: {site.reason}.")
        if not site.reason:
            site.reason = _weight_reason(site)
            if site.reason and matched is not None and rules[matched][0] == site.name:
                raise ShapeError(
                    f"{site.name}: {site.reason}. Leave this layer alone with "
                    f"rules=[({site.name!r}, None)], or choose a format with a smaller block."
                )
    for index, (pattern, _) in enumerate(rules):
        shadowed = any(fnmatch.fnmatchcase(site.name, pattern) for site in sites)
        if index not in used and not shadowed:
            names = [site.name for site in sites]
            hint = unknown_name("name", pattern, names).args[0].partition(" Known:")[0]
            raise RuleError(
                f"The rule for {pattern!r} matches no linear of the model, whose names look like "
                f"{names[0] if names else '(there are none)'!r}. ({hint})"
            )
    return sites


def _module_sites(model: nn.Module) -> Iterator[Site]:
    """Linears that are modules, and matrices of modules that are not linears."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | Observer):
            continue
        if isinstance(module, nn.Linear) or is_conv1d(module):
            weight = getattr(module, "weight", None)
            shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
            site = Site(name, module, shape, transposed=is_conv1d(module))
            site.reason = _module_reason(module)
            yield site
        elif not isinstance(model, fx.GraphModule) and not isinstance(module, _NO_MATRICES):
            yield from _loose_matrices(name, module)


def _module_reason(module: nn.Module) -> str:
    """Why an nn.Linear cannot be converted whatever its shape, or ""."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if not is_linear(module):
        return f"its class {type(module).__name__} has a forward of its own"
    if "weight" not in module._parameters:
        return "its weight is computed (a parametrization or weight norm), not a parameter"
    return ""


def _loose_matrices(name: str, module: nn.Module) -> Iterator[Site]:
    """Matrices that a module multiplies by without an nn.Linear: experts, routers, in_proj."""
    for key, parameter in module._parameters.items():
        if (
            parameter is None
            or parameter.ndim < 2
            or min(parameter.shape) < 2
            or parameter.shape[-1] < 16
        ):
            continue
        path = f"{name}.{key}" if name else key
        if isinstance(module, nn.MultiheadAttention):
            reason = "nn.MultiheadAttention multiplies by it without a linear"
        elif parameter.ndim > 2:
            reason = "stacked experts: one parameter of several matrices, not linears"
        elif name.rpartition(".")[2] in _ROUTER_NAMES:
            reason = "a router"
        else:
            reason = f"{type(module).__name__} multiplies by it without a linear"
        yield Site(path, module, tuple(parameter.shape), reason=reason)


def _graph_sites(model: nn.Module) -> Iterator[Site]:
    """Linears of a graph module that multiply by a parameter without calling a module."""
    if not isinstance(model, fx.GraphModule):
        return
    seen: set[int] = set()
    for linear in find_linears(model.graph):
        if linear.called or id(linear.holder) in seen:
            continue
        seen.add(id(linear.holder))
        weight = linear.holder._parameters["weight"]
        assert weight is not None
        yield Site(linear.path, linear.holder, tuple(weight.shape), linear.transposed)


def _embedding_weights(model: nn.Module) -> set[int]:
    """The identities of all parameters that an embedding looks up."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    if isinstance(model, fx.GraphModule):
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.embedding.default and node.args[0].op == "get_attr":
                path, _, name = node.args[0].target.rpartition(".")
                found.add(id(model.get_submodule(path)._parameters.get(name)))
    return found


def _output_embeddings(model: nn.Module) -> set[nn.Module]:
    """The language model heads that the model itself names."""
    getters = (getattr(m, "get_output_embeddings", None) for m in model.modules())
    return {head for get in getters if callable(get) and isinstance(head := get(), nn.Module)}


def _built_in_reason(site: Site, heads: set[nn.Module], tied: set[int]) -> str:
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
    return weight_problem(meta.t() if site.transposed else meta, site.settings.format) or ""


def selected(sites: Sequence[Site]) -> list[Site]:
    """The sites that are to be converted."""
    return [site for site in sites if not site.reason]


def share_statistics(sites: Sequence[Site]) -> None:
    """Collect what calibration saw; sites that share a weight share the sum of it."""
    by_weight: dict[int, list[Site]] = {}
    for site in selected(sites):
        by_weight.setdefault(site.weight_key, []).append(site)
    for members in by_weight.values():
        observers: dict[int, Observer] = {}
        for site in members:
            for observer in site.module.__dict__.get(OBSERVERS, ()):
                observers[id(observer)] = observer
        stats = collect(list(observers.values()), members[0].name)
        for site in members:
            site.stats = stats


def share_global_scales(sites: Sequence[Site]) -> None:
    """Give every site the global scale of its group.

    Linears that are children of one parent, with equal in_features and format, form a group, for
    servers fuse them; sites that share a weight join their groups. Raises NonFiniteError.
    """
    groups: dict[Any, set[Any]] = {}
    amax: dict[Any, float] = {}
    for site in selected(sites):
        assert site.settings is not None
        parent = site.name.rpartition(".")[0]
        columns = site.shape[0] if site.transposed else site.shape[1]
        keys = [(parent, columns, site.settings.format.key), ("weight", site.weight_key)]
        merged = set(keys).union(*(groups.get(key, ()) for key in keys))
        largest = max(_amax(site), *(amax.get(key, 0.0) for key in merged))
        for key in merged:
            groups[key] = merged
            amax[key] = largest
    for site in selected(sites):
        assert site.settings is not None
        site.global_scale = site.settings.format.global_scale_for(amax["weight", site.weight_key])


def _amax(site: Site) -> float:
    with dense_weight(site) as weight:
        largest = float(weight.abs().amax().float())
        if not largest < float("inf"):
            raise NonFiniteError(
                f"{site.name}: its weight holds NaN or infinity. Repair the checkpoint, or leave "
                f"the layer alone with rules=[({site.name!r}, None)]."
            )
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
