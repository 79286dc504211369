"""Search, pack and replace: from planned layers to quantized ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, fx, nn
from tqdm import tqdm

from .._compat.torch import recompile_hooked
from ..kernels.rotate.reference import rotate_weight
from ..linear import INPUT_GLOBAL, stored_tensors
from ..methods import MethodResult, Stats, resolve_method
from .plan import LayerPlan, Plan
from .replace import drop_unused_copies, remove_observers, rewrite_graph, store_packed
from .report import Row, converted_row, planned_row
from .scales import dense_weight
from .search_cache import SearchCache
from .state import set_interrupted

# The global scale of inputs that layers share, by what decides it.
SharedInputs = dict[tuple[object, ...], Tensor | None]


def quantize_layers(root: nn.Module, plan: Plan, cache: SearchCache | None = None) -> list[Row]:
    """Quantize the layers of a plan in place, and return the row of each entry.

    From its first replaced weight on, the model is interrupted until `finish`.
    """
    rows = {layer.name: planned_row(layer) for layer in plan.skipped}
    weights = plan.by_weight()
    copies = {members[0].weight_key for members in weights}

    def begin() -> None:
        remove_observers(root)
        set_interrupted(root)
        recompile_hooked(root)
        if isinstance(root, fx.GraphModule):
            drop_unused_copies(root, copies)
        copies.clear()

    inputs: SharedInputs = {}
    # A bar only for models that take long enough to wonder, and where somebody looks.
    bar = tqdm(weights, desc="convert", unit="weight", delay=2.0, leave=False, disable=None)
    for members in bar:
        found, tensors = _pack(members, inputs, cache)
        if copies:
            begin()
        _replace(members, tensors)
        rows.update({row.name: row for row in found})
    if isinstance(root, fx.GraphModule):
        rewrite_graph(root, {layer.module: layer.config for layer in plan.layers})
    return [rows[entry.name] for entry in plan.entries]


def quantize_weight(members: Sequence[LayerPlan]) -> list[Row]:
    """Search, pack and replace one weight, and return the row of each layer that shares it."""
    rows, tensors = _pack(members, {}, None)
    _replace(members, tensors)
    return rows


def _pack(
    members: Sequence[LayerPlan], inputs: SharedInputs, cache: SearchCache | None
) -> tuple[list[Row], dict[str, Tensor | None]]:
    """Return the rows of the layers that share one weight, and the buffers that replace it."""
    first, config = members[0], members[0].config
    with dense_weight(first) as weight:
        stats = first.stats.to(weight.device)
        stored = config.stored(config.target(weight, stats))
        if config.rotation:
            stats = stats.rotated(config.rotation)
        result = _search(stored, stats, first, cache)
        state = result.state
        rows = [converted_row(layer, stored, result, stats) for layer in members]
    input_scale = None
    if not config.weight_only and stats.tokens:
        input_scale = config.format.global_scale_for(stats.input_amax)
    tensors = stored_tensors(state, input_scale)
    # Layers that read one input share its scale as one buffer, for a compiled graph shares their
    # quantizations only if it sees one tensor.
    parent = first.name.rpartition(".")[0]
    shared = (parent, config.format.key, input_scale, state.qdata.device)
    tensors[INPUT_GLOBAL] = inputs.setdefault(shared, tensors[INPUT_GLOBAL])
    return rows, tensors


def _replace(members: Sequence[LayerPlan], tensors: Mapping[str, Tensor | None]) -> None:
    """Replace one weight by its buffers, in every layer that shares it."""
    first, config = members[0], members[0].config
    bias = first.module._parameters.get("bias")
    if config.output_rotation and bias is not None:
        # Not in place: the model that was exported has the same tensor.
        rotated = rotate_weight(bias[None], config.output_rotation)[0].to(bias.dtype)
        first.module.bias = nn.Parameter(rotated, requires_grad=bias.requires_grad)
    for layer in members:
        store_packed(layer.module, tensors, config, transposed=layer.transposed)


def _search(
    weight: Tensor, stats: Stats, layer: LayerPlan, cache: SearchCache | None
) -> MethodResult:
    """Return what the method finds for a weight, unless the cache has it."""
    method, options = resolve_method(layer.config.method)
    fmt = layer.config.format

    def search() -> MethodResult:
        return method.quantize(weight, stats, fmt, layer.global_scale, options)

    if cache is None:
        return search()
    needs = [getattr(stats, need) for need in method.needs]
    key = cache.key(weight, needs, (method.name, fmt.key, layer.global_scale, options))
    found = cache.get_or_search(key, search)
    return dataclasses.replace(found, state=found.state.to(weight.device))
