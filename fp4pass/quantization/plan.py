"""Plan a conversion: the config of each linear layer, or why it is skipped, and what is missing."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._compat import require
from .._compat.accelerate import require_for as require_accelerate_for
from .._compat.transformers import HEADS, newly_initialized, output_embeddings, task_heads
from .._compat.transformers import require_for as require_transformers_for
from .._compat.transformers_loading import names_in_model
from ..core.machine import require_device
from ..core.names import covering_globs, without_numbers
from ..core.quant_state import QuantState
from ..distributed import divide, ranks, require_initialized, sharded_parameter, summed_statistics
from ..errors import (
    CalibrationError,
    OptionError,
    RuleError,
    ShapeError,
    StateError,
    as_option,
    as_rules,
    nearest,
    some,
)
from ..graph.folds import fold_rotations
from ..graph.rewrite import weight_readers
from ..methods import STATISTICS, Stats, resolve_method
from ..nn.experts import QUANTIZED, ExpertStack
from ..nn.kv_cache import KV_CACHE, get_cache_format
from ..ops.checks import weight_problem
from ..record.config import LinearConfig, Rule, check_rules
from ..record.rows import Row
from ..record.state import PreparedState, get_state, source_folder, tensor_files
from . import scan
from .observers.observer import collect

# A matrix of a weight, and the rows of it; None for all.
Part = tuple[int, slice | None]


# Where a module remembers what its parameters were made of, and the note on a weight that is kept.
_KEPT = "_fp4pass_kept"
_NOTE = "codes and scales are those of the source"

# Why a layer is skipped that was not in the folder its model came from.
NEW = "its source has no weight for it, so it is new; add a rule to quantize it"

# Why a layer is skipped that a recipe alone would quantize.
UNREACHED = "calibration never reached it"


@dataclass(frozen=True)
class KeptWeight:
    """The codes and scales that the weight of a linear layer, or of stacked experts, is made of."""

    fmt: str  # the key of their format, as the source has it
    stored: str  # the key of the format that holds them in a layer
    read: Callable[[], Sequence[QuantState]]  # returns them, for each matrix
    # Returns the scales of inputs that lie beside: one, one for each expert, or none.
    input_scales: Callable[[], tuple[float, ...]]
    problem: str = ""  # why a layer cannot hold them, or ""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerPlan(scan.LinearLayer):
    """A layer to quantize, and how."""

    config: LinearConfig
    global_scales: tuple[float, ...] = (1.0,)  # of each matrix, known after `with_shared_scales`
    tensor_scale: float | None = None  # that layers share which engines fuse; None for its own
    stats: Stats = field(default_factory=Stats)  # of its inputs, known after `with_statistics`
    kept: KeptWeight | None = None  # the codes of a source in FP8, in place of a search
    note: str = ""  # said in the report
    searchers: tuple[int, ...] = (0,)  # the processes that search its parts, known then, too

    @property
    def owner(self) -> int:
        """The process that packs."""
        return self.searchers[0]

    @property
    def is_shared(self) -> bool:
        """Whether several processes search it."""
        return len(set(self.searchers)) > 1

    @property
    def parts(self) -> list[Part]:
        """The parts for several processes: matrices, or rows of one that share only statistics."""
        step = resolve_method(self.config.method)[0].rows_at_once
        if self.matrices > 1 or step is None or self.rows <= step:
            return [(i, None) for i in range(self.matrices)]
        starts = range(0, self.rows, step)
        return [(0, slice(start, min(start + step, self.rows))) for start in starts]

    def share(self, rank: int) -> list[Part]:
        """Return the parts that a process searches: matrices, or rows that stand together."""
        if not self.is_shared:
            return [(i, None) for i in range(self.matrices)]
        own = [part for part, each in zip(self.parts, self.searchers, strict=True) if each == rank]
        first, last = own[0][1], own[-1][1]
        if first is None or last is None:
            return own
        return [(0, slice(first.start, last.stop))]


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of every linear layer of a model, in the order of its modules."""

    entries: tuple[LayerPlan | scan.SkippedLayer, ...]

    @property
    def layers(self) -> list[LayerPlan]:
        """The layers to quantize."""
        return [entry for entry in self.entries if isinstance(entry, LayerPlan)]

    @property
    def skipped(self) -> list[scan.SkippedLayer]:
        """The layers that stay as they are."""
        return [entry for entry in self.entries if isinstance(entry, scan.SkippedLayer)]

    def by_weight(self) -> list[list[LayerPlan]]:
        """Return the layers to quantize, those that share one weight together."""
        found: dict[int, list[LayerPlan]] = {}
        for layer in self.layers:
            found.setdefault(layer.weight_key, []).append(layer)
        return list(found.values())

    def map(self, change: Callable[[LayerPlan], LayerPlan | scan.SkippedLayer]) -> Plan:
        """Return a plan with each layer changed."""
        return Plan(tuple(change(e) if isinstance(e, LayerPlan) else e for e in self.entries))

    def update(self, other: Plan) -> Plan:
        """Return a plan whose entries are those of another plan where it has them."""
        newer = {entry.name: entry for entry in other.entries}
        return Plan(tuple(newer.get(entry.name, entry) for entry in self.entries))

    def outline(self) -> list[tuple[str, tuple[int, ...], Any]]:
        """Return name, shape and config or reason of each entry, which processes have in common."""
        return [
            (e.name, e.shape, e.config.to_dict() if isinstance(e, LayerPlan) else e.skip_reason)
            for e in self.entries
        ]

    def where(self, wanted: Callable[[scan.LinearLayer], bool]) -> Plan:
        """Return a plan with only some of the entries."""
        return Plan(tuple(entry for entry in self.entries if wanted(entry)))


