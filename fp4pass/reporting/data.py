"""Gather the numbers of a report: all that the page shows is in them, and in its JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._version import __version__
from ..core.formats import get_format
from ..core.progress import track
from ..errors import OptionError
from ..methods import squared_errors
from ..methods.search import scale_counts
from ..record.rows import Row, tensor_core_note
from .charts import ERRORS
from .models import CODES, FloatModel, PackedModel, Source, open_float, open_packed
from .text import finite, mean

Facts = dict[str, Any]

# A path such as model.layers.3.self_attn.q_proj: a stack, a depth in it, and a projection.
_PLACE = re.compile(r"(?P<stack>(?:[^.]*[^.\d][^.]*\.)+)(?P<depth>\d+)\.(?P<projection>.+)")


def gather(
    source: Source,
    *,
    name: str = "",
    reference: Source | None = None,
    reference_name: str = "",
    evaluations: Sequence[Mapping[str, Any]] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Return all that a page says of a model, as JSON has it: a number that is not finite is None.

    Arguments and errors are those of `write_report`.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> data = fp4pass.reporting.gather(model, progress=False)
        >>> data["summary"]["layers"]
        2
    """
    model = open_packed(source, name)
    original = None if reference is None else open_float(reference, reference_name, model.on_disk)
    facts = {row.name: layer_facts(row) for row in model.rows}
    scales = _read_weights(model, original, facts, progress)
    layers, packed = list(facts.values()), [facts[name] for name in model.packed]
    known = {error: [x[error] for x in layers if x[error] is not None] for error in ERRORS}
    # A page may be read on another machine.
    configs = [layer.config for layer in model.packed.values()]
    note = tensor_core_note(configs, machine="the machine of this report")
    data = {
        "fp4pass": __version__,
        "source": _public(model.name),
        "layout": model.layout,
        "architecture": model.architecture,
        "reference": None if original is None else _public(original.name),
        "summary": _summary(model, layers, packed, original),
        "groups": summarize(packed),
        "sizes": _sizes(model),
        "layers": layers,
        "ranges": {name: [min(all_), max(all_)] if all_ else None for name, all_ in known.items()},
        "maps": layer_maps(layers),
        "outside": [i for i, layer in enumerate(layers) if layer["depth"] is None],
        "scales": scales,
        "evaluations": [{**row, "text": _public(row["text"])} for row in evaluations],
        "recipe": model.recipe,
        "calibration": model.calibration,
        "versions": dict(model.versions),
        "notes": [note] if note else [],
        "unknown": _unknown(model, original, packed, evaluations),
    }
    return finite(data)


def layer_facts(row: Row) -> Facts:
    """Return the fields of a row and of its config, and more that the page says of a layer.

    `label` is its scheme in a table, `legend` its name in a legend; `stack`, `depth` (None outside
    of a stack) and `projection` are its place in the model.
    """
    facts = {**row.to_dict(), "label": "", "legend": ""}
    config = facts.pop("config")
    if row.config is not None:
        # Another library quantized the layer, if there is no method.
        method = "" if row.config.method is None else row.config.method_name
        facts |= {**config, "method": method, "label": row.config.label}
        facts["legend"] = ", ".join(filter(None, (row.config.label, method)))
    place = _PLACE.fullmatch(row.name)
    if place is None:
        return {**facts, "stack": "", "depth": None, "projection": row.name}
    # Experts of one layer, which only a number tells apart, are one projection.
    projection = re.sub(r"(?<=\.)\d+(?=\.)", "*", place["projection"])
    depth = int(place["depth"])
    return {**facts, "stack": place["stack"][:-1], "depth": depth, "projection": projection}


def summarize(packed: Sequence[Facts]) -> list[Facts]:
    """Summarize the layers of each scheme and method; errors are means over layers."""
    groups: dict[str, list[Facts]] = {}
    for layer in packed:
        groups.setdefault(layer["legend"], []).append(layer)
    same = "legend label scheme fmt block weight_only method".split()
    return [
        {
            **{key: layers[0][key] for key in same},
            "layers": len(layers),
            "weights": _weights(layers),
            "bits": _bits(layers),
            **{error: mean([layer[error] for layer in layers]) for error in ERRORS},
        }
        for _, layers in sorted(groups.items())
    ]


def _weights(layers: Sequence[Facts]) -> int:
    return sum(math.prod(layer["shape"]) for layer in layers)


def _bits(layers: Sequence[Facts]) -> float:
    """Return the mean bits of the weights of layers."""
    bits = sum(layer["bits"] * math.prod(layer["shape"]) for layer in layers)
    return float(bits / _weights(layers))


def layer_maps(layers: Sequence[Facts]) -> list[Facts]:
    """Return a table for each stack of layers: its cells hold indices of layers and mean errors."""
    stacks: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer["depth"] is not None:
            stacks.setdefault(layer["stack"], []).append(index)
    maps = []
    for stack, inside in stacks.items():
        by_depth: dict[int, dict[str, list[int]]] = {}
        for index in inside:
            row = by_depth.setdefault(layers[index]["depth"], {})
            row.setdefault(layers[index]["projection"], []).append(index)
        # In the order of the first depth that has all of them.
        names = [name for row in sorted(by_depth.values(), key=len, reverse=True) for name in row]
        depths, projections = sorted(by_depth), list(dict.fromkeys(names))
        cells = [
            [_cell(layers, by_depth[depth].get(name, ())) for name in projections]
            for depth in depths
        ]
        maps.append({"stack": stack, "depths": depths, "projections": projections, "cells": cells})
    return maps


