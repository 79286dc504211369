"""Commands about packed folders: inspect, verify, transcode and serve."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from typer import Argument, Exit, Option

from ..checkpoint import MANIFEST, CheckpointReader, is_packed, load, open_checkpoint
from ..checkpoint import transcode as write
from ..checkpoint.float_models import load_float
from ..checkpoint.saving import transcode_targets
from ..doctor import FolderCheck, check_folder
from ..doctor.check import check_basics
from ..errors import CheckpointError, OptionError, UnreadError, VersionError, some
from ..reporting.compare import (
    Comparison,
    Outputs,
    compare_folders,
    compare_models,
    compare_outputs,
    weights_size,
)
from ..reporting.data import gather
from ..reporting.text import calibrated_on, size
from . import options as given
from . import screen

Packed = Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")]

# Characters of the largest bar of a histogram, and of a line of YAML.
_BAR, _YAML_WIDTH = 40, 200

# Findings of one kind that are printed; --json has all.
_MOST_OF_A_KIND = 20


def inspect(
    folder: Packed,
    other: Annotated[
        Path | None, Argument(help="Another folder, packed or float.", metavar="OTHER")
    ] = None,
    fail_above: Annotated[
        float | None,
        Option(
            help="With OTHER: exit with 1 if a relative difference is larger, or if only one of "
            "them has a tensor."
        ),
    ] = None,
    as_json: screen.Json = False,
) -> None:
    """Show the layers, sizes, block scales and recipe of a checkpoint.

    Reads every layout that fp4pass reads, of any library. Checks scales, dense tensors and names,
    and exits with 1 if one is wrong; verify also checks checksums. quantize --rules reads the JSON
    as a recipe. With OTHER, compare the weights of both folders, packed or float: |A - B| / |A| of
    every layer, formats and sizes.
    """
    if other is not None:
        _compare(folder, other, fail_above, as_json)
        return
    if fail_above is not None:
        raise OptionError("--fail-above: expected a second folder to compare with, got none.")
    stored = _opened(folder, alone=True)
    wrong, data = check_basics(folder, whole=False), gather(stored)
    reasons = {each["name"]: each["skip_reason"] for each in data["layers"]}
    shown = "layout architecture recipe calibration versions sizes scales".split()
    found: dict[str, Any] = {
        "folder": str(folder),
        **{key: data[key] for key in shown},
        "layers": [each for each in data["layers"] if not each["skip_reason"]],
        "skipped": {name: why for name, why in reasons.items() if why},
        "mismatches": wrong,
    }
    if as_json:
        screen.print_json(found)
    else:
        _print_contents(found)
    _print_mismatches(folder, wrong)


def _print_contents(found: Mapping[str, Any]) -> None:
    what = f"{found['folder']}: {found['layout']}, {len(found['layers'])} packed layers"
    print(f"{what}, {found['architecture']}" if found["architecture"] else what)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    if versions:
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


def _compare(a: Path, b: Path, fail_above: float | None, as_json: bool) -> None:
    """Print how far the weights of two folders are apart."""

    def shown(difference: float) -> str:
        return screen.percent(difference) if difference else "equal"

    found = compare_folders(a, b)
    failed: list[str] = []
    if fail_above is not None:
        layers, beside = (
            [each["name"] for each in found[key] if not each["difference"] <= fail_above]
            for key in ("layers", "other")
        )
        failed = [*layers, *found["only_in_first"], *found["only_in_second"], *beside]
        found["failed"] = failed
    if as_json:
        screen.print_json(found)
    else:
        rows = [(row["name"], *row["formats"], shown(row["difference"])) for row in found["layers"]]
        if rows:
            screen.print_table(("layer ", "A ", "B ", "difference"), rows)
        others = len(found["other"])
        print(f"\nother tensors: {found['other_tensors'] - others} equal, {others} different")
        for each in found["other"]:
            print(f"  {each['name']}: {shown(each['difference'])}")
        for key, letter in (("only_in_first", "A"), ("only_in_second", "B")):
            if found[key]:
                print(f"only in {letter}: {some(found[key])}")
        for letter, folder, count in zip("AB", found["folders"], found["bytes"], strict=True):
            print(f"{letter} = {folder}: {size(count)} of weights")
    if failed:
        screen.note(f"fp4pass: above {fail_above} or in one folder only: {some(failed, 20)}")
        raise Exit(screen.MISMATCH)


def verify(
    folder: Packed,
    reference: Annotated[
        str | None, Option(help="The float model: a folder or a hub id.", metavar="MODEL")
    ] = None,
    fail_above: Annotated[float, Option(help="Largest relative weight error of a layer.")] = 0.3,
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Check a checkpoint, with --reference against its float model; exit with 1 on a mismatch.

    Without --reference: check files, index, shapes, checksums and numbers of all tensors, the order
    of codes, and the configs. Each finding is printed with its meaning and its remedy. With
    --reference: quantize layers again whose method needs no calibration and compare every bit;
    compare other layers by their weight error, other tensors bit for bit, and outputs with those of
    a float model that has the dequantized weights.
    """
    if reference is None:
        _verify_alone(folder, as_json)
        return
    stored, chosen = _opened(folder, alone=False), given.choose_device(device)
    wrong, found, outputs = check_basics(folder, whole=True), Comparison(), None
    # A damaged folder cannot be loaded.
    if not wrong:
        given.quiet()
        model: Any = load(stored.folder, device_map=chosen)
        floats = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = getattr(torch, stored.own["dtype"]) if stored.own else next(floats, "auto")
        original = load_float(reference, dtype, chosen, trust_remote_code)
        found = compare_models(stored, model, original, fail_above)
        wrong = found.mismatches
    # Outputs of wrong weights say nothing.
    if not wrong:
        outputs = compare_outputs(model)
        if outputs is not None:
            given.note_dtype("compares outputs", model)
            wrong |= outputs.mismatches()
    if as_json:
        facts = {
            "folder": str(folder),
            "layout": stored.layout.name,
            "requantized": found.requantized,
            "weight_errors": found.measured,
            "tensors": found.tensors,
            "outputs": None if outputs is None else vars(outputs),
            "mismatches": wrong,
        }
        screen.print_json(facts)
    else:
        _print_comparison(folder, found, outputs, not wrong)
    _print_mismatches(folder, wrong)