def plan_layers(model: nn.Module, config: LinearConfig, rules: Sequence[Rule] = ()) -> Plan:
    """Decide for every linear layer how it is quantized, or why it is skipped."""
    # The first rule that matches wins; built-in rules come last. Raises RuleError if a rule matches
    # nothing or takes a weight apart, ShapeError if one names a layer that cannot be quantized.
    built_in = BuiltInRules(model)
    found = scan.scan_layers(model)
    entries: list[LayerPlan | scan.SkippedLayer] = []
    for layer in found:
        rule = matching_rule(layer.name, rules)
        if rule is None:
            entries.append(_plan_layer(layer, config, built_in.reason(layer)))
            continue
        pattern, options = rule
        if options is None:
            entries.append(scan.skip(layer, f"rule ({pattern!r}, None)"))
            continue
        entries.append(_plan_layer(layer, config.override(options)))
        if pattern == layer.name and isinstance(entries[-1], scan.SkippedLayer):
            raise ShapeError(
                f"{layer.name}: {entries[-1].skip_reason}. Skip this layer with "
                f"{as_rules(layer.name)}, or choose a format with a smaller block or a smaller "
                "rotation if it does not fit."
            )
    require_matches(rules, found)
    _require_equal_configs(entries)
    return Plan(tuple(entries))


def _plan_layer(
    layer: scan.LinearLayer, config: LinearConfig, reason: str = ""
) -> LayerPlan | scan.SkippedLayer:
    if isinstance(layer, scan.SkippedLayer):
        return layer
    reason = reason or _weight_reason(layer, config)
    if reason:
        return scan.skip(layer, reason)
    if (kept := kept_weight(layer.module, config)) is not None:
        if kept.problem:
            note = f"quantized again, not kept as in the source: {kept.problem}"
            return LayerPlan(**vars(layer), config=config, note=note)
        # A method that needs no data: it has nothing to choose.
        config = dataclasses.replace(config, method="naive", fmt=kept.stored, block=None)
        return LayerPlan(**vars(layer), config=config, kept=kept, note=_NOTE)
    return LayerPlan(**vars(layer), config=config)


def _weight_reason(layer: scan.LinearLayer, config: LinearConfig) -> str:
    """Return why a weight does not fit a config, or ""."""
    if layer.stage and "cross" in config.needs:
        raise OptionError(
            f"{layer.name}: other tokens reach an expert in the quantized model than in the float "
            "one, so Gptq(target='cross') is not for it. Give experts another method with a rule, "
            f"({layer.name!r}, {{'method': 'gptq'}})."
        )
    dtype = layer.module.get_parameter("weight").dtype
    shape = layer.shape[1:] if layer.stage else layer.shape
    problem = weight_problem(torch.empty(shape, dtype=dtype, device="meta"), config.format)
    if problem is None and config.rotation and layer.columns % config.rotation:
        return f"in_features={layer.columns} is not a multiple of {config.rotation} (the rotation)"
    return problem or ""


