"""The layers of a report as plain values: their facts, and their places in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..checkpoint.layouts import PackedLayer
from ..checkpoint.model_layers import stored_shape
from ..nn.experts import QUANTIZED
from ..record.rows import Report, Row
from .text import mean

Facts = dict[str, Any]

# The errors of a layer, and their names in a chart.
ERRORS = {"weight_error": "weight error", "output_error": "output error"}

# A path such as model.layers.3.self_attn.q_proj: a stack, a depth in it, and a projection.
_PLACE = re.compile(r"(?P<stack>(?:[^.]*[^.\d][^.]*\.)+)(?P<depth>\d+)\.(?P<projection>.+)")


def layer_facts(row: Row) -> Facts:
    """Return the fields of a row and of its config, and more that the page says of a layer.

    `label` is its scheme in a table, `legend` its name in a legend; `stack`, `depth` (None outside
    of a stack) and `projection` are its place in the model. Only this file reads the fields of a
    row.
    """
    facts = {**row.to_dict(), "label": "", "legend": ""}
    del facts["config"]
    if row.config is not None:
        config = row.config
        # Another library quantized the layer, if there is no method.
        method = "" if config.method is None else config.method_name
        facts |= {**config.to_dict(), "method": method, "label": config.label}
        facts["legend"] = ", ".join(filter(None, (config.label, method)))
    return facts | _place(row.name)


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
            "weights": weights_of(layers),
            "bits": bits_of(layers),
            **{error: mean([layer[error] for layer in layers]) for error in ERRORS},
        }
        for _, layers in sorted(groups.items())
    ]


def weights_of(layers: Sequence[Facts]) -> int:
    """Return the number of weights of layers."""
    return sum(math.prod(layer["shape"]) for layer in layers)


def bits_of(layers: Sequence[Facts]) -> float:
    """Return the mean bits of the weights of layers."""
    bits = sum(layer["bits"] * math.prod(layer["shape"]) for layer in layers)
    return float(bits / weights_of(layers))


def packed_layers(report: Report, root: nn.Module) -> dict[str, PackedLayer]:
    """Return how each quantized layer of a model in memory is packed, as a folder would say it."""
    found = {}
    for row in report.converted:
        module = root.get_submodule(row.name)
        if isinstance(module, QUANTIZED):
            dtype = str(module.weight_dtype).removeprefix("torch.")
            stored = stored_shape(getattr(module, "view", None), row.shape)
            found[row.name] = PackedLayer(
                module.config, dtype, module.transposed, row.shape, stored
            )
    return found


def layer_maps(layers: Sequence[Facts]) -> list[Facts]:
    """Return a table for each stack of layers: its cells hold indices of layers and mean errors."""
    stacks: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer["depth"] is not None:
            stacks.setdefault(layer["stack"], []).append(index)
    return [_layer_map(stack, layers, inside) for stack, inside in stacks.items()]


def _layer_map(stack: str, layers: Sequence[Facts], inside: Sequence[int]) -> Facts:
    depths = sorted({layers[index]["depth"] for index in inside})
    projections = _in_order(layers[index] for index in inside)
    cells: dict[tuple[int, str], list[int]] = {}
    for index in inside:
        cells.setdefault((layers[index]["depth"], layers[index]["projection"]), []).append(index)
    return {
        "stack": stack,
        "depths": depths,
        "projections": projections,
        "cells": [
            [_cell(layers, cells.get((depth, name), [])) for name in projections]
            for depth in depths
        ],
    }


def _place(name: str) -> Facts:
    found = _PLACE.fullmatch(name)
    if found is None:
        return {"stack": "", "depth": None, "projection": name}
    # Experts of one layer, which only a number tells apart, are one projection.
    projection = re.sub(r"(?<=\.)\d+(?=\.)", "*", found["projection"])
    stack = found["stack"].rstrip(".")
    return {"stack": stack, "depth": int(found["depth"]), "projection": projection}


def _in_order(layers: Iterable[Facts]) -> list[str]:
    """Return projections in the order of the first depth that has all of them."""
    by_depth: dict[int, dict[str, None]] = {}
    for layer in layers:
        by_depth.setdefault(layer["depth"], {})[layer["projection"]] = None
    order: dict[str, None] = {}
    for names in sorted(by_depth.values(), key=len, reverse=True):
        order |= names
    return list(order)


def _cell(layers: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> Facts | None:
    """Return means over the quantized layers of a cell; None for a cell without layers."""
    if not indices:
        return None
    converted = [layers[index] for index in indices if not layers[index]["skip_reason"]]
    reasons = [layers[index]["skip_reason"] for index in indices if layers[index]["skip_reason"]]
    return {
        "layers": list(indices),
        "converted": len(converted),
        "skip_reason": "; ".join(dict.fromkeys(reasons)),
        **{error: mean([layer[error] for layer in converted]) for error in ERRORS},
    }
