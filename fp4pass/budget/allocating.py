"""Choose a scheme for each layer under a budget of bytes or of KL, by measuring."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ..config import LinearConfig, Rule, check_rules
from ..core.progress import shown
from ..distributed import ranks
from ..engine.schedule import planned_stacks
from ..errors import OptionError, StateError, expected, some, unknown_name
from ..evaluation.computing import fast_dtype
from ..methods import Sse
from ..quality import get_quality
from ..quantization.checks import require_float, require_layers
from ..quantization.plan import plan_layers
from ..quantization.recipe import require_undecided, with_quality
from ..schemes import scheme_fields
from ..schemes import schemes as known_schemes
from ..signatures import with_options
from ..stacks import caller_of
from ..state import unwrap
from .choosing import Schemes, best_within, curve, extremes, uniform
from .forwards import Forwards, finely
from .groups import FLOAT, Group, Layers
from .held_out import Trials
from .models import Converter
from .result import Allocation, Candidate, GroupScheme, Point
from .sensitivity import add_float, measure, total
from .text import read_texts

_log = logging.getLogger(__name__)

# The schemes to choose from, where none are given.
SCHEMES = ("nvfp4a16", "mxfp8_e4m3a16", "bf16")

# Names of the scheme of layers that stay as they are.
_FLOATS = (FLOAT, "bf16", "bfloat16")


@with_options
def allocate(
    model: nn.Module,
    *,
    bits: float | None = None,
    kl: float | None = None,
    schemes: Sequence[str] = SCHEMES,
    data: Any = None,
    tokenizer: Any = None,
    method: object = None,
    quality: str | None = None,
    rules: Sequence[Rule] = (),
    windows: int = 8,
    held_out: int = 16,
    seq_len: int = 512,
    progress: bool = True,
    **options: Any,
) -> Allocation:
    """Choose a scheme for each group of layers under a budget, and leave the model as it is.

    Groups are what serving engines fuse: q, k and v; gate and up; all experts of a mixture. The
    cost of each group in each scheme is measured: KL(original || model with that group alone in the
    scheme). Of all choices within the budget the one with the least sum is found exactly. It is
    converted and measured on held-out text, beside uniform models of at most the same bytes; if one
    of these is better, it is returned.

    Args:
        model: a causal language model in floating point, with memory for a second one.
        bits: of a weight of the layers that are quantized or may be, codes and block scales
            included.
        kl: the largest KL on held-out text, nats per token; the smallest model within it is looked
            for, with at most 6 conversions.
        schemes: to choose from, as `convert` takes them; "bf16" or "float" leaves layers as they
            are.
        data: text, as for `calibrate`; by default the model writes its own.
        tokenizer: of the texts in `data`, or of those that the model writes.
        method: as for `convert`; default "sse", which is quick.
        quality: as for `convert`, in place of `method`.
        rules: as for `convert`. Those with `fmt` decide about their layers, which count with the
            bytes that they have then.
        windows: on which groups are measured.
        held_out: windows of the rest of the text, on which whole models are measured.
        seq_len: tokens of a window, at most the context of the model.
        progress: as for `convert`.
        **options: fields of `LinearConfig` beside the scheme.

    Returns:
        The choice: `convert(model, **allocation.recipe.arguments())` quantizes the model so.

    Raises:
        OptionError: not one of bits and kl is given, a scheme does not exist, or the budget cannot
            be met; it says what can be.
        StateError: the model is prepared or converted, has no linear layer, or is a graph.
        CalibrationError: there is too little text.

    Example:
        >>> schemes = ("nvfp4a16", "mxfp8_e4m3a16", "bf16")
        >>> found = fp4pass.allocate(model, bits=6.5, schemes=schemes, data=batches)
        >>> model = fp4pass.convert(model, **found.recipe.arguments())
        >>> found.bits <= 6.5, found.kl <= found.uniform.kl
        (True, True)
    """
    budget = _budget(bits, kl)
    sizes: dict[str, int] = {"windows": windows, "held_out": held_out, "seq_len": seq_len}
    recipe: dict[str, Any] = {"method": method, "quality": quality, "rules": rules, **options}
    with shown("allocate", progress), measured(model, schemes, data, tokenizer, sizes, recipe) as m:
        return choose(m, budget)


@contextmanager
def measured(
    model: nn.Module,
    schemes: Sequence[str],
    data: Any,
    tokenizer: Any,
    sizes: Mapping[str, int],
    recipe: Mapping[str, Any],
) -> Iterator[Trials]:
    """Measure all groups of a model, for budgets that are chosen within the body.

    Args:
        model: as for `allocate`.
        schemes: as for `allocate`.
        data: as for `allocate`.
        tokenizer: as for `allocate`.
        sizes: windows, held_out and seq_len of `allocate`.
        recipe: its method, quality, rules and options.
    """
    options = dict(recipe)
    quality, rules = options.pop("quality", None), check_rules(options.pop("rules", ()))
    root = unwrap(model, data, tokenizer)
    names, keeps_float = _schemes(schemes)
    options = _options(options.pop("method", None), quality, options)
    configs = {name: LinearConfig(name, **options) for name in names}
    rules = _settled(rules, configs[names[0]])
    _require_possible(root)
    for config in configs.values():
        require_layers(plan_layers(root, config, rules))
    used = [each if quality is None else with_quality(each, quality) for each in configs.values()]
    calibrates = any(
        each.needs or (not each.weight_only and each.format.has_global_scale) for each in used
    )
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        texts = read_texts(root, data, tokenizer, **sizes, calibrates=calibrates)
        converter = Converter.of(root, options, quality, texts.calibration, folder, names)
        plans = {
            name: plan_layers(converter.root, config, rules) for name, config in configs.items()
        }
        stacks = planned_stacks(converter.root, next(iter(plans.values())))
        layers = Layers.of(plans, rules, stacks)
        inside = [layer for stack in stacks for layer in stack.layers]
        forwards = Forwards(converter.root, texts.measured, inside)
        with finely(converter.root):
            forwards.record([caller_of(layer.module) for layer in layers.planned])
        groups = layers.groups(forwards.inputs)
        _require_reached(groups, layers)
        costs = measure(converter, layers, groups, forwards, names)
        add_float(costs, groups, keeps_float)
        held_out = Forwards(converter.root, texts.held_out)
        with fast_dtype(converter.root):
            held_out.record()
        candidates = (*names, FLOAT) if keeps_float else names
        yield Trials(converter, layers, groups, costs, held_out, candidates, texts.to_dict())


def choose(trials: Trials, budget: Mapping[str, float]) -> Allocation:
    """Return the best model within a budget, {"bits": ...} or {"kl": ...}, beside uniform ones."""
    trials.found.clear()
    return _result(trials, _chosen(trials, budget), budget)


def _chosen(trials: Trials, budget: Mapping[str, float]) -> Candidate:
    """Return the best model within the budget, measured. Raises OptionError if there is none."""
    costs = trials.costs
    if "kl" in budget:
        found = trials.smallest(budget["kl"])
        if found.kl > budget["kl"]:
            raise OptionError(
                f"kl={budget['kl']:g}: the nearest model has {found.kl:.6g} on held-out text, at "
                f"{found.bits:.3f} bits a weight. Give a larger kl, or schemes of more bits."
            )
        return found
    ends = [total(costs, each).bytes for each in extremes(costs)]
    low, high = (8 * size / trials.weights for size in ends)
    bits = budget["bits"]
    schemes = best_within(costs, _limit(trials, bits))
    if schemes is None:
        raise OptionError(
            f"bits={bits:g}: the smallest of the schemes takes {low:.4f} bits a weight here. Give "
            "at least that, or a smaller scheme."
        )
    if set(schemes) == {FLOAT}:
        raise OptionError(
            f"bits={bits:g}: the model as it is has {high:.4f} bits a weight, so nothing is to be "
            "quantized. Give fewer."
        )
    return trials.measure(schemes, "allocated")


def _result(trials: Trials, chosen: Candidate, budget: Mapping[str, float]) -> Allocation:
    """Measure uniform models of at most the same bytes, and return the best of all."""
    limit = chosen.bytes if "kl" in budget else _limit(trials, budget["bits"])
    others: dict[str, Schemes] = uniform(trials.costs, trials.schemes, limit)
    uniforms = [trials.measure(each, label) for label, each in others.items()]
    best = min(uniforms, key=lambda each: (each.kl, each.bytes), default=None)
    if best is not None and best.kl <= chosen.kl:
        if best.schemes != chosen.schemes:
            _log.warning(
                "%s has KL %.6g on held-out text, the mixture %.6g: it is returned",
                best.label,
                best.kl,
                chosen.kl,
            )
        chosen = best
    points = [
        Point(8 * each.bytes / trials.weights, each.bytes, each.kl) for each in curve(trials.costs)
    ]
    groups = [
        GroupScheme(group.names, group.weights, scheme, dict(costs), group.is_fixed)
        for group, scheme, costs in zip(trials.groups, chosen.schemes, trials.costs, strict=True)
    ]
    return Allocation(
        budget=dict(budget),
        recipe=trials.recipe(chosen.schemes),
        groups=tuple(groups),
        chosen=chosen,
        uniform=best,
        measured=tuple(trials.found.values()),
        curve=tuple(points),
        text=trials.text,
        is_uniform=chosen.schemes in others.values(),
    )


def _limit(trials: Trials, bits: float) -> int:
    """Return the bytes of so many bits for each weight."""
    return math.floor(bits * trials.weights / 8 + 1e-6)


def _budget(bits: float | None, kl: float | None) -> dict[str, float]:
    """Return the budget that is given. Raises OptionError unless it is one, and positive."""
    given = {name: value for name, value in (("bits", bits), ("kl", kl)) if value is not None}
    if len(given) != 1:
        got = "both" if given else "neither"
        raise OptionError(
            f"{expected('The budget', 'bits= or kl=', got)} bits=5.0 is for the best model of 5 "
            "bits a weight, kl=0.02 for the smallest one within that KL."
        )
    ((name, value),) = given.items()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise OptionError(expected(name, "a positive number", repr(value)))
    return {name: float(value)}


def _schemes(schemes: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the schemes that quantize, and whether layers may stay as they are."""
    if isinstance(schemes, str) or not isinstance(schemes, Sequence):
        raise OptionError(expected("schemes", "a list of names", repr(schemes)))
    quantizing = tuple(dict.fromkeys(each for each in schemes if each not in _FLOATS))
    for name in quantizing:
        base = str(name).partition(":")[0]
        if base not in known_schemes():
            raise unknown_name("schemes: Scheme", name, [*known_schemes(), *_FLOATS])
        scheme_fields(name)
    keeps_float = len(quantizing) < len(set(schemes)) or any(s in _FLOATS for s in schemes)
    if not quantizing or len(quantizing) + keeps_float < 2:
        got = ", ".join(map(str, schemes)) or "none"
        raise OptionError(
            f"{expected('schemes', 'two or more, one of which quantizes', got)} Add 'bf16' to "
            "leave layers as they are, or call convert for a single scheme."
        )
    return quantizing, keeps_float


