"""Settings, calibration and conversions that the measuring scripts share."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import fp4pass
from eval.record import Results
from fp4pass.core.formats import FORMATS
from fp4pass.kernels.statistics.naive import HESSIAN_BLOCK
from fp4pass.methods import METHODS

# Rows are told apart by these; the methods of a group, which has the first three, are compared.
KEY = ("format", "block", "weight_only", "method")

Group = tuple[str, int, bool]


def simplest_first() -> list[str]:
    """All methods: naive, then those that need less data, so that each is compared to simpler
    ones. A whole Hessian is more than its blocks."""

    def cost(name: str) -> tuple[bool, bool, int, str]:
        needs = METHODS[name].needs
        return name != "naive", "hessian" in needs, len(needs), name

    return sorted(METHODS, key=cost)


def able(methods: Sequence[str], block: int) -> list[str]:
    """The methods that there are for a block: calibration collects Hessians of 32 columns."""
    return [
        name
        for name in methods
        if block <= HESSIAN_BLOCK or "block_hessian" not in METHODS[name].needs
    ]


def calibrated(model: nn.Module, methods: Sequence[str], batches: Sequence[Any]) -> dict[str, Any]:
    """A prepared and calibrated copy of `model` for each method; methods share one if they can.

    Methods that need nothing get one too: the global scales of the inputs come from calibration.
    """
    found: dict[str, Any] = {}
    for name in sorted(methods, key=lambda name: -len(METHODS[name].needs)):
        needs = set(METHODS[name].needs)
        shared = [other for other in found if needs <= set(METHODS[other].needs)]
        if shared:
            found[name] = found[shared[0]]
        else:
            found[name] = fp4pass.prepare(copy.deepcopy(model), name)
            fp4pass.calibrate(found[name], batches)
    return found


def conversions(
    prepared: Mapping[str, nn.Module], group: Group, methods: Sequence[str]
) -> Iterator[tuple[dict[str, Any], nn.Module]]:
    """For each method the beginning of its row, and a converted copy of what is prepared for it."""
    name, block, weight_only = group
    for method in able(methods, block):
        converted = copy.deepcopy(prepared[method])
        began = time.perf_counter()
        fp4pass.convert(converted, name, method, weight_only=weight_only, block=block)
        seconds = time.perf_counter() - began
        row = dict(zip(KEY, (*group, method), strict=True))
        yield {**row, "convert_seconds": seconds, **sizes(fp4pass.report(converted))}, converted


def sizes(report: fp4pass.Report) -> dict[str, float]:
    """Bits per weight over the converted linears, and the mean of their weight errors."""
    count = [math.prod(row.shape) for row in report.converted]
    bits = sum(row.bits * size for row, size in zip(report.converted, count, strict=True))
    return {
        "bits": bits / sum(count),
        "weight_error": mean([row.weight_error or 0.0 for row in report.converted]),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def require_apart(calibration: Path, measured: Path) -> None:
    """Exit if a document of one file is in the other as well."""
    shared = documents(calibration) & documents(measured)
    if shared:
        raise SystemExit(
            f"{measured}: {len(shared)} of its documents are in {calibration} too, and what a "
            "model is calibrated on says nothing about other text. Give other files."
        )


def documents(path: Path) -> set[str]:
    """The documents of a text file, between lines `<|doc|>`."""
    lines = path.read_text(encoding="utf-8").split("\n<|doc|>\n")
    return {text for line in lines if (text := line.strip())}


def unmeasured(
    results: Results, model: nn.Module, formats: Sequence[str], methods: Sequence[str]
) -> list[Group]:
    """Return the groups without a row of each method, which are measured whole.

    Blocks that do not divide the widths of all linears are left out, with a line that says so:
    their rows would be of other linears than the rest.
    """
    widths = {m.in_features for m in model.modules() if isinstance(m, nn.Linear)}
    fitting = []
    for name in formats:
        for block in FORMATS[name].blocks:
            odd = sorted(width for width in widths if width % block)
            if odd:
                print(f"{name}:{block} is left out: there are linears of width {odd[0]}")
            else:
                fitting.append((name, block))
    there = {tuple(row[name] for name in KEY) for row in results.rows}
    return [
        (name, block, weight_only)
        for name, block in fitting
        for weight_only in (True, False)
        if not there >= {(name, block, weight_only, method) for method in able(methods, block)}
    ]