def _print_comparison(folder: Path, found: Comparison, outputs: Outputs | None, ok: bool) -> None:
    if found.requantized:
        print(f"{len(found.requantized)} layers quantized again, every bit compared")
    if found.measured:
        largest = max(found.measured, key=lambda name: found.measured[name])
        print(
            f"{len(found.measured)} layers compared by their weight error, at most "
            f"{screen.percent(found.measured[largest])} ({largest})"
        )
    print(f"{found.tensors} other tensors compared bit for bit")
    if outputs is not None:
        print(outputs)
    elif ok:
        print("outputs not compared: the model is not a causal language model")
    if ok:
        print(f"{folder} matches its reference")


def _print_mismatches(folder: Path, mismatches: Mapping[str, str]) -> None:
    """Print a line on stderr for each layer or tensor that is wrong; exit with 1 if one is."""
    for name, what in mismatches.items():
        screen.note(f"mismatch: {name}: {what}")
    _exit_by(folder, len(mismatches))


def _exit_by(folder: Path, count: int) -> None:
    if count:
        screen.note(f"fp4pass: {folder}: {count} mismatches")
        raise Exit(screen.MISMATCH)


def _verify_alone(folder: Path, as_json: bool) -> None:
    """Check a folder without its model; print each finding, and the meaning of each kind once."""
    found: FolderCheck = check_folder(folder)
    if not found.sums:
        _note_version(folder)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        sums = "with checksums" if found.sums else "without checksums"
        print(
            f"checked {found.layers} packed layers in {found.layout}, {found.tensors} tensors "
            f"({size(found.bytes)}), {sums}"
        )
        for what in found.not_judged:
            print(f"not checked: {what}")
        if not found.findings:
            print(f"{folder}: no faults found; --reference MODEL compares it with its float model")
            if not found.sums:
                # Only checksums or the float model show these.
                print(
                    "Without checksums of fp4pass, layers, rows or scales that are exchanged for "
                    "others of their size are not seen, nor are numbers that changed a little."
                )
    kinds: dict[str, list[Any]] = {}
    for each in found.findings:
        kinds.setdefault(each.kind, []).append(each)
    for name, findings in kinds.items():
        for each in findings[:_MOST_OF_A_KIND]:
            screen.note(f"mismatch: {each}")
        if (more := len(findings) - _MOST_OF_A_KIND) > 0:
            screen.note(f"mismatch: {more} more of {name}; --json lists all")
        screen.note(f"{name}: {findings[0].meaning} {findings[0].remedy}.")
    _exit_by(folder, len(found.findings))


