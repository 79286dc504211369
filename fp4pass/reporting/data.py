"""Gather all numbers of the page and the JSON of a report, and compare with a float model."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..checkpoint import save, source_files
from ..checkpoint.float_models import open_float_source
from ..checkpoint.layouts import BUFFERS, WEIGHTS, PackedLayer
from ..checkpoint.reader import CheckpointReader, open_checkpoint, with_layers
from ..core.formats import get_format
from ..core.progress import track
from ..errors import CheckpointError, OptionError, expected
from ..methods.search import scale_counts
from ..nn.experts import QUANTIZED, QuantizedExpertStack, weight_name
from ..nn.linear import KINDS, PACKED, SCALE, QuantizedLinear
from ..quantization.recipe import recorded
from ..record.rows import Report, Row, tensor_core_note
from ..record.state import unwrap
from .text import ERRORS, finite, mean

Facts = dict[str, Any]
Source = nn.Module | str | os.PathLike[str]

CODES, SKIPPED = KINDS[PACKED], "skipped linear layers"

# A path such as model.layers.3.self_attn.q_proj: a stack, a depth in it, and a projection.
_PLACE = re.compile(r"(?P<stack>(?:[^.]*[^.\d][^.]*\.)+)(?P<depth>\d+)\.(?P<projection>.+)")


@dataclass(frozen=True)
class Contents:
    """A folder with packed weights, with the names in the model."""

    stored: CheckpointReader
    # Packed layers; experts that lie apart are one stack where the report has one.
    layers: Mapping[str, PackedLayer]
    parts: Mapping[str, Sequence[str]]  # the names in `stored` of what each layer lies in
    rows: Sequence[Row]  # of every layer that is known, in the order of the model

    @staticmethod
    def of(folder: str | os.PathLike[str]) -> Contents:
        """Open a folder."""
        stored = open_checkpoint(folder)
        stored = stored.with_names(with_layers(stored.said("renamed")))
        report = Report.from_dict(stored.own["report"]) if stored.own else Report(())
        rows = {row.name: row for row in report.rows}
        parts = {n: [p.name for p in each] for n, each in stored.stacks.items() if n in rows}
        pieces = {piece for each in parts.values() for piece in each}
        layers = {name: layer for name, layer in stored.layers.items() if name not in pieces}
        for name, (piece, *_) in parts.items():
            whole = dataclasses.replace(stored.layers[piece], shape=rows[name].shape)
            layers[name] = stored.joined.get(name, whole)
        for name, layer in layers.items():
            bits = layer.fmt.bits_per_weight(layer.shape)
            rows.setdefault(name, Row(name, layer.shape, layer.config, bits=bits))
            parts.setdefault(name, [name])
        return Contents(stored, layers, parts, list(rows.values()))

    def scales(self, name: str) -> Iterator[Tensor]:
        """Yield the block scales of a layer."""
        names = dict.fromkeys(self.stored.names(part)[SCALE] for part in self.parts[name])
        return (tensor for _, tensor in self.stored.tensors(names))

    def sizes(self) -> list[Facts]:
        """Return bytes, and the parameters that they stand for, by kind of tensor."""
        stored = self.stored
        kinds = {
            disk: KINDS[part]
            for layer in stored.layers
            for part, disk in stored.names(layer).items()
        }
        facts = source_files.tensor_facts(
            {stored.on_disk.get(n, n): at for n, at in stored.files.items()}
        )
        skipped = {row.name for row in self.rows if row.skip_reason}
        found: dict[str, Facts] = {}
        for name in stored.files:
            shape, dtype = facts[stored.on_disk.get(name, name)]
            kind = kinds.get(name) or _dense_kind(name, len(shape), skipped)
            size = found.setdefault(kind, {"kind": kind, "bytes": 0, "parameters": 0})
            size["bytes"] += source_files.bytes_of(shape, dtype)
            size["parameters"] += 0 if name in kinds else math.prod(shape)
        if CODES in found:
            found[CODES]["parameters"] = sum(math.prod(x.shape) for x in self.layers.values())
        total = sum(size["bytes"] for size in found.values())
        for size in found.values():
            # Packed weights, in three kinds, have no bits.
            has_bits = size["parameters"] and size["kind"] != CODES
            size["share"] = size["bytes"] / total
            size["bits"] = 8 * size["bytes"] / size["parameters"] if has_bits else None
        return sorted(found.values(), key=lambda size: (-size["bytes"], size["kind"]))

    def dense_bytes(self) -> int:
        """Return the bytes of its tensors if packed weights had the dtype of their layers."""
        plain = sum(size["bytes"] for size in self.sizes() if size["kind"] not in KINDS.values())
        return plain + sum(
            math.prod(layer.shape) * getattr(torch, layer.weight_dtype).itemsize
            for layer in self.layers.values()
        )


def _dense_kind(name: str, dimensions: int, skipped: set[str]) -> str:
    path, _, last = name.rpartition(".")
    if path in skipped and last == "weight":
        return SKIPPED
    if dimensions < 2:
        return "biases, norms and other vectors"
    words = name.split(".")
    if any("embed" in word or word in ("wte", "wpe") for word in words):
        return "embeddings"
    return SKIPPED if "lm_head" in words else "other matrices"


@dataclass(frozen=True)
class FloatModel:
    """The float model that a quantized one was made of: its tensors by name, read one by one."""

    name: str
    bytes: int
    tensors: Mapping[str, Any]  # tensors, or the files that hold them
    on_disk: Mapping[str, str]  # names of weights and stacks in folders, where they differ

    @staticmethod
    def of(source: Source, name: str, on_disk: Mapping[str, str]) -> FloatModel:
        """Open a float model or its folder."""
        if isinstance(source, nn.Module):
            root = unwrap(source)
            held: dict[str, Any] = dict(root.named_parameters(remove_duplicate=False))
            size = sum(each.nbytes for each in root.parameters())
            return FloatModel(name or type(root).__name__, size, held, on_disk)
        folder = Path(source)
        if not folder.is_dir():
            wanted = "the folder of a float model"
            raise CheckpointError(expected("reference", wanted, str(folder)))
        made = open_float_source(str(folder))
        if made is None:
            source_files.require_float(folder)
        files = source_files.find_shards(folder, WEIGHTS)
        size = sum(
            source_files.bytes_of(*facts) for facts in source_files.tensor_facts(files).values()
        )
        held = {**files, **({} if made is None else made.weights())}
        return FloatModel(name or str(source), size, held, on_disk)

    def weight(self, layer: str, packed: PackedLayer) -> Tensor | None:
        """Return the weight of a layer as [N, K] or [E, N, K], None without one."""
        names = [layer, f"{layer}.weight"]
        names += [self.on_disk[name] for name in names if name in self.on_disk]
        name = next((each for each in names if each in self.tensors), None)
        if name is None:
            return None
        found = self.tensors[name]
        if isinstance(found, Path):
            ((_, found),) = source_files.read_tensors({name: found})
        found = found[...].detach()
        if tuple(found.shape) != packed.dense_shape:
            wanted = f"shape {packed.dense_shape}"
            raise CheckpointError(
                expected(f"{layer} of the reference", wanted, tuple(found.shape))
                + " Give the float model that the quantized one was made of."
            )
        return packed.matrices(found)


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
    if isinstance(source, nn.Module):
        with _saved(source) as folder:
            kind = type(unwrap(source)).__name__
            known: Any = {"reference": reference, "reference_name": reference_name}
            known |= {"evaluations": evaluations, "progress": progress}
            data = gather(folder, name=name or kind, **known)
        return data | {"layout": "in memory", "architecture": kind}
    model = Contents.of(source)
    stored, before = model.stored, None
    if reference is not None:
        before = FloatModel.of(reference, reference_name, stored.renamed)
    facts = {row.name: layer_facts(row) for row in model.rows}
    if before is not None:
        _measure(model, before, facts)
    layers, packed = list(facts.values()), [facts[each] for each in model.layers]
    # A page may be read on another machine.
    configs = [layer.config for layer in model.layers.values()]
    note = tensor_core_note(configs, machine="the machine of this report")
    sizes = model.sizes()
    size, parameters = (sum(each[key] for each in sizes) for key in ("bytes", "parameters"))
    bytes_before = model.dense_bytes() if before is None else before.bytes
    data = {
        "fp4pass": __version__,
        "source": _public(name or str(source)),
        "layout": stored.layout.name,
        "architecture": next(iter(stored.config.get("architectures") or ()), None),
        "reference": None if before is None else _public(before.name),
        "summary": {
            "layers": len(packed),
            "skipped": sum(bool(layer["skip_reason"]) for layer in layers),
            "weights": _weights(packed),
            "parameters": parameters,
            "bits_per_weight": _bits(packed),
            "bits_per_parameter": 8 * size / parameters,
            "bytes": size,
            "bytes_before": bytes_before,
            "share": size / bytes_before,
            **{error: mean([layer[error] for layer in packed]) for error in ERRORS},
        },
        "groups": summarize(packed),
        "sizes": sizes,
        "layers": layers,
        "maps": layer_maps(layers),
        "outside": [i for i, layer in enumerate(layers) if layer["depth"] is None],
        "scales": _scales(model, progress),
        "evaluations": [{**row, "text": _public(row["text"])} for row in evaluations],
        # As `quantize --rules` reads it; None if it is not known.
        "recipe": None if stored.recipe is None else recorded(stored.recipe),
        "calibration": (stored.recipe or {}).get("calibration"),
        "versions": stored.versions,
        "notes": [note] if note else [],
        "unknown": _unknown(stored.recipe is not None, before is not None, packed, evaluations),
    }
    return finite(data)


@contextmanager
def _saved(model: nn.Module) -> Iterator[Path]:
    """Write a converted model to a folder for as long as it is read."""
    with TemporaryDirectory(prefix="fp4pass-report-") as scratch:
        with warnings.catch_warnings():
            # They are about other readers of the folder.
            warnings.simplefilter("ignore")
            layout: Any = "fp4pass"
            save(model, Path(scratch, "model"), layout=layout, progress=False)
        yield Path(scratch, "model")


def layer_facts(row: Row) -> Facts:
    """Return the fields of a row and its config: `label` for tables, `legend`, and its place."""
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


def _measure(model: Contents, before: FloatModel, facts: Mapping[str, Facts]) -> None:
    """Measure weight errors that nobody reported."""
    compared = 0
    for name, layer in model.layers.items():
        weight = before.weight(name, layer)
        pieces = (f"{part}.weight" in before.tensors for part in model.parts[name])
        compared += weight is not None or any(pieces)
        if weight is not None and facts[name]["weight_error"] is None:
            dense = model.stored.dense(name, torch.float32)
            facts[name]["weight_error"] = relative_error(weight, dense)
    if not compared:
        raise OptionError(
            f"{before.name} has none of the layers of {model.stored.folder}. Give the float model "
            "that it was made of."
        )


def _scales(model: Contents, progress: bool) -> list[Facts]:
    """Count block scales by format."""
    every: dict[str, Counter[float]] = {}
    for name, layer in track(model.layers.items(), "block scales", unit="layers", show=progress):
        # Of float32 scales hardly two are equal.
        for bits in () if layer.fmt.has_float_scale else model.scales(name):
            every.setdefault(layer.fmt.key, Counter()).update(scale_counts(bits, layer.fmt))
    found = []
    for key, counts in every.items():
        scale = get_format(key).scale
        blocks, used = sum(counts.values()), sorted(value for value in counts if value > 0)
        # Other libraries write zero for blocks that are all zero; other bytes are invalid.
        zero = counts.get(0.0, 0)
        numbers = {
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
        found.append({"format": key, "scale": scale.name, **numbers})
    return found


def _unknown(
    ours: bool, compared: bool, packed: Sequence[Facts], evaluations: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return a line for each number that is missing, with the way to get it."""
    lacks_weight, lacks_output = (any(each[key] is None for each in packed) for key in ERRORS)
    lines = {
        "Another library quantized this model: its recipe, methods and reasons for skipped layers "
        "are unknown.": not ours,
        "Weight errors are unknown. --reference ORIGINAL measures them.": lacks_weight,
        "Output errors are unknown for layers that were converted without calibration, or by "
        "another library.": lacks_output,
        "Without --reference ORIGINAL, the size before assumes the same tensors with dense linear "
        "layers.": not compared,
        "No text was read. --data FILE measures perplexity.": not evaluations,
        "The original was not evaluated. --reference ORIGINAL adds KL and top-1.": any(
            row.get("kl") is None for row in evaluations
        ),
    }
    return [line for line, is_missing in lines.items() if is_missing]


