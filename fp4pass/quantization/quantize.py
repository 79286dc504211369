"""Global scales, search, packing: a weight on its way from a planned layer to its buffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from .._compat.accelerate import on_device
from ..config import LinearConfig
from ..core.progress import current
from ..core.quant_state import QuantState
from ..distributed import ONE, Ranks, ranks, shared_tensors
from ..errors import NonFiniteError, StateError
from ..experts import ExpertStack
from ..kernels.rotate.naive import rotate_weight
from ..kernels.statistics.naive import weight_amax
from ..linear import INPUT_GLOBAL, PACKED, stored_tensors
from ..methods import ExpertStats, MethodResult, Stats, resolve_method, squared_errors
from .compute import settled_compute
from .plan import LayerPlan, Plan, scale_groups
from .replace import begin_replacing, drop_unused_copies, rewrite_graph, store_packed
from .report import Row, converted_row, planned_row
from .search_cache import SearchCache
from .shares import Found, gathered, joined_rows, state_rows
from .work import layer_places, search_cost, search_kind

# The global scale of inputs that layers share, by what decides it.
SharedInputs = dict[tuple[object, ...], Tensor | None]


def with_shared_scales(plan: Plan, group: Ranks = ONE) -> Plan:
    """Return the plan with the global scale of its group of layers for each layer.

    The ranks that have the plan must all make the call.
    """
    largest = _largest(plan.layers, group)
    found: dict[int, tuple[float, ...]] = {}
    for members in scale_groups(plan.layers):
        amax = (largest[layer.name] for layer in members)
        shared = [max(each) for each in zip(*amax, strict=True)]
        for layer in members:
            fmt = layer.config.format
            found[layer.weight_key] = tuple(map(fmt.global_scale_for, shared))
    return plan.map(lambda layer: dataclasses.replace(layer, global_scales=found[layer.weight_key]))


def _largest(layers: Sequence[LayerPlan], group: Ranks) -> dict[str, list[float]]:
    """Return the largest magnitudes of each layer by its name, in all processes alike."""
    # What is stored in place of a weight, only who has its statistics can tell.
    own = [
        layer
        for layer in layers
        if layer.owner == group.rank or resolve_method(layer.config.method)[0].target is None
    ]
    with group.together():
        amax = {layer.name: _stored_amax(layer) for layer in own}
    everywhere = group.gather(amax)
    found = {name: each for known in everywhere for name, each in known.items()}
    same = all(found[name] == each for known in everywhere for name, each in known.items())
    group.require_equal("The weights", same or amax)
    return found


def _stored_amax(layer: LayerPlan) -> list[float]:
    """Return the largest magnitude of each stored matrix. Raises for NaN, in the bias too."""
    with dense_weight(layer) as weight:
        if weight.is_meta:
            raise StateError(
                f"{layer.label}: its weight is on the meta device, without values. Load the "
                "weights before convert."
            )
        found = []
        for i, matrix in enumerate(matrices(weight)):
            target = _target(matrix, layer.config, layer.stats)
            stored, largest = _stored(target, layer.config), weight_amax(target)
            if not largest < math.inf:
                where = f"expert {i} of its weight" if layer.is_stack else "its weight"
                raise NonFiniteError(
                    f"{layer.label}: {where} holds NaN or infinity. Repair the checkpoint, or skip "
                    f"the layer with rules=[({layer.name!r}, None)]."
                )
            found.append(largest if stored is target else weight_amax(stored))
        bias = layer.module._parameters.get("bias")
        if bias is not None and not bias.is_meta and bias.isnan().any():
            raise NonFiniteError(
                f"{layer.label}: its bias holds NaN. Repair the checkpoint, or skip the layer with "
                f"rules=[({layer.name!r}, None)]."
            )
        return found


def matrices(weight: Tensor) -> tuple[Tensor, ...]:
    """Return a weight [N, K] as one matrix, or those of a stack [E, N, K]."""
    return weight.unbind(0) if weight.ndim == 3 else (weight,)


@contextmanager
def dense_weight(layer: LayerPlan) -> Iterator[Tensor]:
    """Yield the weight as [N, K] or [E, N, K], brought from where accelerate offloaded it."""
    with on_device(layer.module):
        if isinstance(layer.module, ExpertStack):
            yield layer.module.dense.detach()
            return
        weight = layer.module.get_parameter("weight").detach()
        yield weight.mT if layer.transposed else weight


def _target(weight: Tensor, config: LinearConfig, stats: Stats) -> Tensor:
    """Return what the method approximates in place of a weight [N, K]."""
    method, options = resolve_method(config.method)
    return weight if method.target is None else method.target(weight, stats, options)


def _stored(target: Tensor, config: LinearConfig) -> Tensor:
    """Return what is searched in place of a target [N, K]: itself, unless it is rotated."""
    return config.stored(target) if config.is_rotated else target


def quantize_layers(root: nn.Module, plan: Plan, cache: SearchCache | None = None) -> list[Row]:
    """Quantize the layers of a plan in place, and return the row of each entry.

    From its first replaced weight on, the model is interrupted until `finish`.
    """
    rows = {layer.name: planned_row(layer) for layer in plan.skipped}
    weights = plan.by_weight()
    copies = {members[0].weight_key for members in weights}

    def begin() -> None:
        begin_replacing(root)
        if isinstance(root, fx.GraphModule):
            drop_unused_copies(root, copies)
        copies.clear()

    inputs: SharedInputs = {}
    configs: dict[nn.Module, LinearConfig] = {}
    for members, packed in _packed(weights, cache):
        if copies:
            begin()
        # Layers that read one input share its scale as one buffer, for a compiled graph shares
        # their quantizations only if it sees one tensor.
        scale = packed.tensors[INPUT_GLOBAL]
        key = (*packed.shares, packed.tensors[PACKED].device)
        tensors = {**packed.tensors, INPUT_GLOBAL: inputs.setdefault(key, scale)}
        _replace(members, tensors, packed.config)
        rows.update({row.name: row for row in packed.rows})
        configs |= {layer.module: packed.config for layer in members}
    if isinstance(root, fx.GraphModule):
        rewrite_graph(root, configs)
    return [rows[entry.name] for entry in plan.entries]


def quantize_weight(members: Sequence[LayerPlan]) -> list[Row]:
    """Search, pack and replace one weight, and return the row of each layer that shares it."""
    packed = _pack(members, _search_share(members[0], 0, None))
    _replace(members, packed.tensors, packed.config)
    return packed.rows


@dataclass(frozen=True)
class _Packed:
    """What becomes of one weight."""

    rows: list[Row]  # of each layer that shares it
    shares: tuple[object, ...]  # equal where inputs may share a global scale
    tensors: dict[str, Any]  # the buffers that replace it

    @property
    def config(self) -> LinearConfig:
        """How its layers are quantized: as planned, as far as its codes allow."""
        config = self.rows[0].config
        assert config is not None, "a converted row has one"
        return config


def _packed(
    weights: Sequence[list[LayerPlan]], cache: SearchCache | None
) -> Iterator[tuple[list[LayerPlan], _Packed]]:
    """Yield the layers of each weight, and what becomes of it, searched once by all processes."""
    group = ranks()
    own = [members for members in weights if group.rank in members[0].searchers]
    places = layer_places(members[0].name for members in weights)
    if group.size == 1:
        for members in own:
            with _counted(members[0], cache, places):
                packed = _pack(members, _search_share(members[0], 0, cache))
            yield members, packed
        return
    own_parts: dict[int, list[Found]] = {}
    # Others search theirs meanwhile.
    costs = [sum(search_cost(first) for first, *_ in each) for each in (weights, own)]
    shares = (costs[0] / (costs[1] or 1), len(weights) / (len(own) or 1))
    with group.together():
        for members in own:
            with _counted(members[0], cache, places, shares):
                parts = _search_share(members[0], group.rank, cache)
            own_parts[members[0].weight_key] = parts
    found = gathered(group, [members[0] for members in weights], own_parts)
    made: dict[int, tuple[Any, Any]] = {}
    with group.together():
        for i, members in enumerate(weights):
            if members[0].owner == group.rank:
                packed = _pack(members, found[members[0].weight_key])
                made[i] = ((packed.rows, packed.shares), packed.tensors)
    owners = [members[0].owner for members in weights]
    for members, ((rows, inputs), tensors) in zip(
        weights, shared_tensors(group, made, owners), strict=True
    ):
        yield members, _Packed(rows, inputs, tensors)


@contextmanager
def _counted(
    layer: LayerPlan,
    cache: SearchCache | None,
    places: Mapping[str, str],
    shares: tuple[float, float] = (1, 1),
) -> Iterator[None]:
    """Count the weight of a layer, whose search the body is, as done.

    shares: the costs and the number of all weights in those of this process.
    """
    progress, found = current(), 0 if cache is None else cache.found
    if layer.name in places:
        progress.begin(places[layer.name])
    yield
    # What a run before has found takes no time.
    is_new = cache is None or cache.found == found
    cost = search_cost(layer) * shares[0]
    progress.step(search_kind(layer), cost, {"weights": shares[1]}, is_typical=is_new)


def _search_share(layer: LayerPlan, rank: int, cache: SearchCache | None) -> list[Found]:
    """Return what becomes of the parts of a weight that a process searches."""
    config = layer.config
    found: list[Found] = []
    with dense_weight(layer) as weight:
        stats = layer.stats.to(weight.device)
        share = layer.share(rank)
        together = _search_stack(weight, layer, [i for i, _ in share]) if cache is None else {}
        for i, rows in share:
            own = stats.expert(i, config.expert_prior) if isinstance(stats, ExpertStats) else stats
            matrix = weight[i] if layer.is_stack else weight
            stored = _stored(_target(matrix, config, own), config)
            own = own.rotated(config.rotation) if config.rotation else own
            result = together.get(i) or _search(stored, own, layer, i, cache, rows)
            stored = stored if rows is None else stored[rows]
            found.append((result, _squares(stored, result.state, own, layer)))
    return found


def _search_stack(
    weight: Tensor, layer: LayerPlan, experts: Sequence[int]
) -> dict[int, MethodResult]:
    """Return what the method finds for some experts of a stack, if it takes them together."""
    method, options = resolve_method(layer.config.method)
    if method.stack is None or not layer.is_stack or layer.config.is_rotated:
        return {}
    own = weight if len(experts) == len(weight) else weight[list(experts)]
    global_scales = [layer.global_scales[i] for i in experts]
    found = method.stack(own, layer.config.format, global_scales, options)
    return dict(zip(experts, map(MethodResult, found), strict=True))


def _squares(
    weight: Tensor, state: QuantState, stats: Stats, layer: LayerPlan
) -> list[list[float]]:
    """Return the squared errors of a matrix, or rows of it: of each part that may be alone."""
    step = resolve_method(layer.config.method)[0].rows_at_once or len(weight)
    starts = range(0, len(weight), step)
    parts = [(weight[start : start + step], state_rows(state, start, step)) for start in starts]
    return [squared_errors(*part, stats) for part in parts]


def _pack(members: Sequence[LayerPlan], found: Sequence[Found]) -> _Packed:
    """Return what becomes of the weight that some layers share, given that of its parts."""
    first, config = members[0], members[0].config
    results = [result for result, _ in found]
    if first.is_shared and not first.is_stack:
        results = [joined_rows(results)]
    errors = _relative_errors([each for _, squares in found for each in squares])
    stats = first.stats
    weights = [(result.state.qdata, result.state.scale) for result in results]
    config, note = settled_compute(config, weights, first.is_stack)
    members = [dataclasses.replace(layer, config=config) for layer in members]
    rows = [converted_row(layer, results, stats, *errors, note) for layer in members]
    input_scale = None
    if not config.weight_only and stats.tokens:
        amax = Stats(input_amax=stats.input_amax)
        amax = amax.rotated(config.rotation) if config.rotation else amax
        input_scale = config.format.global_scale_for(amax.input_amax)
    tensors = stored_tensors([result.state for result in results], input_scale, first.is_stack)
    return _Packed(rows, (first.parent, config.format.key, input_scale), tensors)


def _replace(
    members: Sequence[LayerPlan], tensors: Mapping[str, Tensor | None], config: LinearConfig
) -> None:
    """Replace one weight by its buffers, in every layer that shares it."""
    first = members[0]
    bias = first.module._parameters.get("bias")
    if config.output_rotation and bias is not None:
        # Not in place: the model that was exported has the same tensor.
        rotated = rotate_weight(bias[None], config.output_rotation)[0].to(bias.dtype)
        first.module.bias = nn.Parameter(rotated, requires_grad=bias.requires_grad)
    for layer in members:
        store_packed(layer.module, tensors, config, transposed=layer.transposed)


def _search(
    weight: Tensor,
    stats: Stats,
    layer: LayerPlan,
    matrix: int,
    cache: SearchCache | None,
    rows: slice | None,
) -> MethodResult:
    """Return what the method finds for a matrix, or rows of it, unless the cache has it."""
    method, options = resolve_method(layer.config.method)
    fmt, global_scale = layer.config.format, layer.global_scales[matrix]
    part = {} if rows is None else {"rows": rows}

    def search() -> MethodResult:
        return MethodResult.of(method.function(weight, stats, fmt, global_scale, options, **part))

    if cache is None:
        return search()
    needs = [getattr(stats, need) for need in method.needs]
    key = cache.key(weight, needs, (method.name, fmt.key, global_scale, options, *part.values()))
    found = cache.get_or_search(key, search)
    return dataclasses.replace(found, state=found.state.to(weight.device))


def _relative_errors(squares: Sequence[list[float]]) -> tuple[float, float | None]:
    """Return |W - Q| / |W|, and |(W - Q) x| / |W x| by the Hessian or its diagonal blocks."""
    sums = [math.sqrt(sum(each)) for each in zip(*squares, strict=True)]
    ratios = [a / b if b else 0.0 for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return ratios[0], ratios[1] if len(ratios) > 1 else None
