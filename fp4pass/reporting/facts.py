"""The numbers of a page, as plain values: whatever it shows is in here, and in its JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._version import __version__
from ..config import plain
from ..core.formats import Scale, get_format
from ..core.quant_state import QuantState
from ..errors import OptionError
from ..quantization.report import Row, groups
from ..quantization.scale_stats import scale_counts, scale_offsets
from .subject import CODES, Original, Subject, open_original, open_subject

# A path such as model.layers.3.self_attn.q_proj: a stack, a depth in it, and a projection.
_PLACE = re.compile(r"(?P<stack>(?:[^.]*[^.\d][^.]*\.)+)(?P<depth>\d+)\.(?P<projection>.+)")

ERRORS = ("weight_error", "output_error")


def gather(
    source: nn.Module | str | os.PathLike[str],
    *,
    name: str = "",
    reference: nn.Module | str | os.PathLike[str] | None = None,
    reference_name: str = "",
    evaluations: Sequence[Mapping[str, Any]] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """All that a page says of a model, as JSON has it: no infinite numbers, no tuples.

    source: a converted model, or a folder with packed weights, which is read layer by layer.
    reference: the float model or its folder, for scales against naive and sizes. evaluations: as
    `Evaluation.row` makes them. name, reference_name: what to call both.
    """
    subject = open_subject(source, name)
    original = None if reference is None else open_original(reference, reference_name)
    rows, scales, offsets = _read_weights(subject, original, progress)
    # In the order of the model, where that is known.
    in_order = {**subject.rows, **{row.name: row for row in rows}}
    layers = [_layer(row) for row in in_order.values()]
    data = {
        "fp4pass": __version__,
        "source": subject.name,
        "layout": subject.layout,
        "architecture": subject.architecture,
        "reference": None if original is None else original.name,
        "summary": _summary(subject, rows, original),
        "groups": [_group(group) for group in groups(rows)],
        "sizes": _sizes(subject),
        "layers": layers,
        "ranges": {name: _range(layers, name) for name in ERRORS},
        "maps": _maps(layers),
        "outside": [i for i, layer in enumerate(layers) if layer["depth"] is None],
        "scales": scales,
        "offsets": offsets,
        "evaluations": list(evaluations),
        "recipe": subject.recipe,
        "versions": dict(subject.versions),
        "unknown": _unknown(subject, original, rows, evaluations),
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def check_evaluations(data: Any, where: str) -> list[dict[str, Any]]:
    """The rows of what `fp4pass eval --json` printed. Raises OptionError for anything else."""
    texts = data.get("texts") if isinstance(data, Mapping) else None
    wanted = {"text", "tokens", "windows", "perplexity", "intervals", "confidence", "units", "unit"}
    if not isinstance(texts, list) or not texts:
        raise OptionError(
            f"{where} holds no perplexity. What fp4pass eval DIR --text FILE --json prints is "
            "wanted."
        )
    for row in texts:
        missing = sorted(wanted - set(row)) if isinstance(row, Mapping) else sorted(wanted)
        if missing:
            raise OptionError(
                f"{where} has a text without {', '.join(missing)}. What fp4pass eval DIR --text "
                "FILE --json prints is wanted."
            )
    return texts


def _plain(value: Any) -> Any:
    """Values as they come back from JSON, in which a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_weights(
    subject: Subject, original: Original | None, progress: bool
) -> tuple[list[Row], list[dict[str, Any]], list[dict[str, Any]]]:
    """The row of every packed layer, and block scales by format; one weight is held at a time."""
    rows: list[Row] = []
    counts: dict[str, dict[float, int]] = {}
    offsets: dict[tuple[str, str], dict[int, int]] = {}
    for name, layer in tqdm(subject.layers.items(), desc="block scales", disable=not progress):
        state = subject.state(name)
        fmt = state.format
        row = subject.rows.get(name) or Row(
            name,
            layer.shape,
            layer.config,
            bits=fmt.bits_per_weight,
        )
        _add(counts.setdefault(fmt.key, {}), scale_counts(state, fmt))
        weight = None if original is None else original.weight(name, layer)
        if weight is not None:
            weight = layer.config.stored(weight.to(state.qdata.device))
            _add(offsets.setdefault((fmt.key, _method(row)), {}), scale_offsets(weight, state))
            if row.weight_error is None:
                row = dataclasses.replace(row, weight_error=_weight_error(weight, state))
        rows.append(row)
    if original is not None and not offsets:
        raise OptionError(
            f"{original.name} has none of the layers of {subject.name}. Give the float model that "
            "it was made of."
        )
    return (
        rows,
        [_scales(key, get_format(key).scale, found) for key, found in counts.items()],
        [_offsets(*key, found) for key, found in offsets.items()],
    )