# Of weight errors that were summed in another order, relative.
_ROUNDING = 1e-6


def relative_error(original: Tensor, other: Tensor) -> float:
    """Return |A - B| / |A|, 0 for equal tensors and infinity for a difference from zeros."""
    difference = original.float() - other.to(original.device).float()
    size = original.float().norm(dtype=torch.float64).item()
    error = difference.norm(dtype=torch.float64).item()
    return error / size if size else (math.inf if error else 0.0)


@torch.no_grad()
def compare(
    stored: CheckpointReader, model: nn.Module, reference: nn.Module, max_error: float
) -> tuple[dict[str, float], int, dict[str, str]]:
    """Compare every tensor of a packed model, loaded of a folder, with a float model's."""
    # Returns the errors of layers, the number of other tensors, and what is wrong by its name.
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    reported = {row.name: row.weight_error for row in rows if not row.skip_reason}
    originals = dict(reference.named_parameters(remove_duplicate=False))
    packed = {n: each for n, each in model.named_modules() if isinstance(each, QUANTIZED)}
    errors, wrong = dict[str, float](), dict[str, str]()
    for name, module in track(packed.items(), "compare", unit="layers"):
        weight, shape = originals.get(weight_name(name, module)), tuple(module.weight.shape)
        if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
            there = f"one of {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"
            wrong[name] = f"is a weight of {shape}, the reference has {there} there"
            continue
        error = errors[name] = _weight_error(weight, module)
        wanted = reported.get(name)
        if wanted is not None and not abs(error - wanted) <= _ROUNDING * wanted:
            wrong[name] = f"has a weight error of {error:.6f}, not {wanted:.6f}"
        elif not error <= max_error:
            wrong[name] = f"has a weight error of {error:.3f}, above {max_error}"
    layers = {*packed, *stored.layers}
    parts = {f"{layer}.{part}" for layer in layers for part in (*BUFFERS, "weight")} | layers
    ours, theirs = (
        {name: t.detach().cpu() for name, t in each.state_dict().items() if name not in parts}
        for each in (model, reference)
    )
    for name in sorted(ours.keys() ^ theirs.keys()):
        holder = "the checkpoint" if name in ours else "the reference"
        wrong.setdefault(name, f"is in {holder} only")
    both = sorted(ours.keys() & theirs.keys())
    for name in both:
        bits = [each.to(ours[name].dtype).contiguous() for each in (ours[name], theirs[name])]
        mine, other = (each.flatten().view(torch.uint8) for each in bits)
        if ours[name].shape != theirs[name].shape or not torch.equal(mine, other):
            wrong[name] = "is not the reference's tensor, bit by bit"
    return errors, len(both), wrong


def _weight_error(weight: Tensor, module: QuantizedLinear | QuantizedExpertStack) -> float:
    """Return the error of a packed weight, before it is rotated back and rounded to its dtype."""
    rows = module.from_parameter(weight)
    if not module.config.rotation:
        return relative_error(rows, module.from_parameter(module.weight))
    kept = torch.cat(list(map(module.config.stored, module.unstacked(rows))))
    return relative_error(kept, module.stored_weight(torch.float32).flatten(0, -2))
