"""Quantize planned layers: shared global scales, search, packing, replacement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ..core.progress import current
from ..distributed import ONE, Ranks, ranks, shared_tensors
from ..errors import StateError
from ..kernels.compute_fp8.naive import is_exact
from ..kernels.rotate.naive import rotate_weight
from ..methods import Stats, resolve_method
from ..nn.experts import QUANTIZED
from ..nn.linear import INPUT_GLOBAL, PACKED, PackedBlocks
from ..record.config import Compute, LinearConfig
from ..record.rows import Report, Row
from ..record.state import get_state, set_state, unwrap
from .plan import LayerPlan, Plan, forget_kept, planned_row, scale_groups
from .replace import begin_replacing, drop_unused_copies, packed_class, rewrite_graph, store_packed
from .search import (
    Found,
    exact_scales,
    gather_parts,
    joined_rows,
    search_parts,
    shared_tensor_scales,
    survey,
)

# Tokens below which the own statistics of an expert say little.
_FEW = 32


def with_shared_scales(plan: Plan, group: Ranks = ONE) -> Plan:
    """Return the plan with the global scale of its group of layers for each layer.

    So it is with the scale of a tensor, among layers that engines fuse.

    The ranks that have the plan must all make the call.
    """
    surveyed = _survey(plan.layers, group)
    largest = {name: [amax for amax, _ in each] for name, each in surveyed.items()}
    found: dict[int, tuple[float, ...]] = {}
    for members in scale_groups(plan.layers):
        amax = (largest[layer.name] for layer in members)
        fmt = members[0].config.format
        scales = [fmt.global_scale_for(max(each)) for each in zip(*amax, strict=True)]
        if all(is_exact for layer in members for _, is_exact in surveyed[layer.name]):
            scales = exact_scales(members, scales)
        found |= {layer.weight_key: tuple(scales) for layer in members}
    tensors = shared_tensor_scales(plan.layers, largest, group)
    return plan.map(
        lambda layer: dataclasses.replace(
            layer,
            global_scales=found[layer.weight_key],
            tensor_scale=tensors.get(layer.weight_key),
        )
    )


def _survey(layers: Sequence[LayerPlan], group: Ranks) -> dict[str, list[tuple[float, bool]]]:
    """Return what `survey` finds of each layer by its name, in all processes alike."""
    # Only the owner of its statistics knows the target of a weight.
    own = [
        layer
        for layer in layers
        if layer.owner == group.rank or resolve_method(layer.config.method)[0].target is None
    ]
    with group.together():
        surveyed = {layer.name: survey(layer) for layer in own}
    everywhere = group.gather(surveyed)
    found = {name: each for known in everywhere for name, each in known.items()}
    same = all(found[name] == each for known in everywhere for name, each in known.items())
    group.require_equal("The weights", same or surveyed)
    return found


def quantize_layers(root: nn.Module, plan: Plan, cache: Any = None) -> list[Row]:
    """Quantize the layers of a plan in place, and return the row of each entry.

    cache: a `FinishedSearches`, for searches that need not be done again, or None.

    From its first replaced weight on, the model is interrupted until `finish`.
    """
    rows = {layer.name: planned_row(layer) for layer in plan.skipped}
    weights = plan.by_weight()
    copies = {members[0].weight_key for members in weights}

    def remove_observers_once() -> None:
        begin_replacing(root)
        if isinstance(root, fx.GraphModule):
            drop_unused_copies(root, copies)
        copies.clear()

    # The global scale of inputs that layers share, by the facts that decide it.
    inputs: dict[tuple[object, ...], Tensor | None] = {}
    configs: dict[nn.Module, LinearConfig] = {}
    for members, packed in _packed(weights, cache):
        if copies:
            remove_observers_once()
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
    packed = _pack(members, search_parts(members[0], 0, None))
    _replace(members, packed.tensors, packed.config)
    return packed.rows


def pack_layer(layer: LayerPlan) -> PackedWeight:
    """Search and pack the weight of a layer that nothing shares, and replace nothing."""
    return _pack([layer], search_parts(layer, 0, None))


@dataclass(frozen=True)
class PackedWeight:
    """The packed buffers and the report rows of one weight."""

    rows: list[Row]  # of each layer that shares it
    shares: tuple[object, ...]  # equal where inputs may share a global scale
    tensors: dict[str, Any]  # the buffers that replace it

    @property
    def config(self) -> LinearConfig:
        """The config of its layers: as planned, as far as its codes allow."""
        config = self.rows[0].config
        assert config is not None, "a converted row has one"
        return config


def _packed(
    weights: Sequence[list[LayerPlan]], cache: Any
) -> Iterator[tuple[list[LayerPlan], PackedWeight]]:
    """Yield the layers of each weight, and it packed, searched once by all processes."""
    group = ranks()
    own = [members for members in weights if group.rank in members[0].searchers]
    if group.size == 1:
        for members in own:
            packed = _pack(members, search_parts(members[0], 0, cache))
            current().step()
            yield members, packed
        return
    own_parts: dict[int, list[Found]] = {}
    # Others search theirs meanwhile.
    share = len(weights) / (len(own) or 1)
    with group.together():
        for members in own:
            parts = search_parts(members[0], group.rank, cache)
            own_parts[members[0].weight_key] = parts
            current().step(share)
    found = gather_parts(group, [members[0] for members in weights], own_parts)
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
        yield members, PackedWeight(rows, inputs, tensors)


def _pack(members: Sequence[LayerPlan], found: Sequence[Found]) -> PackedWeight:
    """Pack the weight that some layers share, given the results of its parts."""
    first, config = members[0], members[0].config
    states, kind = [state for state, _ in found], packed_class(first.module)
    if len(states) > first.matrices:
        states = [joined_rows(states)]
    errors = _relative_errors([each for _, squares in found for each in squares])
    stats = first.stats
    config, note = resolve_compute(config, [(each.qdata, each.scale) for each in states], kind)
    if first.kept is not None:
        config = dataclasses.replace(config, method=None)
    note = "; ".join(filter(None, (first.note, note)))
    members = [dataclasses.replace(layer, config=config) for layer in members]
    facts: dict[str, Any] = {"weight_error": errors[0], "output_error": errors[1], "note": note}
    facts |= {"bits": config.format.bits_per_weight(first.shape), "tokens": stats.tokens}
    facts |= _expert_tokens(stats)
    rows = [Row(layer.name, layer.shape, layer.config, **facts) for layer in members]
    input_scales: tuple[float, ...] = ()
    if not config.weight_only and stats.tokens:
        amax = Stats(input_amax=stats.input_amax)
        amax = amax.rotated(config.rotation) if config.rotation else amax
        scale = config.format.input_scale_for(amax.input_amax)
        input_scales = () if scale is None else (scale,)
    if first.kept is not None and not config.weight_only:
        input_scales = first.kept.input_scales()
    tensors = kind.buffers_of(states, input_scales)
    return PackedWeight(rows, (first.parent, config.format.key, input_scales), tensors)


def _expert_tokens(stats: Stats) -> dict[str, Any]:
    """Return the fields of a row that say how often experts were reached."""
    if stats.counts is None or stats.routing is None or not stats.tokens:
        return {}
    counts, routing = stats.counts.cpu(), stats.routing.cpu()
    spread = (counts.min(), counts.median(), counts.max())
    return {
        "unreached": tuple((counts == 0).nonzero().flatten().tolist()),
        "expert_tokens": tuple(map(int, spread)),
        "rare_routing": float(routing[counts < _FEW].sum() / routing.sum().clamp(min=1e-30)),
    }


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
        forget_kept(layer.module)
        store_packed(layer.module, tensors, config, transposed=layer.transposed)


def _relative_errors(squares: Sequence[list[float]]) -> tuple[float, float | None]:
    """Return |W - Q| / |W|, and |(W - Q) x| / |W x| by the Hessian or its diagonal blocks."""
    sums = [math.sqrt(sum(each)) for each in zip(*squares, strict=True)]
    ratios = [a / b if b else 0.0 for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return ratios[0], ratios[1] if len(ratios) > 1 else None


def resolve_compute(
    config: LinearConfig, weights: Sequence[tuple[Tensor, Tensor]], kind: type[PackedBlocks]
) -> tuple[LinearConfig, str]:
    """Return the config that packed weights can have, and why it is not the one that was asked for.

    weights: packed codes [..., N, P] and scale bits [..., N, K / block]; kind: of the layer.
    """
    why = ""
    if config.compute == "input":
        return config, why
    if config.compute not in kind.computes:
        why = "products of experts are computed in the dtype of their input"
    elif not config.format.scale.mantissa_bits and not all(
        is_exact(packed, scale, config.format) for packed, scale in weights
    ):
        why = "scales of a row are too far apart for E4M3, so its products are not FP8"
    return (config.override({"compute": "input"}), why) if why else (config, "")


def set_compute(model: nn.Module, compute: Compute) -> nn.Module:
    """Choose the arithmetic of products of many rows, in place, and return the model.

    Layers that cannot be computed so stay as they are; `report` says why.

    Args:
        model: converted or loaded.
        compute: "fp8" for FP8 tensor cores, or "input" for the dtype of the input.

    Raises:
        OptionError: there is no such choice.
        StateError: the model is not converted, or is a graph, whose nodes are made already.

    Example:
        >>> model = fp4pass.convert(model, "mxfp4a16", "sse")
        >>> fp4pass.set_compute(model, "fp8")[0].config.compute
        'fp8'
    """
    root = unwrap(model)
    LinearConfig(compute=compute)
    state = get_state(root)
    if state is None or state.status != "converted":
        raise StateError("set_compute: the model is not converted. Call convert or load first.")
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "set_compute: the nodes of a converted graph say what they compute. Convert the graph "
            "with compute=, or the model itself."
        )
    rows = {row.name: row for row in state.report.rows}
    for name, module in root.named_modules():
        if not isinstance(module, QUANTIZED):
            continue
        weight = module.packed_weight
        module.config, why = resolve_compute(
            module.config.override({"compute": compute}),
            [(weight.packed, weight.scale)],
            type(module),
        )
        if name in rows:
            rows[name] = dataclasses.replace(rows[name], config=module.config, note=why)
    report = Report(tuple(rows[row.name] for row in state.report.rows))
    set_state(root, dataclasses.replace(state, report=report))
    return model
