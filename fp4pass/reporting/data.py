"""Gather the numbers of a report: all that the page shows is in them, and in its JSON."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .._version import __version__
from ..core.formats import get_format
from ..core.progress import track
from ..errors import OptionError, expected
from ..methods import squared_errors
from ..methods.scale_stats import scale_counts, scale_offsets
from ..record.tensor_cores import tensor_core_note
from .layers import ERRORS, Facts, bits_of, layer_maps, summarize, weights_of
from .source import CODES, FloatModel, PackedModel, Source, open_float, open_packed
from .text import finite, mean

# The fields of an evaluation that the page needs.
_SHOWN = set("text tokens windows perplexity intervals confidence units unit".split())
_ROW = "what Evaluation.row returns"


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
    require_rows("evaluations", evaluations)
    model = open_packed(source, name)
    original = None if reference is None else open_float(reference, reference_name, model.on_disk)
    scales, offsets = _read_weights(model, original, progress)
    layers = list(model.facts.values())
    errors = [(name, [each[name] for each in layers if each[name] is not None]) for name in ERRORS]
    packed = [model.facts[name] for name in model.packed]
    # A page may be read on another machine.
    configs = [layer.config for layer in model.packed.values()]
    note = tensor_core_note(configs, machine="the machine of this report")
    data = {
        "fp4pass": __version__,
        "source": _public(model.name),
        "layout": model.layout,
        "architecture": model.architecture,
        "reference": None if original is None else _public(original.name),
        "summary": _summary(model, packed, original),
        "groups": summarize(packed),
        "sizes": _sizes(model),
        "layers": layers,
        "ranges": {name: [min(known), max(known)] if known else None for name, known in errors},
        "maps": layer_maps(layers),
        "outside": [i for i, layer in enumerate(layers) if layer["depth"] is None],
        "scales": scales,
        "offsets": offsets,
        "evaluations": [{**row, "text": _public(row["text"])} for row in evaluations],
        "recipe": model.recipe,
        "calibration": model.calibration,
        "versions": dict(model.versions),
        "notes": [note] if note else [],
        "unknown": _unknown(model, original, packed, evaluations),
    }
    return finite(data)


def require_rows(what: object, rows: Any) -> None:
    """Raise OptionError unless the rows of evaluations have what the page shows of a text."""
    if not (isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows)):
        raise OptionError(expected(f"{what}", "a list of rows", rows))
    for row in rows:
        if missing := sorted(_SHOWN - set(row)):
            raise OptionError(expected(f"{what}", _ROW, f"a text without {', '.join(missing)}"))


def _public(name: str) -> str:
    """Return the last part of a path, for a page is shown to others; names of a hub stay whole."""
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.exists(name)
    return os.path.basename(os.path.abspath(name)) if is_path else name


def _read_weights(
    model: PackedModel, original: FloatModel | None, progress: bool
) -> tuple[list[Facts], list[Facts]]:
    """Count block scales by format; one weight is held at a time."""
    counts: dict[str, Counter[float]] = {}
    offsets: dict[tuple[str, str], Counter[int]] = {}
    compared = 0
    packed = model.packed.items()
    for name, layer in track(packed, "block scales", unit="layers", show=progress):
        facts, sums = model.facts[name], [0.0, 0.0]
        # Of float32 scales hardly two are equal.
        is_counted = not layer.fmt.has_float_scale
        for scale in model.scales(name) if is_counted else ():
            counts.setdefault(layer.fmt.key, Counter()).update(scale_counts(scale, layer.fmt))
        for state, piece in model.states(name) if original is not None else ():
            weight = original.weight(name, layer, piece) if original is not None else None
            if weight is not None:
                weight = layer.config.stored(weight.to(state.qdata.device))
                compared += 1
                key = layer.fmt.key, facts["method"]
                if is_counted:
                    offsets.setdefault(key, Counter()).update(scale_offsets(weight, state))
                # Nobody reported it.
                if facts["weight_error"] is None:
                    sums = [a + b for a, b in zip(sums, squared_errors(weight, state), strict=True)]
        if facts["weight_error"] is None and sums[1]:
            facts["weight_error"] = math.sqrt(sums[0] / sums[1])
    if original is not None and not compared:
        raise OptionError(
            f"{original.name} has none of the layers of {model.name}. Give the float model that "
            "it was made of."
        )
    return (
        [_scales(key, found) for key, found in counts.items()],
        [_offsets(*key, found) for key, found in offsets.items()],
    )


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


def _offsets(key: str, method: str, counts: Mapping[int, int]) -> Facts:
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


def _summary(model: PackedModel, packed: Sequence[Facts], original: FloatModel | None) -> Facts:
    size = sum(part.bytes for part in model.parts)
    parameters = sum(part.parameters for part in model.parts)
    before = model.dense_bytes if original is None else original.bytes
    return {
        "layers": len(packed),
        "skipped": sum(bool(layer["skip_reason"]) for layer in model.facts.values()),
        "weights": weights_of(packed),
        "parameters": parameters,
        "bits_per_weight": bits_of(packed),
        "bits_per_parameter": 8 * size / parameters,
        "bytes": size,
        "bytes_before": before,
        "share": size / before,
        **{error: mean([layer[error] for layer in packed]) for error in ERRORS},
    }


def _sizes(model: PackedModel) -> list[Facts]:
    """Return the size of each kind of tensor; packed weights, in three kinds, have no bits."""
    total = sum(part.bytes for part in model.parts)
    return [
        {
            **dataclasses.asdict(part),
            "share": part.bytes / total,
            "bits": 8 * part.bytes / part.parameters
            if part.parameters and part.kind != CODES
            else None,
        }
        for part in model.parts
    ]


def _unknown(
    model: PackedModel,
    original: FloatModel | None,
    packed: Sequence[Facts],
    evaluations: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return a line for each number that is missing, with the way to get it."""
    lines = []
    if model.recipe is None:
        lines.append(
            "Another library quantized this model: its recipe, methods and reasons for skipped "
            "layers are unknown."
        )
    if any(layer["weight_error"] is None for layer in packed):
        lines.append("Weight errors are unknown. --reference ORIGINAL measures them.")
    if any(layer["output_error"] is None for layer in packed):
        lines.append(
            "Output errors are unknown for layers that were converted without calibration, or by "
            "another library."
        )
    if original is None:
        lines.append(
            "Without --reference ORIGINAL, scales are not compared with naive ones, and the size "
            "before assumes the same tensors with dense linear layers."
        )
    if not evaluations:
        lines.append("No text was read. --data FILE measures perplexity.")
    elif any(row.get("kl") is None for row in evaluations):
        lines.append("The original was not evaluated. --reference ORIGINAL adds KL and top-1.")
    return lines
