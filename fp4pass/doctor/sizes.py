"""Judge the sizes of weights and inputs: global scales in the wrong direction, or never set."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping

from ..checkpoint import SERVED
from ..checkpoint.layouts import fused_problems
from ..nn.linear import GLOBAL, INPUT_GLOBAL, SCALE
from .folder import EXPERT, Folder, Stored
from .numbers import Statistics

# Weights of trained models have a root mean square of 1e-3 to 1, and these bounds are far from it.
_RMS = (2.0**-24, 2.0**6)

# Between layers of one role, such as all mlp.up_proj, sizes differ by less than ten.
_APART = 2.0**7

# As many layers have a usual size.
_FEWEST = 4

# The largest input of a layer: of less nothing comes, of more no 16-bit model.
_INPUTS = (2.0**-12, 2.0**17)

# Attention to something else, where q does not read what k and v read.
_CROSS_ATTENTION = re.compile(r"cross|enc[a-z]*_?(dec|attn)", re.IGNORECASE)


def check_sizes(found: Folder, kept: Mapping[str, Statistics], wrong: Collection[str]) -> None:
    """Note global scales that no trained model has, and those that differ where engines fuse.

    wrong: layers whose numbers are wrong.
    """
    skipped = {*wrong, *_check_weights(found, kept), *_check_inputs(found, kept)}
    if found.layout.engines:
        check_fused(found, kept, skipped)


def _check_weights(found: Folder, kept: Mapping[str, Statistics]) -> set[str]:
    """Note weights of odd sizes; return the layers whose sizes no model has."""
    sizes = {name: each.rms for name, each in kept.items() if each.rms}
    turned = {
        name
        for name, size in sizes.items()
        if _is_odd(found, name, GLOBAL, size, kept[name].scalars.get(GLOBAL, 1.0))
    }
    usual = {name: size for name, size in sizes.items() if name not in turned}
    roles: dict[str, list[str]] = {}
    for name in usual:
        role = ".".join("*" if each.isdigit() else each for each in name.split("."))
        roles.setdefault(role, []).append(name)
    for role, names in roles.items():
        # Few say little of each other.
        is_few = len(names) < _FEWEST
        others = list(usual) if is_few else names
        apart, of = (4 * _APART, "layers") if is_few else (_APART, role)
        middle = statistics.median(usual[name] for name in others)
        for name in names if len(others) >= _FEWEST else ():
            if not middle / apart <= usual[name] <= apart * middle:
                what = f"expected weights of the size of the other {of}, {middle:.3g}"
                place = _stored(found, name, GLOBAL)
                found.say("weights-size", place, f"{what}, got {usual[name]:.3g}")
    return turned


def _check_inputs(found: Folder, kept: Mapping[str, Statistics]) -> set[str]:
    """Note scales of inputs that are odd, missing or never set; return their layers."""
    scales = {n: e.scalars[INPUT_GLOBAL] for n, e in kept.items() if INPUT_GLOBAL in e.scalars}
    ones = {name for name, scale in scales.items() if scale == 1.0}
    any_number = any(math.frexp(scale)[0] != 0.5 for scale in scales.values())
    if ones and (len(ones) == len(scales) or any_number):
        for name in sorted(ones):
            what = "expected a calibrated scale, got exactly 1"
            found.say("input-uncalibrated", _stored(found, name, INPUT_GLOBAL), what)
        odd = ones
    else:
        odd = set()
        for name, scale in scales.items():
            fmt = found.records[name].fmt
            # Without block scales of inputs it is the scale of their elements.
            most = scale * fmt.element.max * (fmt.scale.max if fmt.has_global_scale else 1)
            if _is_odd(found, name, INPUT_GLOBAL, most, scale):
                odd.add(name)
    return odd | check_missing_inputs(found)


def check_missing_inputs(found: Folder) -> set[str]:
    """Note layers whose inputs are quantized by a scale that is not there, and return them."""
    # Ours has them, or means that each input gets one of its own.
    missing = {
        name
        for name, record in ({} if found.own is not None else found.records).items()
        if record.has_input_scale and INPUT_GLOBAL not in found.parts[name]
    }
    for name in sorted(missing):
        is_expert = "of an expert " if EXPERT.match(f"{name}.weight") else ""
        what = f"expected {found.name_of(name, INPUT_GLOBAL)}, for inputs {is_expert}are quantized"
        found.say("input-missing", name, f"{what}, got none")
    return missing


def check_fused(found: Folder, kept: Mapping[str, Statistics], skipped: Collection[str]) -> None:
    """Note the modules of which engines fuse layers whose scales differ."""
    served = any(str(each).endswith(SERVED) for each in found.config.get("architectures") or ())
    # Of a scale that one of them lacks, another finding tells.
    lacking = {n.rpartition(".")[0] for n in kept if INPUT_GLOBAL not in found.parts[n]}
    scales: dict[str, dict[str, float]] = {}
    for name, each in kept.items():
        if name not in skipped:
            # As they are stored.
            power = 1 if found.multiplies(name) else -1
            scales[name] = {part: value**power for part, value in each.scalars.items()}
            if not served or _CROSS_ATTENTION.search(name) or name.rpartition(".")[0] in lacking:
                scales[name].pop(INPUT_GLOBAL, None)
    others = {each.where for each in found.findings if each.kind == "fused-schemes"}
    records = {name: each for name, each in found.records.items() if name in scales}
    for parent, problem in fused_problems(records, (), scales):
        if parent not in others:
            found.say("fused-scales", parent, f"expected one for all, got {problem}")


def _stored(found: Folder, layer: str, part: str) -> Stored:
    held = found.parts[layer]
    return held.get(part) or held[SCALE]


def _is_odd(found: Folder, layer: str, part: str, size: float, scale: float) -> bool:
    """Note a size that no model has, or that the other direction of a scale makes usual."""
    is_weight = part == GLOBAL
    low, high = _RMS if is_weight else _INPUTS
    if low <= size <= high:
        return False
    other, what = size / scale / scale, "weights of" if is_weight else "inputs of at most"
    if low <= other <= high and scale > 1:
        kind = "global-direction" if is_weight else "input-direction"
        as_it_is = found.multiplies(layer)
        text = (
            f"expected a number that {'multiplies' if as_it_is else 'divides'}, got "
            f"{scale if as_it_is else 1 / scale:g}, which makes {what} {size:.3g}; its reciprocal "
            f"makes {other:.3g}"
        )
    else:
        kind = "weights-size" if is_weight else "input-bad"
        text = f"expected {what} {low:.2g} to {high:.2g}, got {size:.3g}"
    found.say(kind, _stored(found, layer, part), text)
    return True
