"""Choose a scheme for each layer under a budget of bytes or of KL, by measuring."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import nn

from ...core.progress import shown
from ...engine.layer_stack import planned_stacks
from ...errors import OptionError, StateError, some
from ...methods.base import MethodChoice
from ...quantization.checks import require_layers
from ...quantization.observers.batches import fast_dtype
from ...quantization.plan import plan_layers
from ...quantization.recipe import with_quality
from ...quantization.scan import caller_of
from ...record.config import LinearConfig, LinearOptions, Rules, check_options, check_rules
from ...record.quality import QualityName
from ...record.schemes import Scheme
from ...record.state import unwrap
from .checks import bits_of, budget_of, options_of, require_possible, schemes_of, settled, too_few
from .choosing import Schemes, best_within, curve, extremes, uniform
from .forwards import Forwards, finely
from .groups import FLOAT, Group, Layers
from .held_out import Trials
from .models import Converter
from .result import Allocation, Candidate, GroupScheme, Point
from .sensitivity import add_float, measure, total
from .text import read_texts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)

# The schemes to choose from, where none are given.
SCHEMES: Final = ("nvfp4a16", "fp8a16", "bf16")

# Bits by which the smallest size may be less once it is known which layers are reached.
_NEAR = 0.05


def allocate(
    model: nn.Module,
    *,
    bits: float | None = None,
    kl: float | None = None,
    schemes: Sequence[Scheme | Literal["bf16", "float"]] = SCHEMES,
    data: Any = None,
    tokenizer: Any = None,
    method: MethodChoice | None = None,
    quality: QualityName | None = None,
    rules: Rules = (),
    windows: int = 8,
    held_out: int = 16,
    seq_len: int = 512,
    progress: bool = True,
    **options: Unpack[LinearOptions],
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
        >>> schemes = ("nvfp4a16", "fp8a16", "bf16")
        >>> found = fp4pass.allocate(model, bits=6.5, schemes=schemes, data=batches)
        >>> model = fp4pass.convert(model, **found.recipe.arguments())
        >>> found.bits <= 6.5, found.kl <= found.uniform.kl
        (True, True)
    """
    budget = budget_of(bits, kl)
    sizes: dict[str, int] = {"windows": windows, "held_out": held_out, "seq_len": seq_len}
    recipe: dict[str, Any] = {"method": method, "quality": quality, "rules": rules, **options}
    given = (model, schemes, data, tokenizer, sizes, recipe, budget.get("bits"))
    with shown("allocate", progress), measured(*given) as trials:
        return choose(trials, budget)


@contextmanager
def measured(
    model: nn.Module,
    schemes: Sequence[str],
    data: Any,
    tokenizer: Any,
    sizes: Mapping[str, int],
    recipe: Mapping[str, Any],
    bits: float | None = None,
) -> Iterator[Trials]:
    """Measure all groups of a model, for budgets chosen in the body of `with`.

    Args:
        model: as for `allocate`.
        schemes: as for `allocate`.
        data: as for `allocate`.
        tokenizer: as for `allocate`.
        sizes: windows, held_out and seq_len of `allocate`.
        recipe: its method, quality, rules and options.
        bits: the least of the budgets, which is refused at once where no scheme is as small.
    """
    options = dict(recipe)
    quality, rules = options.pop("quality", None), check_rules(options.pop("rules", ()))
    check_options(options)
    root = unwrap(model, data, tokenizer)
    names, keeps_float = schemes_of(schemes)
    options = options_of(options.pop("method", None), quality, options)
    configs = {name: LinearConfig(name, **options) for name in names}
    rules = settled(rules, configs[names[0]])
    require_possible(root)
    first = [plan_layers(root, config, rules) for config in configs.values()]
    for plan in first:
        require_layers(plan)
    least = min(bits_of(root, plan) for plan in first)
    if bits is not None and bits < least - _NEAR:
        raise too_few(bits, least)
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
        raise too_few(bits, low)
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