def _options(method: object, quality: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LinearConfig` beside the scheme."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in ("fmt", "weight_only", "block"):
        if name in found:
            raise OptionError(
                f"{name} and schemes are both given, and schemes decides {name}. Leave {name} out."
            )
    if quality is None:
        return {"method": Sse() if method is None else method, **found}
    get_quality(quality)
    require_undecided(quality, {**({} if method is None else {"method": method}), **found})
    return found


def _settled(rules: Sequence[Rule], config: LinearConfig) -> tuple[Rule, ...]:
    """Return rules, of which those that name a format also say whether inputs are quantized."""

    def settled(options: Any) -> Any:
        if options is None or "fmt" not in options:
            return options
        return {"weight_only": config.weight_only, **options}

    return tuple((pattern, settled(options)) for pattern, options in rules)


def _require_possible(root: nn.Module) -> None:
    """Raise StateError or OptionError for models and processes that this is not for."""
    if require_float(root, "allocate") is not None:
        raise StateError(
            "The model is prepared, and allocate prepares copies of it. Start from the float model "
            "again."
        )
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "allocate: expected a live model, got a graph, whose layers cannot be exchanged. "
            "Allocate before the model is traced; the rules fit its graph, too."
        )
    if root.training:
        raise StateError(
            "Expected a model in evaluation mode, got one in training mode, in which dropout is "
            "on. Call model.eval() first."
        )
    if ranks().size > 1:
        raise OptionError(
            f"allocate: expected one process, got {ranks().size}. Run it in one, and convert with "
            "its rules in all of them."
        )


def _require_reached(groups: Sequence[Group], layers: Layers) -> None:
    """Say which layers no window reached, which stay as they are; raise if none was."""
    unreached = layers.unreached(groups)
    if not groups:
        raise StateError(
            f"No window reaches {some(unreached)}. Give data that does, as batches of the model."
        )
    if unreached:
        _log.warning("the text does not reach %s: these layers stay as they are", some(unreached))
    _log.info(
        "allocate measures %d groups of %d layers",
        len(groups),
        len(layers.planned) - len(unreached),
    )
