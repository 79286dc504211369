"""Commands about packed folders: inspect, verify, transcode and serve."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ..checkpoint import MANIFEST, load, open_checkpoint
from ..checkpoint import transcode as write
from ..checkpoint.float_models import load_float
from ..doctor import check_folder
from ..reporting.data import compare, gather
from ..reporting.text import calibrated_on, size
from . import options as given
from . import screen

# Characters of the largest bar of a histogram, and of a line of YAML.
_BAR, _YAML_WIDTH = 40, 200

# Findings of one kind that are printed; --json has all.
_MOST_OF_A_KIND = 20

# Kinds of findings that are left out with a reference: its weights and layers decide.
_GUESSES = (
    *("scale-size", "scale-uncalibrated", "weights-size", "codes-zero", "dead"),
    *("codes-order", "rows-order", "scale-order", "input-uncalibrated", "ignore-misses"),
    *("config-disagrees", "config-model", "tied-head", "mtp-absent", "tokenizer-missing"),
    "chat-template-missing",
)


def inspect(folder: Path, json: bool = False) -> None:
    """Show the layers, sizes, block scales and recipe of a checkpoint.

    Reads every layout that fp4pass reads, of any library. quantize --rules reads the JSON as a
    recipe.
    """
    data = gather(folder, name=str(folder))
    shown = "layout architecture recipe calibration versions sizes scales".split()
    found: dict[str, Any] = {
        "folder": str(folder),
        **{key: data[key] for key in shown},
        "layers": [each for each in data["layers"] if not each["skip_reason"]],
        "skipped": {x["name"]: x["skip_reason"] for x in data["layers"] if x["skip_reason"]},
    }
    if json:
        screen.print_json(found)
        return
    what = f"{folder}: {found['layout']}, {len(found['layers'])} packed layers"
    print(f"{what}, {found['architecture']}" if found["architecture"] else what)
    if versions := ", ".join(f"{name} {version}" for name, version in found["versions"].items()):
        print(f"written with {versions}")
    if (recipe := found["recipe"]) is None:
        print("not quantized by fp4pass: recipe and errors are unknown")
    else:
        said = {key: value for key, value in recipe.items() if value is not None and value != []}
        # As a file has it that quantize --rules reads: nested values on one line each.
        style: Any = {"default_flow_style": None, "width": _YAML_WIDTH}
        text = yaml.safe_dump(said, sort_keys=False, **style)
        print(f"recipe:\n{textwrap.indent(text, '  ')}", end="")
        if calibration := found["calibration"]:
            digest = f", sha256 {calibration['sha256'][:16]}" if "sha256" in calibration else ""
            print(f"calibrated on {calibrated_on(calibration)}{digest}")
    print()
    rows = [
        (
            *(row["name"], " x ".join(map(str, row["shape"])), row["label"], row["method"]),
            f"{row['bits']:.2f}",
            *(screen.percent(row[error]) for error in ("weight_error", "output_error")),
        )
        for row in found["layers"]
    ]
    header = ("layer ", "N x K", "scheme ", "method ", "bits", "W err", "out err")
    screen.print_table(header, rows)
    screen.print_reasons(found["skipped"])
    print(f"\n{size(sum(part['bytes'] for part in found['sizes']))} of tensors:")
    parts = [(p["kind"], size(p["bytes"]), f"{p['share']:.1%}") for p in found["sizes"]]
    screen.print_table(("", "size", "share"), parts)
    for scales in found["scales"]:
        # The number of blocks with a scale in each binade, from 2^e to below 2^(e+1).
        binades = {"0": scales["zero"]} if scales["zero"] else {}
        for each in scales["counts"]:
            binade = f"2^{math.frexp(each['value'])[1] - 1}"
            binades[binade] = binades.get(binade, 0) + each["blocks"]
        print(
            f"\n{scales['blocks']:,} block scales of {scales['format']} in {scales['scale']}, "
            f"{scales['distinct']} different, from {scales['min'] or 0:g} to {scales['max'] or 0:g}"
            + (f"; {scales['invalid']} of them invalid" if scales["invalid"] else "")
        )
        for binade, count in binades.items():
            bar = "#" * math.ceil(_BAR * count / max(binades.values()))
            print(f"  {binade:>6} {bar:<{_BAR}} {count / scales['blocks']:7.2%}")


def verify(
    folder: Path,
    reference: str | None = None,
    fail_above: float = 0.3,
    device: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> int:
    """Check a checkpoint, with --reference against its float model; exit with 1 on a mismatch.

    Checks files, index, shapes, checksums and numbers of all tensors, the order of codes, and the
    configs. Each finding is printed with its meaning and its remedy. With --reference, compare the
    weight error of each layer with the reported one, and other tensors bit for bit.
    """
    found = check_folder(folder)
    findings = [x for x in found.findings if reference is None or x.kind not in _GUESSES]
    data = found.to_dict() | {"mismatches": {each.where: each.found for each in findings}}
    if not found.sums and (folder / MANIFEST).is_file():
        screen.note(f"{folder / MANIFEST} is of another version: its checksums are not read")
    lines = [
        f"checked {found.layers} packed layers in {found.layout}, {found.tensors} tensors "
        f"({size(found.bytes)}), {'with' if found.sums else 'without'} checksums",
        *(f"not checked: {what}" for what in found.not_judged),
    ]
    # A damaged folder cannot be loaded.
    if reference is not None and not findings:
        given.quiet()
        stored, chosen = open_checkpoint(folder), given.choose_device(device)
        model: Any = load(folder, device_map=chosen)
        dtype = getattr(torch, stored.dtype)
        original = load_float(reference, dtype, chosen, trust_remote_code)
        errors, tensors, data["mismatches"] = compare(stored, model, original, fail_above)
        data |= {"weight_errors": errors, "other_tensors": tensors}
        largest = max(errors, key=lambda name: errors[name], default="none")
        lines += [
            f"{len(errors)} layers compared by their weight error, at most "
            f"{screen.percent(errors.get(largest))} ({largest})",
            f"{tensors} other tensors compared bit for bit",
        ]
        for name, what in data["mismatches"].items():
            screen.note(f"mismatch: {name}: {what}")
        if not data["mismatches"]:
            lines.append(f"{folder} matches its reference")
    elif not findings:
        lines.append(f"{folder}: no faults found; --reference MODEL compares it with its model")
        if not found.sums:
            # Only checksums or the float model show these.
            lines.append(
                "Without checksums of fp4pass, layers, rows or scales that are exchanged for "
                "others of their size are not seen, nor are numbers that changed a little."
            )
    if json:
        screen.print_json(data)
    else:
        print("\n".join(lines))
    kinds: dict[str, list[Any]] = {}
    for each in findings:
        kinds.setdefault(each.kind, []).append(each)
    for name, alike in kinds.items():
        for each in alike[:_MOST_OF_A_KIND]:
            screen.note(f"mismatch: {each}")
        if (more := len(alike) - _MOST_OF_A_KIND) > 0:
            screen.note(f"mismatch: {more} more of {name}; --json lists all")
        screen.note(f"{name}: {alike[0].meaning} {alike[0].remedy}.")
    mismatches: Mapping[str, str] = data["mismatches"]
    if count := len(findings) or len(mismatches):
        screen.note(f"fp4pass: {folder}: {count} mismatches")
    return screen.MISMATCH if count else screen.OK


def transcode(
    folder: Path,
    output: Path,
    to: str,
    copy_files: list[str] | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write a checkpoint in another layout; codes and block scales keep their bits.

    bf16 writes dense weights, which any program reads.
    """
    options: dict[str, Any] = {"copy_files": copy_files or (), "overwrite": overwrite}
    write(folder, output, to, max_shard_size=max_shard_size, **options)
    before, after = weights_size(folder), weights_size(output)
    if json:
        facts = {"output": str(output), "layout": to, "bytes_before": before, "bytes_after": after}
        screen.print_json(facts)
    else:
        print(f"{output}: {to}, {size(after)} of weights; {folder} has {size(before)}")


def weights_size(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def serve(
    folder: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    log_level: str = "error",
) -> None:
    """Serve a folder with packed weights by an OpenAI-compatible API, until it is interrupted.

    For many requests at once, serve the folder with vLLM.
    """
    # Importing transformers takes a second.
    from ..integrations.serving import serve as run

    def announce(name: str, address: str) -> None:
        # A program that started it reads this line.
        print(f"{name} is served at {address}/v1", flush=True)

    run(folder, host=host, port=port, device=device, log_level=log_level, ready=announce)
