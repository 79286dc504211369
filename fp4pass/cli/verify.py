"""fp4pass verify: a checkpoint, read back from disk, alone or against the model it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Exit, Option

from ..calibration.rows import read_text
from ..calibration.windows import token_windows
from ..checkpoint import float_models
from ..checkpoint.loading import load
from ..checkpoint.reader import CheckpointReader, is_packed, open_checkpoint
from ..checkpoint.source_files import MANIFEST
from ..doctor import FolderCheck, check_folder
from ..doctor.check import check_basics
from ..errors import CheckpointError, OptionError, UnreadError
from ..reporting.compare import (
    RANDOM,
    Comparison,
    Outputs,
    compare_models,
    compare_outputs,
    random_tokens,
)
from ..reporting.text import size
from . import screen, sources
from .options import Device, TrustCode


def verify(
    folder: Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")],
    reference: Annotated[
        str | None, Option(help="The float model: a folder or a hub id.", metavar="MODEL")
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Text for the outputs, as for quantize; by default random tokens.",
            metavar="FILE|DATASET",
        ),
    ] = None,
    samples: Annotated[int, Option(help="Windows of the text.")] = 4,
    seq_len: Annotated[int, Option(help="Tokens per window.")] = 128,
    fail_above: Annotated[float, Option(help="Largest relative weight error of a layer.")] = 0.3,
    device: Device = None,
    trust_remote_code: TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Check a checkpoint, with --reference against its float model; exit with 1 on a mismatch.

    Without --reference: check files, index, shapes, checksums and numbers of all tensors, the order
    of codes, and the configs. Each finding is printed with its meaning and its remedy. With
    --reference: quantize layers again whose method needs no calibration and compare every bit;
    compare other layers by their weight error, other tensors bit for bit, and outputs with those of
    a float model that has the dequantized weights.
    """
    sources.require_windows(seq_len=seq_len, samples=samples)
    if reference is None and data is not None:
        raise OptionError(
            "--data: expected --reference MODEL too, to compare outputs with, got none."
        )
    if reference is None:
        _verify_alone(folder, as_json)
        return
    stored, chosen = opened(folder, alone=False), sources.choose_device(device)
    wrong, found, outputs = check_basics(folder, whole=True), None, None
    # A damaged folder cannot be loaded.
    if not wrong:
        sources.quiet()
        model: Any = load(stored.folder, device_map=chosen)
        floats = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = getattr(torch, stored.own["dtype"]) if stored.own else next(floats, "auto")
        original = float_models.load_float(reference, dtype, chosen, trust_remote_code)
        found = compare_models(stored, model, original, fail_above)
        wrong = found.mismatches
        # Outputs of wrong weights say nothing.
        if not wrong:
            if data is None:
                ids = random_tokens(original, samples, seq_len)
            else:
                processor = float_models.load_tokenizer(reference, trust_remote_code)
                tokenizer = float_models.text_tokenizer(processor, reference)
                read = read_text(data, samples * seq_len, tokenizer)
                ids = token_windows(tokenizer, read, window=seq_len, windows=samples)
                if len(ids) < samples:
                    screen.note(f"{data} has {len(ids)} windows; --samples is {samples}.")
            if ids is not None:
                sources.note_dtype("compares outputs", model, original)
                outputs = compare_outputs(model, ids, data or RANDOM)
                wrong |= outputs.mismatches()
    if as_json:
        found = found or Comparison()
        facts = {
            "folder": str(folder),
            "layout": stored.layout.name,
            "requantized": found.requantized,
            "weight_errors": found.measured,
            "tensors": found.tensors,
            "outputs": None if outputs is None else outputs.to_dict(),
            "mismatches": wrong,
        }
        screen.print_json(facts)
    else:
        _print(folder, found or Comparison(), outputs, not wrong)
    screen.print_mismatches(folder, wrong)


# Only checksums or the float model show these.
_UNSEEN = (
    "Without checksums of fp4pass, layers, rows or scales that are exchanged for others of their "
    "size are not seen, nor are numbers that changed a little."
)

# Findings of one kind that are printed; --json has all.
_MOST_OF_A_KIND = 20


def _verify_alone(folder: Path, as_json: bool) -> None:
    """Check a folder without its model."""
    found = check_folder(folder)
    if not found.sums and (folder / MANIFEST).is_file():
        screen.note(f"{folder / MANIFEST} is of another version: its checksums are not read")
    if as_json:
        screen.print_json(found.to_dict())
    else:
        sums = "with checksums" if found.sums else "without checksums"
        print(
            f"checked {found.layers} packed layers in {found.layout}, {found.tensors} tensors "
            f"({size(found.bytes)}), {sums}"
        )
        for each in found.not_judged:
            print(f"not checked: {each}")
        if not found.findings:
            print(f"{folder}: no faults found; --reference MODEL compares it with its float model")
            if not found.sums:
                print(_UNSEEN)
    _print_findings(found)
    if found.findings:
        screen.note(f"fp4pass: {folder}: {len(found.findings)} mismatches")
        raise Exit(screen.MISMATCH)


def _print_findings(found: FolderCheck) -> None:
    """Print each finding on stderr, and the meaning and remedy once for each kind."""
    kinds: dict[str, list[Any]] = {}
    for each in found.findings:
        kinds.setdefault(each.kind, []).append(each)
    for name, findings in kinds.items():
        for each in findings[:_MOST_OF_A_KIND]:
            screen.note(f"mismatch: {each}")
        if more := len(findings) - _MOST_OF_A_KIND:
            if more > 0:
                screen.note(f"mismatch: {more} more of {name}; --json lists all")
        screen.note(f"{name}: {findings[0].meaning} {findings[0].remedy}.")


def _print(folder: Path, found: Comparison, outputs: Outputs | None, right: bool) -> None:
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
    elif right:
        print("outputs not compared: the model is not a causal language model")
    if right:
        print(f"{folder} matches its reference")


def opened(folder: Path, alone: bool) -> CheckpointReader:
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
    if stored.own is None and (folder / MANIFEST).is_file():
        screen.note(f"{folder / MANIFEST} is of another version: its checksums are not read")
    return stored
