"""Judge the sizes of weights and inputs: global scales in the wrong direction, or never set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ..checkpoint.checks import CROSS_ATTENTION
from ..checkpoint.layouts import fused_problems
from ..checkpoint.readers import SERVED
from ..nn.linear import GLOBAL, INPUT_GLOBAL, SCALE
from .kinds import Finding
from .numbers import Statistics
from .structure import EXPERT, Layers, dense_names
from .survey import Survey, multiplies, names_of

# Weights of trained models have a root mean square of 1e-3 to 1, and these bounds are far from it.
_RMS = (2.0**-24, 2.0**6)

# Between layers of one role, such as all mlp.up_proj, sizes differ by less than ten.
_APART = 2.0**7

# As many layers have a usual size.
_FEWEST = 4

# The largest input of a layer: of less nothing comes, of more no 16-bit model.
_INPUTS = (2.0**-12, 2.0**17)


class _Side(NamedTuple):
    """One kind of global scale to judge: its part, kinds of findings, and bounds of a size."""

    part: str
    direction: str
    otherwise: str
    bounds: tuple[float, float]
    what: str


def check_sizes(
    found: Survey, layers: Layers, kept: Mapping[str, Statistics], wrong: Collection[str]
) -> Iterator[Finding]:
    """Yield global scales that no trained model has, and those that differ where engines fuse."""
    weights = {n: (each.rms, each.scalars.get(GLOBAL, 1.0)) for n, each in kept.items() if each.rms}
    inputs = {}
    for name, each in kept.items():
        if INPUT_GLOBAL in each.scalars:
            fmt = layers.records[name].fmt
            value = each.scalars[INPUT_GLOBAL]
            # Without block scales of inputs it is the scale of their elements.
            largest = fmt.element.max * (fmt.scale.max if fmt.has_global_scale else 1)
            inputs[name] = (value * largest, value)
    side = _Side(GLOBAL, "global-direction", "weights-size", _RMS, "weights with a size of")
    turned = {}
    for finding, name in _judged(found, layers, weights, side):
        turned[name] = finding
    yield from turned.values()
    yield from _apart(found, layers, weights, turned)
    side = _Side(INPUT_GLOBAL, "input-direction", "input-bad", _INPUTS, "inputs of at most")
    bad_inputs = dict((name, each) for each, name in _judged(found, layers, inputs, side))
    uncalibrated = list(_uncalibrated(found, layers, inputs))
    if not uncalibrated:
        yield from bad_inputs.values()
    yield from uncalibrated
    missing = list(_missing_inputs(found, layers))
    yield from missing
    if found.layout.engines:
        skipped = {
            *wrong,
            *(each.where for each in missing),
            *turned,
            *bad_inputs,
            *(each.where.rpartition(".")[0] for each in uncalibrated),
        }
        yield from _fused(found, layers, kept, skipped)


def _tensor(found: Survey, layers: Layers, name: str, part: str) -> tuple[str, str]:
    held = layers.parts[name].get(part)
    if held is None and part == GLOBAL:
        held = layers.parts[name][SCALE]
    return (names_of(found.layout, name)[part], "") if held is None else (held.name, held.path.name)


def _judged(
    found: Survey, layers: Layers, sizes: Mapping[str, tuple[float, float]], side: _Side
) -> Iterator[tuple[Finding, str]]:
    """Yield what is out of bounds, by its layer; the other direction, where that one is not."""
    low, high = side.bounds
    for name, (size, scale) in sizes.items():
        if low <= size <= high:
            continue
        other = size / scale / scale
        # Of inputs a size is the scale itself, and of weights it is proportional to it.
        place = _tensor(found, layers, name, side.part)
        as_it_is = multiplies(found.layout, layers.records[name].fmt)
        verb = "multiplies" if as_it_is else "divides"
        stored = scale if as_it_is else 1 / scale
        if low <= other <= high and scale > 1:
            what = (
                f"expected a number that {verb}, got {stored:g}, which makes {side.what} "
                f"{size:.3g}; its reciprocal makes {other:.3g}"
            )
            yield Finding(side.direction, *place, what), name
        else:
            what = f"expected {side.what} {low:.2g} to {high:.2g}, got {size:.3g}"
            yield Finding(side.otherwise, *place, what), name


def _role(name: str) -> str:
    """Return a name without its numbers, which layers of one role share."""
    return ".".join("*" if each.isdigit() else each for each in name.split("."))


def _apart(
    found: Survey,
    layers: Layers,
    sizes: Mapping[str, tuple[float, float]],
    known: Mapping[str, Finding],
) -> Iterator[Finding]:
    """Yield layers that are far larger or smaller than the others of their role."""
    roles: dict[str, list[str]] = {}
    for name in sizes:
        if name not in known:
            roles.setdefault(_role(name), []).append(name)
    every = [name for names in roles.values() for name in names]
    for role, names in roles.items():
        # Few say little of each other.
        others, apart, of = (names, _APART, role)
        if len(names) < _FEWEST:
            others, apart, of = every, 4 * _APART, "layers"
        usual = statistics.median(sizes[name][0] for name in others)
        for name in names if len(others) >= _FEWEST else ():
            if not usual / apart <= sizes[name][0] <= apart * usual:
                place = _tensor(found, layers, name, GLOBAL)
                what = f"expected weights of the size of the other {of}, {usual:.3g}"
                yield Finding("weights-size", *place, f"{what}, got {sizes[name][0]:.3g}")


def _uncalibrated(
    found: Survey, layers: Layers, inputs: Mapping[str, tuple[float, float]]
) -> Iterator[Finding]:
    """Yield scales of inputs that are all 1, or are 1 among others that are any number."""
    ones = [name for name, (_, scale) in inputs.items() if scale == 1.0]
    any_number = any(math.frexp(scale)[0] != 0.5 for _, scale in inputs.values())
    if not ones or (len(ones) < len(inputs) and not any_number):
        return
    for name in ones:
        place = _tensor(found, layers, name, INPUT_GLOBAL)
        yield Finding("input-uncalibrated", *place, "expected a calibrated scale, got exactly 1")


def _missing_inputs(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield layers whose inputs are quantized, and whose scale is not there."""
    # Ours has them, or means that each input gets one of its own.
    if found.own is not None:
        return
    for name, record in layers.records.items():
        wants = record.fmt.has_global_scale and not record.config.weight_only
        if wants and INPUT_GLOBAL not in layers.parts[name]:
            is_expert = "of an expert " if EXPERT.match(f"{name}.weight") else ""
            missing = names_of(found.layout, name)[INPUT_GLOBAL]
            what = f"expected {missing}, for inputs {is_expert}are quantized, got none"
            yield Finding("input-missing", name, "", what)


