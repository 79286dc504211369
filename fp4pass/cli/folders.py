"""Commands about folders: inspect, verify, transcode, serve, eval and report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ..calibration.rows import read_text
from ..checkpoint import MANIFEST, is_packed, load, open_checkpoint
from ..checkpoint import transcode as write
from ..checkpoint.float_models import load_float, load_tokenizer, text_tokenizer
from ..doctor import check_folder
from ..errors import OptionError
from ..evaluation import evaluate as measure
from ..reporting.data import compare, gather
from ..reporting.page import require_free, write_page
from ..reporting.text import calibrated_on, measures, scored, size, verdict, written
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


def evaluate(
    folder: str,
    data: list[str] | None = None,
    reference: str | None = None,
    samples: int | None = None,
    seq_len: int = 512,
    stride: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token. With --stride they
    overlap, and each is scored on its new tokens. Intervals come from a bootstrap over documents.
    """
    if not data:
        raise OptionError("Expected a text to measure on, got none. Give --data FILE.")
    chosen, trust = given.choose_device(device), trust_remote_code
    options = {"window": seq_len, "windows": samples, "batch_size": batch_size, "stride": stride}
    rows, _ = _measured(folder, reference, data, chosen, trust, options)
    if json:
        screen.print_json({"model": folder, "reference": reference, "texts": rows})
        return
    for number, row in enumerate(rows):
        name = row["text"].rpartition("/")[2] or row["text"]
        print("\n" * (number > 0) + f"{name}: {scored(row)}\n")
        lines = [
            [each.label, *(written(value, each.style) for value in each.values)]
            for each in measures(row)
        ]
        screen.print_table(["measure ", "value", "low", "high"], lines)
        if said := verdict(row):
            print(f"\n{said}")


def _measured(
    folder: str,
    reference: str | None,
    data: list[str],
    device: str,
    trust: bool,
    options: dict[str, Any],
) -> tuple[list[dict[str, Any]], Any]:
    """Return the measures of a model on each text, beside those of the original, and that."""
    tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
    # Of a dataset as much as so many windows need.
    tokens = None if options["windows"] is None else options["windows"] * options["window"]
    texts = {name: read_text(name, tokens, tokenizer) for name in data}
    model = given.load_any(folder, device, trust)
    original = None if reference is None else given.load_any(reference, device, trust)
    given.note_dtype("measures", model, original)
    rows = []
    for name, text in texts.items():
        before = None if original is None else measure(original, tokenizer, text, **options)
        rows.append(measure(model, tokenizer, text, original, **options).row(name, before))
    return rows, original


def report(
    folder: str,
    output: Path,
    reference: str | None = None,
    data: list[str] | None = None,
    samples: int | None = None,
    seq_len: int = 512,
    batch_size: int = 8,
    device: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write one page about a quantized model: sizes, errors, scales, perplexity, recipe.

    The page needs no network. Its numbers are written beside it as JSON.
    """
    given.require_at_least(1, batch_size=batch_size)
    require_free(output, overwrite)
    # A damaged folder is refused before a text is read.
    open_checkpoint(Path(folder))
    chosen, trust = given.choose_device(device), trust_remote_code
    original: Any = reference
    rows: list[dict[str, Any]] = []
    if reference is not None and is_packed(reference):
        # It says that a float model is expected.
        load_float(reference, "auto", chosen, trust)
    if data:
        options = {"window": seq_len, "windows": samples, "batch_size": batch_size}
        rows, original = _measured(folder, reference, data, chosen, trust, options)
    elif reference is not None and not Path(reference).is_dir():
        original = load_float(reference, "auto", chosen, trust)
    page = gather(
        folder, name=folder, reference=original, reference_name=reference or "", evaluations=rows
    )
    numbers = write_page(page, output)
    if json:
        screen.print_json(page)
        return
    summary = page["summary"]
    print(
        f"{output}: {summary['layers']} layers at {summary['bits_per_weight']:.2f} bits, "
        f"{size(summary['bytes'])}, {summary['share']:.0%} of "
        f"{size(summary['bytes_before'])} before\nbeside it: {numbers.name}"
    )