def _require_equal_configs(entries: Iterable[LayerPlan | scan.SkippedLayer]) -> None:
    """Raise RuleError for layers of one weight in several configs: it is packed once."""
    first: dict[int, LayerPlan] = {}
    for entry in sorted(entries, key=lambda entry: isinstance(entry, scan.SkippedLayer)):
        if isinstance(entry, LayerPlan):
            differs = entry.config != first.setdefault(entry.weight_key, entry).config
        else:
            differs = entry.weight_key in first and entry.skip_reason.startswith("rule (")
        if differs:
            raise RuleError(
                f"{first[entry.weight_key].name} and {entry.name} share one weight, but the rules "
                "give them different options, or skip one of them. Give a rule for both."
            )


def with_statistics(plan: Plan) -> Plan:
    """Return the plan with the sums for each weight, in the processes that are to search it."""
    weights, group = plan.by_weight(), ranks()
    local: list[Stats] = []
    with group.together():
        for members in weights:
            stats = collect([layer.module for layer in members], members[0].label)
            # Batches without tokens reach a layer and say nothing about it.
            local.append(stats if stats.tokens else Stats())
    searchers = divide([search_seconds(members[0]) for members in weights], group.size)
    sums = summed_statistics(group, local, searchers, list(STATISTICS))
    known: dict[int, dict[str, Any]] = {
        members[0].weight_key: {"stats": stats, "searchers": each}
        for members, stats, each in zip(weights, sums, searchers, strict=True)
    }
    return plan.map(lambda layer: dataclasses.replace(layer, **known[layer.weight_key]))


def search_seconds(layer: LayerPlan) -> tuple[float, list[float]]:
    """Return about how long a search takes on an H200: before its parts, and each of them."""
    # As measured (docs/quality.md, docs/large-models.md).
    columns, parts = layer.columns, layer.parts
    if "hessian" not in layer.config.needs:
        return 2.5e-3, [2.8e-11 * layer.rows * columns] * len(parts)
    factor = 1.45e-14 * columns**3
    # Launches take longer than the work in them, for few rows as for many: two visits of each
    # block, whose scales and codes are chosen, with a product for each part of the rows.
    blocks = columns / max(layer.config.format.block, 1)
    begin, each = factor + 1e-4 * blocks, 1e-4 * blocks
    rate = 2e-12 * columns * blocks
    if layer.matrices > 1:
        return 0.0, [begin + each + rate * layer.rows] * len(parts)
    counts = [layer.rows if rows is None else rows.stop - rows.start for _, rows in parts]
    return begin, [each + rate * count for count in counts]