def _cell(layers: Sequence[Facts], indices: Sequence[int]) -> Facts | None:
    """Return means over the quantized layers of a cell; None for a cell without layers."""
    converted = [layers[index] for index in indices if not layers[index]["skip_reason"]]
    reasons = [layers[index]["skip_reason"] for index in indices if layers[index]["skip_reason"]]
    cell = {
        "layers": list(indices),
        "converted": len(converted),
        "skip_reason": "; ".join(dict.fromkeys(reasons)),
        "bits": _bits(converted) if converted else None,
        **{error: mean([layer[error] for layer in converted]) for error in ERRORS},
    }
    return cell if indices else None


def _public(name: str) -> str:
    """Return the last part of a path, for a page is shown to others; names of a hub stay whole."""
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.exists(name)
    return os.path.basename(os.path.abspath(name)) if is_path else name


def _read_weights(
    model: PackedModel, original: FloatModel | None, facts: Mapping[str, Facts], progress: bool
) -> list[Facts]:
    """Count block scales by format; weight errors that nobody reported are measured."""
    counts: dict[str, Counter[float]] = {}
    compared = 0
    for name, layer in track(model.packed.items(), "block scales", unit="layers", show=progress):
        found, sums = facts[name], [0.0, 0.0]
        # Of float32 scales hardly two are equal.
        for scale in () if layer.fmt.has_float_scale else model.scales(name):
            counts.setdefault(layer.fmt.key, Counter()).update(scale_counts(scale, layer.fmt))
        for state, piece in model.states(name) if original is not None else ():
            weight = None if original is None else original.weight(name, layer, piece)
            if weight is None:
                continue
            weight = layer.config.stored(weight.to(state.qdata.device))
            compared += 1
            if found["weight_error"] is None:
                sums = [a + b for a, b in zip(sums, squared_errors(weight, state), strict=True)]
        if found["weight_error"] is None and sums[1]:
            found["weight_error"] = math.sqrt(sums[0] / sums[1])
    if original is not None and not compared:
        raise OptionError(
            f"{original.name} has none of the layers of {model.name}. Give the float model that "
            "it was made of."
        )
    return [_scales(key, found) for key, found in counts.items()]


def _scales(key: str, counts: Mapping[float, int]) -> Facts:
    scale = get_format(key).scale
    blocks, used = sum(counts.values()), sorted(value for value in counts if value > 0)
    # Other libraries write zero for blocks that are all zero; other bytes are invalid.
    zero = counts.get(0.0, 0)
    return {
        "format": key,
        "scale": scale.name,
        "blocks": blocks,
        "zero": zero,
        "invalid": blocks - zero - sum(counts[value] for value in used),
        "distinct": len(used),
        "possible": len(scale.values),
        "min": used[0] if used else None,
        "max": used[-1] if used else None,
        "counts": [
            {"value": value, "blocks": counts[value], "share": counts[value] / blocks}
            for value in used
        ],
    }


def _summary(
    model: PackedModel,
    layers: Sequence[Facts],
    packed: Sequence[Facts],
    original: FloatModel | None,
) -> Facts:
    size = sum(part.bytes for part in model.parts)
    parameters = sum(part.parameters for part in model.parts)
    before = model.dense_bytes if original is None else original.bytes
    return {
        "layers": len(packed),
        "skipped": sum(bool(layer["skip_reason"]) for layer in layers),
        "weights": _weights(packed),
        "parameters": parameters,
        "bits_per_weight": _bits(packed),
        "bits_per_parameter": 8 * size / parameters,
        "bytes": size,
        "bytes_before": before,
        "share": size / before,
        **{error: mean([layer[error] for layer in packed]) for error in ERRORS},
    }


def _sizes(model: PackedModel) -> list[Facts]:
    """Return the size of each kind of tensor; packed weights, in three kinds, have no bits."""
    total = sum(part.bytes for part in model.parts)
    sizes = []
    for part in model.parts:
        has_bits = part.parameters and part.kind != CODES
        bits = 8 * part.bytes / part.parameters if has_bits else None
        sizes.append({**dataclasses.asdict(part), "share": part.bytes / total, "bits": bits})
    return sizes


def _unknown(
    model: PackedModel,
    original: FloatModel | None,
    packed: Sequence[Facts],
    evaluations: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return a line for each number that is missing, with the way to get it."""
    missing: Iterable[tuple[bool, str]] = (
        (
            model.recipe is None,
            "Another library quantized this model: its recipe, methods and reasons for skipped "
            "layers are unknown.",
        ),
        (
            any(layer["weight_error"] is None for layer in packed),
            "Weight errors are unknown. --reference ORIGINAL measures them.",
        ),
        (
            any(layer["output_error"] is None for layer in packed),
            "Output errors are unknown for layers that were converted without calibration, or by "
            "another library.",
        ),
        (
            original is None,
            "Without --reference ORIGINAL, the size before assumes the same tensors with dense "
            "linear layers.",
        ),
        (not evaluations, "No text was read. --data FILE measures perplexity."),
        (
            any(row.get("kl") is None for row in evaluations),
            "The original was not evaluated. --reference ORIGINAL adds KL and top-1.",
        ),
    )
    return [line for is_missing, line in missing if is_missing]
