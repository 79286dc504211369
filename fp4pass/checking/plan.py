"""Plan what can be mended of a folder without its model: tensors to change, configs to write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.layouts import FUSED, PackedLayer, as_globs, join, matches
from ..core.quant_state import QuantState
from ..errors import some
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..methods import Stats, resolve_method
from .check import Checked
from .declared import missed
from .kinds import Finding
from .numbers import block_values, scale_values
from .stored import DTYPES, Stored, read_header
from .structure import EXPERT, by_shape, dense_names, is_ignored
from .survey import PREFIXES, multiplies

# The names in configs of the list of dense layers.
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")

# Findings of which the config of the layout is written anew.
_REDECLARED = ("config-absent", "config-layout", "config-disagrees", "block-size")

_HEAD = "lm_head"


@dataclass
class Plan:
    """The changes of a folder.

    Attributes:
        config: config.json as it will be.
        sides: the other files that declare the layout.
        tensors: what makes each tensor that is changed or new, by its name.
        dropped: the tensors that are left out.
        prefix: what is taken off every name.
        mended: a line for each thing that is done.
        kept: findings that a new folder would not show, and that stay.
    """

    config: dict[str, Any]
    sides: dict[str, dict[str, Any]]
    tensors: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    prefix: str = ""
    mended: list[str] = field(default_factory=list)
    kept: list[Finding] = field(default_factory=list)


def make_plan(checked: Checked) -> Plan:
    """Return what can be mended of what was found."""
    found = checked.found
    sides = {name: copy.deepcopy(dict(each)) for name, each in found.sides.items()}
    plan = Plan(copy.deepcopy(dict(found.config)), sides)
    kinds: dict[str, list[Finding]] = {}
    for each in checked.findings:
        kinds.setdefault(each.kind, []).append(each)
    if "names" in kinds:
        plan.prefix = next(p for p in PREFIXES if kinds["names"][0].where == p)
        plan.mended.append(f"names: {plan.prefix} is taken off")
    files = [each for kind in ("index", "file-missing") for each in kinds.get(kind, [])]
    if files or any(each.where.endswith(".index.json") for each in kinds.get("json-damaged", [])):
        plan.mended.append("index: it is what the files hold")
    _duplicates(checked, plan, kinds.get("duplicate", []))
    _twins(checked, plan, kinds)
    _dtypes(checked, plan, kinds.get("dtype", []))
    for kind in ("global-direction", "input-direction"):
        for each in kinds.get(kind, []):
            stored = found.tensors[each.where]
            plan.tensors[each.where] = partial(_reciprocal, stored)
            plan.mended.append(f"{kind}: {each.where} is its reciprocal")
    _inputs(checked, plan, [*kinds.get("input-missing", []), *kinds.get("input-bad", [])])
    for each in kinds.get("fused-scales", []):
        _fuse(checked, plan, each.where)
    if "config-changed" in kinds and found.own is not None:
        plan.config = copy.deepcopy(dict(found.own["config"]))
        keys = [each.where for each in kinds["config-changed"]]
        plan.mended.append(f"config-changed: {some(keys)} is as it was saved")
        return plan
    if any(kind in kinds for kind in _REDECLARED):
        _redeclare(checked, plan)
    elif "ignore-packed" in kinds or "ignore-misses" in kinds:
        _lists(checked, plan)
    if "tied-head" in kinds:
        for part in (plan.config, plan.config.get("text_config")):
            if isinstance(part, dict) and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
        plan.mended.append("tied-head: tie_word_embeddings is false")
    for each in kinds.get("mtp-absent", []):
        *path, key = each.where.split(".")
        part = plan.config
        for step in path:
            part = part[step]
        part[key] = 0
        plan.mended.append(f"mtp-absent: {each.where} is 0")
    return plan


def _duplicates(checked: Checked, plan: Plan, findings: list[Finding]) -> None:
    for each in findings:
        kept = checked.found.tensors[each.where]
        names = {path.name for path in checked.found.folder.glob("*.safetensors")}
        others = []
        for name in sorted(names - {kept.path.name}):
            held = read_header(checked.found.folder / name)
            others += [held[each.where]] if each.where in held else []
        same = all(
            other.kind == kept.kind
            and other.shape == kept.shape
            and torch.equal(_bytes(other.read()), _bytes(kept.read()))
            for other in others
        )
        if same:
            plan.mended.append(f"duplicate: {each.where} is there once")
        else:
            plan.kept.append(each)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _twins(checked: Checked, plan: Plan, kinds: Mapping[str, list[Finding]]) -> None:
    """Drop what is there a second time, and what is left of a packed layer."""
    found, layers = checked.found, checked.layers
    for each in kinds.get("twice", []):
        if is_ignored(found, each.where):
            plan.dropped |= {held.name for held in layers.parts[each.where].values()}
            what = "its codes and scales are dropped, for the config declares it dense"
        else:
            plan.dropped.add(f"{each.where}.weight")
            what = "its dense weight is dropped, for the config declares it packed"
        plan.mended.append(f"twice: {each.where}: {what}")
    for each in kinds.get("orphan", []):
        layer = each.where.rpartition(".")[0]
        dense = found.tensors.get(f"{layer}.weight")
        if (
            layer not in layers.records
            and dense is not None
            and dense.kind in ("BF16", "F16", "F32")
        ):
            plan.dropped.add(each.where)
            plan.mended.append(f"orphan: {each.where} is dropped, for {layer} is dense")


def _dtypes(checked: Checked, plan: Plan, findings: list[Finding]) -> None:
    for each in findings:
        wanted = DTYPES[each.found.split()[1].rstrip(",")]
        stored = checked.found.tensors[each.where]
        tensor = stored.read()
        if (tensor.itemsize == 1 and not tensor.is_floating_point()) or wanted == torch.uint8:
            if tensor.itemsize != 1:
                continue
            made: Callable[[], Tensor] = partial(_viewed, stored, wanted)
        else:
            cast = tensor.to(wanted)
            if not torch.equal(cast.to(torch.float64), tensor.to(torch.float64)):
                continue
            made = partial(_cast, stored, wanted)
        plan.tensors[each.where] = made
        plan.mended.append(f"dtype: {each.where} is {str(wanted).removeprefix('torch.')}")


def _viewed(stored: Stored, dtype: torch.dtype) -> Tensor:
    return stored.read().view(dtype)


def _cast(stored: Stored, dtype: torch.dtype) -> Tensor:
    return stored.read().to(dtype)


def _reciprocal(stored: Stored) -> Tensor:
    return 1 / stored.read()


def _constant(value: Tensor) -> Tensor:
    return value


def _inputs(checked: Checked, plan: Plan, findings: list[Finding]) -> None:
    """Give experts without a scale of inputs the largest of the others of their layer."""
    found, layers = checked.found, checked.layers
    last = found.layout.parts.get(INPUT_GLOBAL)
    if last is None:
        return
    for each in findings:
        layer = each.where.removesuffix(f".{last}")
        match = EXPERT.match(f"{layer}.weight")
        if match is None or layer not in layers.records:
            continue
        rest = match[3].rpartition(".")[0]
        scales, shape = [], None
        for name, kept in checked.kept.items():
            other = EXPERT.match(f"{name}.weight")
            if other is not None and (other[1], other[3]) == (match[1], match[3]):
                if INPUT_GLOBAL in kept.scalars and name != layer:
                    scales.append(kept.scalars[INPUT_GLOBAL])
                    shape = layers.parts[name][INPUT_GLOBAL].shape
        if not scales or shape is None:
            continue
        as_it_is = multiplies(found.layout, layers.records[layer].fmt)
        value = max(scales) if as_it_is else 1 / max(scales)
        number = torch.full(shape, value, dtype=torch.float32)
        plan.tensors[join(layer, last)] = partial(_constant, number)
        plan.mended.append(
            f"{each.kind}: {layer} has the largest scale of inputs of the other {rest}"
        )


def _fuse(checked: Checked, plan: Plan, parent: str) -> None:
    """Quantize the layers of a module that engines fuse to the larger of their global scales."""
    layers = checked.layers
    for members in FUSED:
        names = [n for each in members if (n := join(parent, each)) in layers.records]
        scalars = [checked.kept[name].scalars for name in names]
        if len(names) < 2:
            continue
        for part in (GLOBAL, INPUT_GLOBAL):
            values = [each[part] for each in scalars if part in each]
            if len(values) < len(names) or len(set(values)) < 2:
                continue
            # Of the two numbers that stand for it, one and the same for all.
            most = names[values.index(max(values))]
            shared = layers.parts[most][part].read()
            for name, value in zip(names, values, strict=True):
                held = layers.parts[name]
                plan.tensors[held[part].name] = partial(_constant, shared.reshape(held[part].shape))
                if part == GLOBAL and value != max(values):
                    made = _Requantized(layers.records[name], held, value, max(values))
                    plan.tensors[held[PACKED].name] = made.packed
                    plan.tensors[held[SCALE].name] = made.scale
                    plan.mended.append(
                        f"fused-scales: {name} is quantized to the global scale of {most}, "
                        f"{max(values):g}: |W - W'| / |W| {made.error:.4f}"
                    )
            if part == INPUT_GLOBAL:
                plan.mended.append(f"fused-scales: {parent} has the largest scale of inputs")


class _Requantized:
    """A packed layer with another global scale, by scales with the least squared error."""

    def __init__(
        self, record: PackedLayer, held: Mapping[str, Stored], before: float, after: float
    ) -> None:
        self.fmt, self.held, self.before, self.after = record.fmt, held, before, after
        weight, state = self._weight(), self._state()
        found = block_values(state.qdata, scale_values(state.scale, self.fmt), self.fmt) * after
        self.error = float((found - weight).norm() / weight.norm())

    def _weight(self) -> Tensor:
        scale = scale_values(self.held[SCALE].read().view(torch.uint8), self.fmt)
        return block_values(self.held[PACKED].read(), scale, self.fmt) * self.before

    def _state(self) -> QuantState:
        method, options = resolve_method("sse")
        return method.quantize(self._weight(), Stats(), self.fmt, self.after, options).state

    def packed(self) -> Tensor:
        """Return the codes."""
        return self._state().qdata

    def scale(self) -> Tensor:
        """Return the block scales, in the dtype of files."""
        return self._state().scale.view(self.fmt.scale.storage)


# ---- what the configs declare -------------------------------------------------------------------


def _redeclare(checked: Checked, plan: Plan) -> None:
    """Write the quantization_config that the tensors make."""
    found, layers = checked.found, checked.layers
    declared = found.declared or {}
    if declared.get("transform_config"):
        return
    records = {name: by_shape(found, layers.parts[name]) for name in layers.records}
    known = {name: record for name, record in records.items() if record is not None}
    if not known or len(known) < len(records):
        return
    model = checked.model
    dense = dense_names(found, layers)
    roles = {name.rpartition(".")[2] for name in known} | {_HEAD}
    if model is not None:
        at = {name: model.names.get(f"{name}.weight", "").removesuffix(".weight") for name in dense}
        ignore = [name for name in dense if at[name] in model.linears]
        ignore += [
            name for name in model.linears if name == _HEAD and name not in {*ignore, *known}
        ]
    else:
        ignore = [name for name in dense if name.rpartition(".")[2] in roles]
    cache = found.layout.cache_format(declared) if declared else None
    own = found.layout.config(known, ignore) | found.layout.cache_config(cache)
    plan.config["quantization_config"] = own
    plan.sides = {**plan.sides, **found.layout.files(known, ignore, cache)}
    plan.mended.append(
        f"quantization_config: it declares {len(known)} layers in {found.layout.name}"
    )


def _lists(checked: Checked, plan: Plan) -> None:
    """Take packed layers off the lists of dense ones, and put dense ones on them."""
    found, layers = checked.found, checked.layers
    added = list(missed(found, layers, checked.model))
    dense = dense_names(found, layers)
    for file, said in (
        ("config.json", plan.config.get("quantization_config")),
        *plan.sides.items(),
    ):
        if not isinstance(said, dict) or not found.layout.detect(said):
            continue
        inner = said.get("quantization", said)
        keys = [key for key in _LISTS if key in inner]
        for key in keys[:1] or ["ignore"]:
            entries = list(inner.get(key) or [])
            kept: list[str] = []
            for entry in entries:
                patterns = list(_patterns(checked, said, key, entry))
                if not any(matches(name, patterns) for name in layers.records):
                    kept.append(entry)
                    continue
                kept += [name for name in dense if matches(name, patterns)]
            kept += [name for name in added if name not in kept]
            # Globs are what layouts with two configs have.
            inner[key] = as_globs(kept) if found.layout.side_files else list(dict.fromkeys(kept))
            if inner[key] != entries:
                off, on = len(set(entries) - set(kept)), len(set(kept) - set(entries))
                plan.mended.append(f"{file}: {key}: {off} entries are gone, {on} are new")


def _patterns(checked: Checked, said: Mapping[str, Any], key: str, entry: str) -> Iterator[str]:
    """Yield an entry of a list as its layout reads it."""
    alone = copy.deepcopy(dict(said))
    inner = alone.get("quantization", alone)
    for each in _LISTS:
        inner.pop(each, None)
    inner[key] = [entry]
    yield from checked.found.layout.ignored(alone) or ()