def _weight_error(weight: Tensor, state: QuantState) -> float:
    """|W - Q| / |W| of a weight [N, K]."""
    divisor = torch.tensor([1.0 / state.global_scale], device=weight.device)
    packed = (state.qdata, state.scale, divisor, None, state.format.key)
    error, size = torch.ops.fp4pass.errors(weight, *packed)[:2].clamp(min=0).sqrt().tolist()
    return error / size if size else 0.0


def _add(total: dict[Any, int], more: Mapping[Any, int]) -> None:
    for key, count in more.items():
        total[key] = total.get(key, 0) + count


def _scales(key: str, scale: Scale, counts: Mapping[float, int]) -> dict[str, Any]:
    blocks, used = sum(counts.values()), sorted(value for value in counts if value > 0)
    # What other libraries write for blocks that are all zero, and what no library should.
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


def _offsets(key: str, method: str, counts: Mapping[int, int]) -> dict[str, Any]:
    blocks = sum(counts.values())
    return {
        "format": key,
        "method": method,
        "blocks": blocks,
        "other": 1 - counts.get(0, 0) / blocks if blocks else 0.0,
        "counts": [
            {"offset": offset, "blocks": counts[offset], "share": counts[offset] / blocks}
            for offset in sorted(counts)
        ],
    }


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    return {
        "label": _label(first),
        **({} if first.config is None else plain(first.config.options())),
        "inputs": "" if first.config is None else first.config.inputs,
        "method": _method(first),
        "layers": len(rows),
        "weights": sum(math.prod(row.shape) for row in rows),
        "bits": first.bits,
        "weight_error": _mean([row.weight_error for row in rows]),
        "output_error": _mean([row.output_error for row in rows]),
    }


def _method(row: Row) -> str:
    """The name of the method of a layer, "" if it is unknown."""
    known = row.config is not None and row.config.method is not None
    return row.config.method_name if known and row.config is not None else ""


def _label(row: Row) -> str:
    """What a layer is called in a legend, "" if it was left alone."""
    config = row.config
    if config is None:
        return ""
    inputs = f"{config.inputs} inputs".replace(" bit", "-bit")
    return ", ".join(filter(None, (config.format.key, _method(row), inputs)))