def with_folded_rotations(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with rotations of inputs folded into the layers before, for graphs only."""
    # Only a graph proves that nothing else reads the inputs.
    if not isinstance(model, fx.GraphModule):
        return plan
    alone = [members[0] for members in plan.by_weight() if len(members) == 1]
    changes = fold_rotations(model, {layer.module: layer.config.rotation for layer in alone})

    def folded(layer: LayerPlan) -> LayerPlan:
        config = dataclasses.replace(layer.config, **changes.get(layer.module, {}))
        return dataclasses.replace(layer, config=config)

    return plan.map(folded)


def scale_groups(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Return the layers, those that share a global scale together."""
    # Children of one parent with equal in_features and format form a group, for serving engines
    # fuse them; layers that share a weight join their groups.

    def keys(layer: LayerPlan) -> set[object]:
        readers = (layer.parent, layer.columns, layer.stage, layer.config.format.key)
        return {("weight", layer.weight_key), readers}

    return joined(layers, keys)


def joined(
    layers: Sequence[LayerPlan], keys: Callable[[LayerPlan], set[object]]
) -> list[list[LayerPlan]]:
    """Return the layers, those with a key in common together, in the order of first layers."""
    # Each group by the place of its first layer, and that place by each key of the group.
    groups: dict[int, list[LayerPlan]] = {}
    places: dict[object, int] = {}
    for i, layer in enumerate(layers):
        first, *others = sorted({places[key] for key in keys(layer) if key in places}) or [i]
        joining = [layer, *(member for other in others for member in groups.pop(other))]
        groups.setdefault(first, []).extend(joining)
        for member in joining:
            places.update(dict.fromkeys(keys(member), first))
    return list(groups.values())


def with_unreached(plan: Plan) -> Plan:
    """Return the plan with layers that were not reached skipped, or quantized by "sse"."""

    def settled(layer: LayerPlan) -> LayerPlan | scan.SkippedLayer:
        config = layer.config
        if layer.stats.tokens or config.unreached == "error" or _has_statistics(layer):
            return layer
        if config.unreached == "skip":
            return scan.skip(layer, UNREACHED)
        config = config.override({"method": config.unreached, "weight_only": True})
        return dataclasses.replace(layer, config=config)

    return plan.map(settled)


def _has_statistics(layer: LayerPlan) -> bool:
    return all(map(layer.stats.has, layer.config.needs))


class _Record(NamedTuple):
    """The codes that a weight was made of, and that weight: a layer may have another one later."""

    kept: KeptWeight
    weight: Any
    version: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        weight = copy.deepcopy(self.weight, memo)
        is_same = self.weight._version == self.version
        return _Record(self.kept, weight, weight._version if is_same else -1)


def keep_weight(holder: nn.Module, name: str, kept: KeptWeight) -> None:
    """Remember what a parameter was made of, as long as it is not changed."""
    weight = holder._parameters[name]
    assert weight is not None, "the folder has it"
    records = holder.__dict__.setdefault(_KEPT, {})
    records[name] = _Record(kept, weight, weight._version)


def kept_weight(module: nn.Module, config: LinearConfig) -> KeptWeight | None:
    """Return what a weight was made of where a config is of the same format, else None."""
    holder, name = _place(module)
    record, own = holder.__dict__.get(_KEPT, {}).get(name), holder._parameters.get(name)
    if record is None or own is not record.weight or own._version != record.version:
        return None
    is_same = config.format.key == record.kept.fmt and not config.is_rotated
    return record.kept if is_same else None


def forget_kept(module: nn.Module) -> None:
    """Forget what the weight of a layer was made of, once it is packed."""
    holder, name = _place(module)
    holder.__dict__.get(_KEPT, {}).pop(name, None)


def _place(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that has the weight of a layer or a stack, and its name there."""
    if isinstance(module, ExpertStack):
        return module.holder, module.last
    return module, "weight"


def planned_row(layer: LayerPlan | scan.SkippedLayer) -> Row:
    """Return the row of a layer that is not converted."""
    return Row(layer.name, layer.shape, skip_reason=getattr(layer, "skip_reason", ""))


class BuiltInRules:
    """The layers that are skipped unless a rule takes them."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs, self._heads = output_embeddings(model), task_heads(model)
        # A graph has only the names.
        self._traced: dict[str, str] = getattr(model, "meta", {}).get(HEADS, {})
        self._new, self._tied = _new_weights(model), _embedding_weights(model)
        self._routers = _routers(model)

    def reason(self, layer: scan.LinearLayer) -> str:
        """Return why a layer is skipped, or ""."""
        caller = scan.caller_of(layer.module)
        traced = self._traced.get(layer.name)
        if caller in self._outputs or traced == "" or "lm_head" in layer.name.split("."):
            return "output embedding; add a rule to quantize it"
        if head := self._heads.get(caller) or traced:
            return f"a head that {head} adds to its base model; add a rule to quantize it"
        if layer.weight_key in self._new:
            return NEW
        if layer.weight_key in self._tied:
            return "its weight is an embedding's; add a rule to quantize it"
        if scan.is_router(layer.name) or layer.module in self._routers:
            return "a router; add a rule to quantize it"
        return ""


def _new_weights(model: nn.Module) -> set[int]:
    """Return the identities of weights that `from_pretrained` made, for its folder lacks them."""
    unread = newly_initialized(model)
    folder = source_folder(model) if unread else None
    files = {} if folder is None else tensor_files(folder)
    if not files:
        return set()
    # Of another size it may be pruned, which is not new.
    there = set(names_in_model(model, files, merged=True).values())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {id(parameters[name]) for name in unread - there}


def _routers(model: nn.Module) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for module in model.modules():
        children = list(module.named_children())
        experts = [child for name, child in children if "expert" in name]
        counts = {count for each in experts if (count := _expert_count(each)) > 1}
        for name, child in children if counts else ():
            if child not in experts and _chooses(name, child, counts):
                found |= {each for each in child.modules() if isinstance(each, nn.Linear)}
    return found


def _chooses(name: str, module: nn.Module, counts: Container[int]) -> bool:
    """Return whether a module beside experts chooses among them, whatever it does before."""
    # Here a "gate" is no gated MLP.
    if scan.is_router(name) or isinstance(vars(module).get("top_k"), int):
        return True
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return bool(linears) and linears[-1].out_features in counts


def _expert_count(experts: nn.Module) -> int:
    """Return how many experts are listed or stacked in a module, 0 if it does not say."""
    while isinstance(below := experts._modules.get("base_layer"), nn.Module):
        # The module that an adapter was put around.
        experts = below
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    stacked = (each.shape[0] for each in experts.parameters(recurse=False) if each.ndim == 3)
    return next(stacked, 0)


def _embedding_weights(model: nn.Module) -> set[int]:
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    if isinstance(model, fx.GraphModule):
        for node in model.graph.find_nodes(op="get_attr"):
            if not scan.EMBEDDINGS.isdisjoint(map(scan.operator_of, weight_readers(node))):
                path, _, name = node.target.rpartition(".")
                found.add(id(model.get_submodule(path)._parameters.get(name)))
    return found


def matching_rule(name: str, rules: Iterable[Rule]) -> Rule | None:
    """Return the first rule that matches the name of a layer, None if none does."""
    return next((rule for rule in rules if fnmatch.fnmatchcase(name, rule[0])), None)


def require_matches(rules: Sequence[Rule], layers: Sequence[scan.LinearLayer]) -> None:
    """Raise RuleError for a rule that matches nothing, or asks only for what is impossible."""
    names = [layer.name for layer in layers]
    for pattern, options in rules:
        matched = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if not matched:
            raise RuleError(
                f"The rule for {pattern!r} matches no linear layer of the model, whose names look "
                f"like {names[0] if names else '(there are none)'!r}.{nearest(pattern, names)}"
            )
        reasons = [layer.skip_reason for layer in matched if isinstance(layer, scan.SkippedLayer)]
        if options is not None and len(reasons) == len(matched):
            raise RuleError(
                f"The rule for {pattern!r} matches only what cannot be quantized, as "
                f"{matched[0].label}: {reasons[0]}. Leave the rule out, or skip them with "
                f"({pattern!r}, None)."
            )


def require_float(root: nn.Module, verb: str) -> PreparedState | None:
    """Return the state of a model that holds no packed weight; `verb` says what was to be done."""
    require("torch")
    require_transformers_for(root)
    if (name := sharded_parameter(root)) is not None:
        raise StateError(
            f"{name} is a DTensor: it is sharded over processes. {verb.capitalize()} the model "
            "before it is sharded (fully_shard, parallelize_module, tp_plan): every process has it "
            "whole then, and they divide the work."
        )
    state = get_state(root)
    require_accelerate_for(root)
    prepared = state if isinstance(state, PreparedState) else None
    converted = [name for name, m in root.named_modules() if isinstance(m, QUANTIZED)]
    if converted or state is not prepared:
        where = f", as {converted[0]!r} is," if converted and converted[0] else ""
        raise StateError(
            f"The model is already converted{where} so there is nothing to {verb}. Start from the "
            "float model again."
        )
    return prepared


def require_one_plan(plan: Plan, before: PreparedState | None) -> None:
    """Raise StateError unless all processes are to convert the same; `before` is of `prepare`."""
    group = ranks()
    group.arrive()
    prepared = None
    if before is not None:
        require_initialized()
        prepared = (before.needs, before.recording is not None)
    group.require_equal("The plan", (plan.outline(), prepared))


def require_place(device: torch.device | str | None, by_layers: bool) -> None:
    """Raise OptionError for a device that is not there, or not for layers that run in convert."""
    if device is None:
        return
    if not by_layers:
        raise OptionError(
            f"device is {str(device)!r}, but layers run in convert only after "
            f"prepare(model, sequential=True), or with {as_option('stream')}. Move the model "
            "instead."
        )
    require_device(str(device), "device=")


def require_layers(plan: Plan) -> None:
    """Raise StateError for a model without anything to quantize."""
    if not plan.layers:
        why = "; ".join(f"{layer.label}: {layer.skip_reason}" for layer in plan.skipped[:5])
        raise StateError(f"The model has no linear layer to quantize. {why or 'There is none.'}")


def require_unpaired(layers: Sequence[LayerPlan]) -> None:
    """Raise OptionError for a layer outside a recording that needs the float model's inputs."""
    for layer in layers:
        if "cross" in layer.config.needs:
            raise OptionError(
                f"{layer.label}: Gptq(target='cross') is for layers that are calibrated one after "
                f"the other. Give {as_option('sequential', True)}, and to layers outside of its "
                f"stacks another method: {as_rules(layer.name, options={'method': 'gptq'})}."
            )


def require_observers(
    state: PreparedState, needs: set[str], rules: Sequence[Rule], sequential: bool
) -> None:
    """Raise StateError unless a prepared model collects all that a second `prepare` asks for."""
    differs = {
        "other rules": bool(rules) and check_rules(rules) != state.rules,
        "a method or a rotation that needs other statistics": not needs <= set(state.needs),
        f"sequential={not sequential}": sequential != (state.recording is not None),
    }
    for what, is_so in differs.items():
        if is_so:
            raise StateError(
                f"The model is prepared with {what}. Prepare a fresh copy of it; convert takes "
                "further rules."
            )


def cache_of(before: PreparedState | None, kv_cache: str | None) -> str | None:
    """Return the format of the key-value cache; `before` is of `prepare`, the default."""
    known = None if before is None else before.recipe.get(KV_CACHE)
    if kv_cache is None:
        return known
    get_cache_format(kv_cache)
    if known is None:
        raise StateError(
            f"{as_option('kv_cache', kv_cache)} needs calibration data, and the model is not "
            f"prepared for it. Call fp4pass.prepare(model, kv_cache={kv_cache!r}) and run some "
            "batches first."
        )
    return kv_cache


def require_statistics(
    part: Plan, whole: Plan, before: PreparedState | None, is_late: bool = False
) -> None:
    """Raise CalibrationError for layers of a part that lack what their method needs."""
    lacking = [layer for layer in part.layers if not _has_statistics(layer)]
    if not lacking:
        return
    config = lacking[0].config
    name, other = config.method_name, as_option("method", "sse")
    what, given = f"Method {name!r}", f", rotation={config.rotation}" if config.rotation else ""
    if "magnitudes" in config.needs:
        given += f", fmt={config.scheme!r}, input_range={config.input_range!r}"
        what, other = (as_option("input_range", each) for each in (config.input_range, "amax"))
    call = f"fp4pass.prepare(model, {name!r}{given})"
    if before is None:
        raise CalibrationError(
            f"{what} needs calibration data. Give {as_option('quality', 'good')} and "
            f"{as_option('tokenizer')}, which calibrate too; or call {call} and run some batches "
            f"through the model before convert; or choose {other}."
        )
    names = [layer.name for layer in lacking]
    labels = some([layer.label for layer in lacking], 5)
    is_less = any(not set(each.config.needs) <= set(before.needs) for each in lacking)
    if is_less or any(layer.stats.tokens for layer in lacking):
        raise CalibrationError(
            f"{labels}: the model was prepared for a method or a rotation that does not collect "
            f"what {what.removeprefix('Method ')} needs. Prepare a fresh copy with {call}."
        )
    if before.recording is None and not any(layer.stats.tokens for layer in part.layers):
        raise CalibrationError(
            "No batch was run: call fp4pass.calibrate(model, data), or run the model on some "
            "batches with tokens, before convert. Batches of a copy of the model do not count."
        )
    skipped = {row.name: row.skip_reason for row in before.report.skipped}
    for layer in lacking:
        if layer.name in skipped:
            raise CalibrationError(
                f"{layer.label}: prepare did not observe it ({skipped[layer.name]}). Prepare and "
                "calibrate it as it is now, in a fresh copy of the model, or skip it with "
                f"{as_rules(layer.name)}."
            )
    # Names that differ by numbers, in layers that have not run yet, are likely not reached.
    kinds = set(map(without_numbers, names)) if is_late else set()
    others = {layer.name for layer in whole.layers if without_numbers(layer.name) not in kinds}
    again = (
        " Whatever came before it is packed already: start again from the float model, with "
        "resume= to keep what was searched."
    )
    raise CalibrationError(
        f"{labels}: calibration never reached them. Run batches that use these layers, skip them "
        f"with {as_rules(*covering_globs(names, others.difference(names)))}, or choose "
        f"{as_option('unreached', 'skip')} or 'sse'. Where the model reads a weight and never "
        f"calls the layer, no batch reaches it.{again * is_late}"
    )