def _fused(
    found: Survey, layers: Layers, kept: Mapping[str, Statistics], skipped: set[str]
) -> Iterator[Finding]:
    """Yield the modules of which engines fuse layers whose scales differ."""
    architectures = found.config.get("architectures") or ()
    served = any(str(each).endswith(SERVED) for each in architectures)
    whole = set(fused_problems(layers.records, dense_names(found, layers)))
    others = {parent for parent, _ in whole}
    scales: dict[str, dict[str, float]] = {}
    # Of a scale that one of them lacks, another finding tells.
    lacking = {n.rpartition(".")[0] for n in kept if INPUT_GLOBAL not in layers.parts[n]}
    for name, each in kept.items():
        if name in skipped:
            continue
        # As they are stored.
        turned = not multiplies(found.layout, layers.records[name].fmt)
        own = {part: 1 / value if turned else value for part, value in each.scalars.items()}
        if not served or CROSS_ATTENTION.search(name) or name.rpartition(".")[0] in lacking:
            own.pop(INPUT_GLOBAL, None)
        scales[name] = own
    records = {name: each for name, each in layers.records.items() if name in scales}
    for parent, problem in fused_problems(records, (), scales):
        if parent not in others:
            yield Finding("fused-scales", parent, "", f"expected one for all, got {problem}")
