"""Quantize planned layers: shared global scales, search, packing, replacement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat.accelerate import on_device
from ..core.formats import WHOLE, get_format
from ..core.names import FUSED
from ..core.packing import pack_codes, unpack_codes
from ..core.progress import current
from ..core.quant_state import QuantState
from ..distributed import ONE, Ranks, ranks, shared_tensors
from ..errors import NonFiniteError, StateError, as_rules
from ..kernels.common.rounding import scale_of
from ..kernels.compute_fp8.naive import is_exact
from ..kernels.rotate.naive import rotate_weight
from ..kernels.search.float_scales import candidate_scales, scale_errors
from ..kernels.statistics.naive import diagonal_blocks, weight_amax
from ..methods import Stats, resolve_method, squared_errors
from ..methods.base import Certificate, Result, result_of
from ..methods.search import exact_global_scale, may_be_exact
from ..nn.experts import QUANTIZED
from ..nn.linear import INPUT_GLOBAL, PACKED, PackedBlocks
from ..record.config import Compute, LinearConfig, input_scale_for
from ..record.rows import Report, Row
from ..record.state import get_state, set_state, unwrap
from .functional import dequantize
from .plan import LayerPlan, Plan, forget_kept, joined, planned_row, scale_groups
from .replace import begin_replacing, drop_unused_copies, packed_class, rewrite_graph, store_packed
from .scan import dense_stack

# Tokens below which the own statistics of an expert say little.
_FEW = 32


def with_shared_scales(plan: Plan, group: Ranks = ONE) -> Plan:
    """Return the plan with the scales that groups of layers share; all ranks make the call."""
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
            layer, global_scales=found[layer.weight_key], tensor_scale=tensors.get(layer.weight_key)
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
    """Quantize the layers of a plan in place, each search but those in `cache`; return all rows."""
    rows = {layer.name: planned_row(layer) for layer in plan.skipped}
    weights = plan.by_weight()
    copies = {members[0].weight_key for members in weights}
    # The global scale of inputs that layers share, by the facts that decide it.
    inputs: dict[tuple[object, ...], Tensor | None] = {}
    configs: dict[nn.Module, LinearConfig] = {}
    for members, packed in _packed(weights, cache):
        if copies:
            begin_replacing(root)
            if isinstance(root, fx.GraphModule):
                drop_unused_copies(root, copies)
            copies.clear()
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
    states, kind = [state for state, _, _ in found], packed_class(first.module)
    if len(states) > first.matrices:
        states = [joined_rows(states)]
    # |W - Q| / |W|, and |(W - Q) x| / |W x| by the Hessian or its diagonal blocks.
    squares = zip(*(each for *_, part in found for each in part), strict=True)
    sums = [math.sqrt(sum(each)) for each in squares]
    errors = [a / b if b else 0.0 for a, b in zip(sums[::2], sums[1::2], strict=True)]
    stats = first.stats
    config, note = resolve_compute(config, [(each.qdata, each.scale) for each in states], kind)
    if first.kept is not None:
        config = dataclasses.replace(config, method=None)
    note = "; ".join(filter(None, (first.note, note)))
    members = [dataclasses.replace(layer, config=config) for layer in members]
    facts: dict[str, Any] = {"weight_error": errors[0], "note": note}
    facts["output_error"] = errors[1] if len(errors) > 1 else None
    facts |= {"bits": config.format.bits_per_weight(first.shape), "tokens": stats.tokens}
    if proof := Certificate.joined([proof for _, proof, _ in found]):
        facts |= {"proved": proof.proved, "gap": proof.gap}
    facts |= _expert_tokens(stats)
    rows = [Row(layer.name, layer.shape, layer.config, **facts) for layer in members]
    input_scales: tuple[float, ...] = ()
    if config.input_format is not None and stats.tokens:
        scale = input_scale_for(config, stats)
        input_scales = () if scale is None else (scale,)
    if first.kept is not None and config.input_format is not None:
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


def resolve_compute(
    config: LinearConfig, weights: Sequence[tuple[Tensor, Tensor]], kind: type[PackedBlocks]
) -> tuple[LinearConfig, str]:
    """Return the config that packed weights can have, and why it is not the one asked for."""
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
    if state is None or state.status != "converted" or isinstance(root, fx.GraphModule):
        raise StateError(
            "set_compute: expected a live model that is converted or loaded. A graph is converted "
            "with compute=."
        )
    rows = {row.name: row for row in state.report.rows}
    for name, module in root.named_modules():
        if not isinstance(module, QUANTIZED):
            continue
        config, weight = module.config.override({"compute": compute}), module.packed_weight
        weights = [(weight.packed, weight.scale)]
        module.config, why = resolve_compute(config, weights, type(module))
        if name in rows:
            rows[name] = dataclasses.replace(rows[name], config=module.config, note=why)
    report = Report(tuple(rows[row.name] for row in state.report.rows))
    set_state(root, dataclasses.replace(state, report=report))
    return model


# The result of a matrix, or rows of it, and its squared errors, part by part.
Found = tuple[QuantState, Certificate | None, list[list[float]]]


@contextmanager
def dense_weight(layer: LayerPlan) -> Iterator[Tensor]:
    """Yield the weight as [E, N, K], brought from the place where accelerate offloaded it."""
    with on_device(layer.module):
        yield dense_stack(layer.module, layer.transposed)


def _target(weight: Tensor, config: LinearConfig, stats: Callable[[], Stats]) -> Tensor:
    """Return the matrix that the method approximates in place of a weight [N, K]."""
    method, options = resolve_method(config.method)
    # Only options with needs of their own have one; statistics of an expert may take long to make.
    if method.target is None or not getattr(options, "needs", ()):
        return weight
    return method.target(weight, stats(), options)


def survey(layer: LayerPlan) -> list[tuple[float, bool]]:
    """Return the amax of each stored matrix, and whether `may_be_exact`."""
    # Raises for NaN, in the bias too.
    with dense_weight(layer) as weight:
        if weight.is_meta:
            raise StateError(
                f"{layer.label}: its weight is on the meta device, without values. Load the "
                "weights before convert."
            )
        found: list[tuple[float, bool]] = []
        for i, matrix in enumerate(weight):
            target = _target(matrix, layer.config, functools.partial(layer.stats.matrix, i))
            searched, largest = layer.config.stored(target), weight_amax(target)
            if not largest < math.inf:
                where = f"expert {i} of its weight" if layer.stage else "its weight"
                raise _not_finite(layer, where)
            # One matrix that is not tells of all.
            is_exact = searched is matrix and all(each for _, each in found[-1:])
            is_exact = is_exact and may_be_exact(matrix, layer.config.format)
            found.append((largest if searched is target else weight_amax(searched), is_exact))
        bias = layer.module._parameters.get("bias")
        if bias is not None and not bias.is_meta and bias.isnan().any():
            raise _not_finite(layer, "its bias")
        return found


def _not_finite(layer: LayerPlan, where: str) -> NonFiniteError:
    return NonFiniteError(
        f"{layer.label}: {where} holds NaN or infinity. Repair the checkpoint, or skip the layer "
        f"with {as_rules(layer.name)}."
    )


def exact_scales(members: Sequence[LayerPlan], scales: Sequence[float]) -> list[float]:
    """Return `exact_global_scale` of each matrix; scales: those for their largest magnitudes."""
    with ExitStack() as stack:
        weights = [stack.enter_context(dense_weight(layer)) for layer in members]
        fmt = members[0].config.format
        return [
            exact_global_scale([weight[i] for weight in weights], fmt, scale)
            for i, scale in enumerate(scales)
        ]


def errors_of_scales(layer: LayerPlan, scales: Tensor) -> list[float] | None:
    """Return the error with each scale of a tensor [C]; None if statistics are missing."""
    config, method = layer.config, resolve_method(layer.config.method)[0]
    if not all(map(layer.stats.has, config.needs)):
        return None
    with dense_weight(layer) as weight:
        stats = layer.stats.to(weight.device).matrix(0, config.expert_prior)
        matrix = config.stored(_target(weight[0], config, lambda: stats))
        stats = stats.rotated(config.rotation) if config.rotation else stats
        hessian = stats.block_hessian
        if hessian is None and stats.hessian is not None:
            hessian = diagonal_blocks(stats.hessian)
        known = scales.to(weight.device).view(-1, 1, 1)
        objective = method.objective
        assert objective is not None, "the caller has looked"
        return scale_errors(matrix, hessian, known, config.format, objective).flatten().tolist()


def search_parts(layer: LayerPlan, rank: int, cache: Any) -> list[Found]:
    """Return the results of the parts of a weight that a process searches."""
    config = layer.config
    found: list[Found] = []
    with dense_weight(layer) as weight:
        stats = layer.stats.to(weight.device)
        if layer.kept is not None:
            if rank != layer.owner:
                return []
            states = [state.to(weight.device) for state in layer.kept.read()]
            for i, state in enumerate(states):
                own = stats.matrix(i, config.expert_prior)
                exact = dequantize(dataclasses.replace(state, dtype=torch.float32))
                found.append((state, None, _squares(exact, state, own, layer)))
            return found
        parts = layer.share(rank)
        together = _search_stack(weight, layer, [i for i, _ in parts]) if cache is None else {}
        for i, rows in parts:
            own = stats.matrix(i, config.expert_prior)
            target = _target(weight[i], config, functools.partial(stats.matrix, i))
            matrix = config.stored(target)
            own = own.rotated(config.rotation) if config.rotation else own
            known = together.get(i)
            state, proof = (known, None) if known else _search(matrix, own, layer, i, cache, rows)
            matrix = matrix if rows is None else matrix[rows]
            if 2 * weight_amax(matrix) > torch.finfo(matrix.dtype).max:
                state = _saturated(state)
            found.append((state, proof, _squares(matrix, state, own, layer)))
    return found


def _saturated(state: QuantState) -> QuantState:
    """Return a weight without values that its dtype does not have: next codes take their place."""
    element = state.format.element
    values, smaller = element.values, list(range(len(element.values)))
    by_size = sorted(
        (c for c in smaller if not math.isnan(values[c])), key=lambda c: abs(values[c])
    )
    for sign in (-1.0, 1.0):
        same = [code for code in by_size if math.copysign(1.0, values[code]) == sign]
        for below, code in itertools.pairwise(same):
            smaller[code] = below
    table = torch.tensor(smaller, dtype=torch.uint8, device=state.qdata.device)
    while not (known := dequantize(state).isfinite()).all():
        codes = unpack_codes(state.qdata, element.bits)
        codes = torch.where(known, codes, table[codes.int()])
        state = dataclasses.replace(state, qdata=pack_codes(codes, element.bits))
    return state


def _search_stack(weight: Tensor, layer: LayerPlan, chosen: Sequence[int]) -> dict[int, QuantState]:
    """Return the results of some matrices of a stack, if the method takes them together."""
    method, options = resolve_method(layer.config.method)
    if method.stack is None or layer.matrices == 1 or layer.config.is_rotated:
        return {}
    own = weight if len(chosen) == len(weight) else weight[list(chosen)]
    global_scales = [layer.global_scales[i] for i in chosen]
    found = method.stack(own, layer.config.format, global_scales, options)
    return dict(zip(chosen, found, strict=True))


def _search(
    weight: Tensor, stats: Stats, layer: LayerPlan, matrix: int, cache: Any, rows: slice | None
) -> Result:
    """Return the result of the method for a matrix, or rows of it, unless the cache has it."""
    method, options = resolve_method(layer.config.method)
    fmt, global_scale = layer.config.format, layer.global_scales[matrix]
    part: dict[str, Any] = {} if rows is None else {"rows": rows}
    if layer.tensor_scale is not None:
        part["scale"] = layer.tensor_scale

    def search() -> Result:
        return result_of(method.function(weight, stats, fmt, global_scale, options, **part))

    if cache is None:
        return search()
    needs = [getattr(stats, need) for need in method.needs]
    decides = (weight, needs, method.name, fmt.key, global_scale, options, part)
    state, proof = cache.get_or_search(layer.name, decides, search)
    return state.to(weight.device), proof


def _squares(
    weight: Tensor, state: QuantState, stats: Stats, layer: LayerPlan
) -> list[list[float]]:
    step = resolve_method(layer.config.method)[0].rows_at_once or len(weight)
    parts = [(start, start + step) for start in range(0, len(weight), step)]
    return [squared_errors(weight[a:b], state.rows(a, b), stats) for a, b in parts]


def gather_parts(
    group: Ranks, weights: Sequence[LayerPlan], own: Mapping[int, list[Found]]
) -> dict[int, list[Found]]:
    """Return the results of each weight by its key, on its owner alone if nobody shares it."""
    found = dict(own)
    shares = [
        (layer.weight_key, rank)
        for layer in weights
        if layer.is_shared
        for rank in dict.fromkeys(layer.searchers)
    ]
    sent = {i: _sent(own[key]) for i, (key, rank) in enumerate(shares) if rank == group.rank}
    received = shared_tensors(group, sent, [rank for _, rank in shares]) if shares else []
    found |= {key: [] for key, _ in shares}
    for (key, _), (facts, tensors) in zip(shares, received, strict=True):
        for i, (squares, global_scale, fmt, shape, dtype) in enumerate(facts):
            codes: Any = tensors[f"{i}.qdata"]
            scale: Any = tensors[f"{i}.scale"]
            state = QuantState(codes, scale, global_scale, get_format(fmt), shape, dtype)
            loss, bound = tensors[f"{i}.loss"], tensors[f"{i}.bound"]
            proof = None if loss is None or bound is None else Certificate(loss, bound)
            found[key].append((state, proof, squares))
    return found


def _sent(parts: Sequence[Found]) -> tuple[list[Any], dict[str, Tensor | None]]:
    facts: list[Any] = []
    tensors: dict[str, Tensor | None] = {}
    for i, (state, proof, squares) in enumerate(parts):
        facts.append((squares, state.global_scale, state.format.key, state.shape, state.dtype))
        tensors |= {f"{i}.qdata": state.qdata, f"{i}.scale": state.scale}
        tensors[f"{i}.loss"] = None if proof is None else proof.loss
        tensors[f"{i}.bound"] = None if proof is None else proof.bound
    return facts, tensors


def joined_rows(states: Sequence[QuantState]) -> QuantState:
    """Return a matrix, given its rows."""
    qdata = torch.cat([state.qdata for state in states])
    # That of a whole matrix is in the results of all its rows.
    alone = states[0].format.rows == WHOLE
    scale = states[0].scale if alone else torch.cat([state.scale for state in states])
    shape = (len(qdata), states[0].shape[1])
    return dataclasses.replace(states[0], qdata=qdata, scale=scale, shape=shape)


def shared_tensor_scales(
    layers: Sequence[LayerPlan], largest: Mapping[str, Sequence[float]], group: Ranks
) -> dict[int, float]:
    """Return the scale of each weight that shares one, by its key."""
    # Engines keep one for the layers that they fuse, and round the codes of the others again. It is
    # the best of those that a search tries for all of them as one matrix. Layers whose statistics
    # are missing share none. All ranks must make the call; largest: the magnitudes of each layer.
    fused = _fused(layers)
    candidates = [_candidates(members, largest) for members in fused]
    own: dict[str, list[float] | None] = {}
    with group.together():
        for members, known in zip(fused, candidates, strict=True):
            for layer in members if len(known) > 1 else ():
                if layer.owner == group.rank:
                    own[layer.name] = errors_of_scales(layer, known)
    errors = {name: each for part in group.gather(own) for name, each in part.items()}
    found: dict[int, float] = {}
    for members, known in zip(fused, candidates, strict=True):
        best = 0
        if len(known) > 1:
            each = [errors[layer.name] for layer in members]
            if any(one is None for one in each):
                continue
            sums = [sum(one) for one in zip(*each, strict=True)]
            best = sums.index(min(sums))
        found |= {layer.weight_key: float(known[best]) for layer in members}
    return found


def _fused(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Return a layer of each weight that shares a scale, those with one scale together."""

    def keys(layer: LayerPlan) -> set[object]:
        last = layer.name.removeprefix(f"{layer.parent}.").partition(".")[0]
        readers = {
            (layer.parent, layer.columns, layer.config.format.key, i)
            for i, names in enumerate(FUSED)
            if last in names
        }
        return {("weight", layer.weight_key), *readers}

    able = [
        layer
        for layer in layers
        if layer.config.format.has_tensor_scale
        and layer.kept is None
        and not layer.stage
        and resolve_method(layer.config.method)[0].objective is not None
    ]
    groups = [
        list({layer.weight_key: layer for layer in reversed(members)}.values())[::-1]
        for members in joined(able, keys)
    ]
    return [members for members in groups if len(members) > 1]


def _candidates(
    members: Sequence[LayerPlan], largest: Mapping[str, Sequence[float]]
) -> torch.Tensor:
    """Return the scales to try, float32 [C]; one where a method of a member tries no others."""
    amax = max(largest[layer.name][0] for layer in members)
    naive = scale_of(torch.tensor([amax], device="cpu"), members[0].config.format)
    objectives = {resolve_method(layer.config.method)[0].objective for layer in members}
    # Errors of several kinds have no sum.
    alone = len(objectives) > 1 or objectives == {"naive"}
    return naive if alone else candidate_scales(naive)[:, 0]