def _mean(values: Sequence[float | None]) -> float | None:
    """Of all of them, None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _summary(subject: Subject, rows: Sequence[Row], original: Original | None) -> dict[str, Any]:
    size = sum(part.bytes for part in subject.parts)
    weights = sum(math.prod(row.shape) for row in rows)
    parameters = sum(part.parameters for part in subject.parts)
    before = subject.dense_bytes if original is None else original.bytes
    return {
        "layers": len(rows),
        "left_alone": sum(bool(row.skip_reason) for row in subject.rows.values()),
        "weights": weights,
        "parameters": parameters,
        "bits_per_weight": sum(row.bits * math.prod(row.shape) for row in rows) / weights,
        "bits_per_parameter": 8 * size / parameters,
        "bytes": size,
        "bytes_before": before,
        "share": size / before,
        "weight_error": _mean([row.weight_error for row in rows]),
        "output_error": _mean([row.output_error for row in rows]),
    }


def _sizes(subject: Subject) -> list[dict[str, Any]]:
    total = sum(part.bytes for part in subject.parts)
    return [
        {**dataclasses.asdict(part), "share": part.bytes / total} | _bits_of(part)
        for part in subject.parts
    ]


def _bits_of(part: Any) -> dict[str, Any]:
    """Bits of a parameter of what is dense; of packed weights they are in three kinds."""
    known = part.parameters and part.kind != CODES
    return {"bits": 8 * part.bytes / part.parameters if known else None}


def _layer(row: Row) -> dict[str, Any]:
    found = _PLACE.fullmatch(row.name)
    place: dict[str, Any] = {"stack": "", "depth": None, "projection": row.name}
    if found is not None:
        # Experts of one layer, which only a number tells apart, are one projection.
        projection = re.sub(r"(?<=\.)\d+(?=\.)", "*", found["projection"])
        stack = found["stack"].rstrip(".")
        place = {"stack": stack, "depth": int(found["depth"]), "projection": projection}
    inputs = "" if row.config is None else row.config.inputs
    facts = {"shape": list(row.shape), "label": _label(row), "inputs": inputs}
    return {**row.to_dict(), "method": _method(row), **facts, **place}


def _range(layers: Sequence[Mapping[str, Any]], measure: str) -> list[float] | None:
    """The smallest and the largest of a measure, None where no layer has it."""
    found = [layer[measure] for layer in layers if layer[measure] is not None]
    return [min(found), max(found)] if found else None


def _maps(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each stack its layers by depth and projection, in a list of cells for each depth."""
    found = []
    stacks = dict.fromkeys(layer["stack"] for layer in layers if layer["depth"] is not None)
    for stack in stacks:
        inside = [
            (index, layer)
            for index, layer in enumerate(layers)
            if layer["depth"] is not None and layer["stack"] == stack
        ]
        depths = sorted({layer["depth"] for _, layer in inside})
        projections = _in_order(layer for _, layer in inside)
        cells: dict[tuple[int, str], list[int]] = {}
        for index, layer in inside:
            cells.setdefault((layer["depth"], layer["projection"]), []).append(index)
        found.append(
            {
                "stack": stack,
                "depths": depths,
                "projections": projections,
                "cells": [
                    [_cell(layers, cells.get((depth, name), [])) for name in projections]
                    for depth in depths
                ],
            }
        )
    return found


def _in_order(layers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Projections in the order that the first depth with all of them has."""
    by_depth: dict[int, dict[str, None]] = {}
    for layer in layers:
        by_depth.setdefault(layer["depth"], {})[layer["projection"]] = None
    order: dict[str, None] = {}
    for names in sorted(by_depth.values(), key=len, reverse=True):
        order |= names
    return list(order)


def _cell(layers: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> dict[str, Any] | None:
    """Means over the layers of a cell that were converted; None for a cell without layers."""
    if not indices:
        return None
    converted = [layers[index] for index in indices if not layers[index]["reason"]]
    reasons = [layers[index]["reason"] for index in indices if layers[index]["reason"]]
    return {
        "layers": list(indices),
        "converted": len(converted),
        "reason": "; ".join(dict.fromkeys(reasons)),
        "weight_error": _mean([layer["weight_error"] for layer in converted]),
        "output_error": _mean([layer["output_error"] for layer in converted]),
    }


def _unknown(
    subject: Subject,
    original: Original | None,
    rows: Sequence[Row],
    evaluations: Sequence[Mapping[str, Any]],
) -> list[str]:
    """What a reader would look for and not find, and what to do about it."""
    said = []
    if subject.recipe is None:
        said.append(
            "Another library quantized this model, so its recipe, its methods and why layers were "
            "left alone are not known."
        )
    if any(row.weight_error is None for row in rows):
        said.append("Weight errors are not known; --reference ORIGINAL has them measured.")
    if any(row.output_error is None for row in rows):
        said.append(
            "Output errors are not known of layers that were converted without calibration, or by "
            "another library."
        )
    if original is None:
        said.append(
            "Without --reference ORIGINAL, scales are not compared with naive, and the size before "
            "is that of the same tensors with dense linears."
        )
    if not evaluations:
        said.append("No text was read; --text FILE measures perplexity.")
    elif any(row.get("kl") is None for row in evaluations):
        said.append("No original was evaluated; --reference ORIGINAL adds KL and top-1.")
    return said