def _opened(folder: Path, alone: bool) -> CheckpointReader:
    """Open a folder; that it is damaged is a check that failed.

    `alone` is without its model: then it may be of stacked experts, or of another fp4pass.
    """
    try:
        stored = open_checkpoint(folder, any_version=alone)
    except UnreadError:
        raise
    except CheckpointError as error:
        if not is_packed(folder, known=True):
            raise
        screen.note(f"mismatch: {error}")
        raise Exit(screen.MISMATCH) from error
    if stored.own is None:
        _note_version(folder)
    return stored


def _note_version(folder: Path) -> None:
    if (folder / MANIFEST).is_file():
        screen.note(f"{folder / MANIFEST} is of another version: its checksums are not read")


def transcode(
    folder: Packed,
    output: given.Output,
    to: Annotated[str, Option(help=f"The layout: {', '.join(transcode_targets())}.")],
    copy_files: given.CopyFiles = None,
    max_shard_size: given.ShardSize = "5GB",
    overwrite: given.Overwrite = False,
    as_json: screen.Json = False,
) -> None:
    """Write a checkpoint in another layout; codes and block scales keep their bits.

    bf16 writes dense weights, which any program reads.
    """
    options: dict[str, Any] = {"copy_files": copy_files or (), "overwrite": overwrite}
    write(folder, output, to, max_shard_size=max_shard_size, **options)
    before, after = weights_size(folder), weights_size(output)
    if as_json:
        facts = {"output": str(output), "layout": to, "bytes_before": before, "bytes_after": after}
        screen.print_json(facts)
        return
    print(f"{output}: {to}, {size(after)} of weights; {folder} has {size(before)}")


def serve(
    folder: Annotated[str, Argument(help="A folder with packed weights.", metavar="DIR")],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 is any free one.")] = 8000,
    device: Annotated[
        str, Option(help="cpu, cuda, cuda:1, ..., or auto for the GPU, if any.")
    ] = "auto",
    log_level: Annotated[
        str, Option(help="debug, info, warning, error or critical; info logs requests.")
    ] = "error",
) -> None:
    """Serve a folder with an OpenAI-compatible API and packed weights, one request at a time.

    Serves chat completions and completions, streamed or not, and the list of models, until it is
    interrupted. For many requests at once, serve the folder with vLLM.
    """
    try:
        # Importing transformers takes a second.
        from ..integrations.serving import serve as run
    except ModuleNotFoundError as error:
        raise VersionError(
            f"The server needs {error.name}, which is missing: pip install 'fp4pass[serving]'."
        ) from error

    def announce(name: str, address: str) -> None:
        # A program that started it reads this line.
        print(f"{name} is served at {address}/v1", flush=True)

    run(folder, host=host, port=port, device=device, log_level=log_level, ready=announce)
