"""fp4pass inspect: what is in a folder with packed weights, without building the model."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from torch import Tensor
from typer import Argument, Exit, Option

from ..checkpoint.checks import problems
from ..checkpoint.layouts import PackedLayer
from ..checkpoint.reader import CheckpointReader
from ..config import plain
from ..core.formats import Scale
from ..core.progress import track
from ..errors import OptionError
from ..linear import KINDS, PACKED, SCALE
from ..quantization.recipe import recorded
from ..reporting.numbers import size, tensor_bytes
from ..rows import Report, Row
from ..sources.files import tensor_facts
from . import screen
from .difference import compare
from .verify import opened, print_mismatches

_BAR = 40

_PIPE_WIDTH = 200


def inspect(
    folder: Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")],
    other: Annotated[
        Path | None, Argument(help="Another folder, packed or float.", metavar="OTHER")
    ] = None,
    fail_above: Annotated[
        float | None,
        Option(
            help="With OTHER: exit with 1 if a relative difference is larger, or a tensor is in "
            "one of them only."
        ),
    ] = None,
    as_json: screen.Json = False,
) -> None:
    """Show the layers, sizes, block scales and recipe of a checkpoint.

    The folder may be of any layout that fp4pass reads, whoever wrote it. What is wrong with scales,
    dense tensors or names is named, and the exit code is 1; checksums are for verify. What --json
    prints is a recipe, too: quantize --rules reads it. With OTHER, compare the weights of both,
    each packed or float: |A - B| / |A| of every layer, formats and sizes.
    """
    if other is not None:
        compare(folder, other, fail_above, as_json)
        return
    if fail_above is not None:
        raise OptionError("--fail-above: expected a second folder to compare with, got none.")
    stored = opened(folder, alone=True)
    codes = {stored.names(layer)[PACKED] for layer in stored.layers}
    tensors = stored.tensors([name for name in stored.files if name not in codes])
    wrong = dict(problems(stored, tensors, sums=False))
    found = {"folder": str(folder), **_stored(stored), "mismatches": wrong}
    if as_json:
        screen.print_json(found)
    else:
        _print(found)
    print_mismatches(folder, wrong)
    if wrong:
        raise Exit(screen.MISMATCH)


def _stored(stored: CheckpointReader) -> dict[str, Any]:
    """What a checkpoint says of itself, and what its tensors are."""
    rows = Report.from_dict(stored.own["report"]).rows if stored.own else ()
    by_name = {row.name: row for row in rows}
    kinds = {
        name: KINDS[part] for layer in stored.layers for part, name in stored.names(layer).items()
    }
    names = {stored.names(name)[SCALE]: layer for name, layer in stored.layers.items()}
    scales = ((names[name].fmt.scale, tensor) for name, tensor in stored.tensors(names))
    return {
        "layout": stored.layout.name,
        "architecture": next(iter(stored.config.get("architectures") or ()), None),
        "recipe": None if stored.recipe is None else recorded(stored.recipe),
        "calibration": (stored.recipe or {}).get("calibration"),
        "versions": stored.versions,
        "skipped": {row.name: row.skip_reason for row in rows if row.skip_reason},
        "sizes": _sizes(stored.files, kinds),
        "scales": _histograms(scales, len(stored.layers)),
        "layers": [_layer(n, each, by_name.get(n)) for n, each in _whole(stored, by_name)],
    }


def _whole(stored: CheckpointReader, rows: Mapping[str, Row]) -> Iterator[tuple[str, PackedLayer]]:
    """The packed layers, with the stacks of experts as one layer each in place of their pieces."""
    stack_of = {piece.name: name for name, pieces in stored.stacks.items() for piece in pieces}
    shown = set()
    for name, layer in stored.layers.items():
        stack = stack_of.get(name, "")
        if stack not in rows:
            yield name, layer
        elif stack not in shown:
            shown.add(stack)
            yield stack, dataclasses.replace(layer, shape=rows[stack].shape)


def _layer(name: str, layer: PackedLayer, row: Row | None) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(layer.shape),
        **plain(layer.config.options()),
        "method": layer.config.method_name,
        "scheme": layer.config.scheme,
        "label": layer.config.label,
        "bits": layer.fmt.bits_per_weight,
        "weight_error": row.weight_error if row else None,
        "output_error": row.output_error if row else None,
    }


def _sizes(files: Mapping[str, Path], kinds: Mapping[str, str]) -> dict[str, int]:
    """Bytes on disk by what the tensors are, the largest first; kinds: of those that are packed."""
    found: dict[str, int] = {}
    for name, (shape, dtype) in tensor_facts(files).items():
        kind = kinds.get(name) or _dense_kind(name, len(shape))
        found[kind] = found.get(kind, 0) + tensor_bytes(shape, dtype)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _dense_kind(name: str, dimensions: int) -> str:
    """What a tensor in float is, by its name and its shape."""
    if dimensions < 2:
        return "biases" if name.endswith("bias") else "norms and other vectors"
    words = name.split(".")
    if any("embed" in word or word in ("wte", "wpe") for word in words):
        return "embeddings"
    return "output embeddings" if "lm_head" in words else "other matrices"


def _histograms(scales: Iterable[tuple[Scale, Tensor]], count: int) -> dict[str, dict[str, Any]]:
    """How many block scales each binade has, by the kind of scale; of `count` tensors."""
    counts: dict[Scale, Tensor] = {}
    for scale, tensor in track(scales, "block scales", count, "tensors"):
        found = torch.bincount(tensor.view(torch.uint8).flatten().int(), minlength=256)
        counts[scale] = counts.get(scale, torch.zeros_like(found)) + found
    return {scale.name: _binades(scale, found.tolist()) for scale, found in counts.items()}


def _binades(scale: Scale, counts: list[int]) -> dict[str, Any]:
    """Counts of bytes as counts of binades: 2^e has the scales from 2^e to below 2^(e + 1)."""
    binades: dict[str, int] = {}
    used = [(scale.decode(byte), byte) for byte in range(scale.last + 1) if counts[byte]]
    for value, byte in used:
        key = f"2^{math.frexp(value)[1] - 1}" if value else "0"
        binades[key] = binades.get(key, 0) + counts[byte]
    return {
        "count": sum(counts),
        "distinct": len(used),
        "min": used[0][0] if used else None,
        "max": used[-1][0] if used else None,
        "invalid": sum(counts[scale.last + 1 :]),
        "binades": binades,
    }


def _print(found: Mapping[str, Any]) -> None:
    what = f"{found['folder']}: {found['layout']}, {len(found['layers'])} packed layers"
    print(f"{what}, {found['architecture']}" if found["architecture"] else what)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    if versions:
        print(f"written with {versions}")
    _print_recipe(found["recipe"], found["calibration"])
    print()
    _print_layers(found["layers"])
    screen.print_reasons(found["skipped"])
    total = sum(found["sizes"].values())
    print(f"\n{size(total)} of tensors:")
    shares = [(kind, size(n), f"{n / total:.1%}") for kind, n in found["sizes"].items()]
    screen.print_table(("", "size", "share"), shares)
    for name, scales in found["scales"].items():
        _print_histogram(name, scales)


def _print_recipe(recipe: Mapping[str, Any] | None, calibration: Mapping[str, Any] | None) -> None:
    if recipe is None:
        print("not quantized by fp4pass, so its recipe and errors are not known")
        return
    given = {key: value for key, value in recipe.items() if value is not None and value != []}
    print("recipe:")
    # As a file has it that quantize --rules reads: nested values on one line each.
    text = yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=_PIPE_WIDTH)
    print(textwrap.indent(text, "  "), end="")
    if calibration:
        batches = f" in {calibration['batches']} batches" if "batches" in calibration else ""
        digest = f", sha256 {calibration['sha256'][:16]}" if "sha256" in calibration else ""
        own = calibration.get("own_tokens", 0)
        calls = f", {own:,} of them by calls outside of fp4pass.calibrate" if own else ""
        hidden = calibration.get("hidden", 0)
        beside = f", beside {hidden:,} that attention_mask hides" if hidden else ""
        print(f"calibrated on {calibration['tokens']:,} tokens{batches}{beside}{digest}{calls}")


def _print_layers(rows: list[dict[str, Any]]) -> None:
    header = ("layer ", "N x K", "scheme ", "method ", "bits", "W err", "out err")
    lines = []
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        line = [row["name"], shape, row["label"], row["method"]]
        errors = (screen.percent(row["weight_error"]), screen.percent(row["output_error"]))
        lines.append((*line, f"{row['bits']:.2f}", *errors))
    screen.print_table(header, lines)


def _print_histogram(name: str, scales: Mapping[str, Any]) -> None:
    print(
        f"\n{scales['count']:,} block scales in {name}, {scales['distinct']} different, from "
        f"{scales['min']:g} to {scales['max']:g}"
        + (f"; {scales['invalid']} of them are no scale" if scales["invalid"] else "")
    )
    most = max(scales["binades"].values())
    for binade, count in scales["binades"].items():
        bar = "#" * math.ceil(_BAR * count / most)
        print(f"  {binade:>6} {bar:<{_BAR}} {count / scales['count']:7.2%}")
