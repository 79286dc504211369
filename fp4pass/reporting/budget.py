"""Draw what `fp4pass.allocate` found: KL against bits, and the bits of each layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ..core.files import path_of
from ..core.names import without_numbers
from ..lab.budget import Allocation, Candidate
from . import charts
from .charts import Cells, Panel, Points, Scale
from .figures import short_names


def draw_allocation(allocation: Allocation, path: str | os.PathLike[str]) -> None:
    """Draw an allocation as a PNG: KL against bits, and the bits of each layer.

    Args:
        allocation: as `fp4pass.allocate` returns it.
        path: of the file.

    Example:
        >>> schemes = ("nvfp4a16", "bf16")
        >>> found = fp4pass.allocate(model, bits=6, schemes=schemes, data=batches)
        >>> fp4pass.reporting.draw_allocation(found, "budget.png")
    """
    panels = [curve(allocation), layers(allocation)]
    charts.write_png([[panel] for panel in panels], path_of(path, "path"), columns=2)


def curve(allocation: Allocation) -> Panel:
    """Return KL against bits: the prediction, and the models that were measured."""
    points = [point for point in allocation.curve if point.predicted > 0]
    line = Points(
        [point.bits for point in points],
        [point.predicted for point in points],
        label="predicted by the sum",
        color=charts.GRAY,
        marker="",
        line="-",
    )
    # A model that stays as it is has no place on a scale of logarithms.
    measured = [each for each in allocation.measured if each.kl > 0]
    chosen = allocation.chosen.schemes
    others = [each for each in measured if each.schemes != chosen]
    kinds = {
        "other choices, held out": [each for each in others if each.label == "allocated"],
        "uniform models, held out": [each for each in others if each.label != "allocated"],
        "chosen, held out": [each for each in measured if each.schemes == chosen],
    }
    series = [
        _measured(each, label, color) for color, (label, each) in enumerate(kinds.items()) if each
    ]
    return Panel(
        [line, *series],
        title="KL against bits",
        x=Scale("bits a weight", grid=True),
        y=Scale("KL, nats per token", log=True, grid=True),
        width=6.4,
    )


def layers(allocation: Allocation) -> Panel:
    """Return the bits of each layer, depth to the right."""
    rows: dict[str, dict[tuple[int, ...], float]] = {}
    for group in allocation.groups:
        for name in group.layers:
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            # Experts of one layer are one group.
            rows.setdefault(without_numbers(name), {})[tuple(numbers[:1])] = group.bits
    depths = sorted({depth for row in rows.values() for depth in row})
    cells = [[row.get(depth, math.nan) for depth in depths] for row in rows.values()]
    bits = [value for row in cells for value in row if not math.isnan(value)]
    shown = charts.whole_numbers(0, len(depths) - 1, most=30)
    names = [str(depths[i][0]) if depths[i] else "" for i in range(len(depths))]
    return Panel(
        [Cells(cells, ends=(min(bits), max(bits)), label="bits")],
        title="Bits of each layer",
        x=Scale("depth", ticks={i + 0.5: names[i] for i in shown}),
        categories=short_names(list(rows)),
        width=max(6.4, min(2.2 + 0.36 * len(depths), 16.0)),
        height=1.0 + 0.26 * len(rows),
    )


def _measured(candidates: Sequence[Candidate], label: str, color: int) -> Points:
    ends: list[Any] = [(each.low or each.kl, each.high or each.kl) for each in candidates]
    bits, kl = [each.bits for each in candidates], [each.kl for each in candidates]
    return Points(bits, kl, label=label, color=color, y_ends=ends)
