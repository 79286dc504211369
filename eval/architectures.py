"""For every type of model of transformers: what is packed, what is skipped, who reads it.

    python -m eval.architectures --json eval/results/architectures.json

Each is made small, with random weights, by tests/checkpoint/test_architectures.py, whose outcomes
these are; then the command line quantizes the same model from a folder. The site has a page for
each row (eval/pages/architectures.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from eval.record import Results, facts
from fp4pass.checkpoint.readers import Readers
from fp4pass.cli.app import run

TESTS = Path(__file__).resolve().parents[1] / "tests"

# Outcomes of models that are not counted.
NOT_COUNTED = ("-", "no linear layer")


def main() -> None:
    """Convert, save and load all of them, but for those that the file has already."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    parser.add_argument("--only", nargs="*", default=[], help="types of models")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = Results(
        args.json, facts("cpu", "compressed_tensors"), again=args.again, key=("kind",)
    )
    known = {row["kind"] for row in results.rows}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name in outcomes().architectures():
            if kind not in known and (not args.only or kind in args.only):
                results.put(row(kind, name, Path(scratch)))


def outcomes() -> ModuleType:
    """Return the test module that makes the models and says what becomes of them."""
    sys.path[:0] = [str(TESTS / "lib"), str(TESTS / "checkpoint")]
    try:
        return importlib.import_module("test_architectures")
    finally:
        del sys.path[:2]


def row(kind: str, name: str, scratch: Path) -> dict[str, Any]:
    """Return what becomes of one type of model; without formats where it is not counted."""
    test, folder = outcomes(), scratch / "packed"
    formats: dict[str, Any] = {}
    found: dict[str, Any] = {"kind": kind, "class": name}
    for case, fmt, rules in (
        *((fmt, fmt, ()) for fmt in test.FORMATS),
        (test.RULED, "nvfp4", [test.RULE]),
    ):
        if case == test.RULED and formats.get("nvfp4", {}).get("outcome") != test.DROPPED:
            continue
        with said_by_save() as said:
            outcome = test.outcome(fmt, kind, name, folder, rules)
        if outcome in NOT_COUNTED:
            found["not counted"] = outcome
            continue
        layers = layers_of(json.loads((folder / "fp4pass.json").read_text("utf-8")))
        names, reasons = said[-1]
        formats[case] = {"outcome": outcome, "readers": names, "reasons": reasons}
        # Most formats skip the same layers.
        if "packed" not in found:
            found.update(layers)
        elif layers != {key: found[key] for key in layers}:
            formats[case].update(layers)
    if formats:
        found["formats"] = formats
        found["command"] = by_command(test.small_model(kind, name), scratch, found)
    return found


@contextmanager
def said_by_save() -> Iterator[list[Readers]]:
    """Collect what `save` says of who reads a folder."""
    said: list[Readers] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments = record.args if isinstance(record.args, tuple) else ()
            said.extend(each for each in arguments if isinstance(each, Readers))

    logger, handler = logging.getLogger("fp4pass"), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def layers_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of packed and of skipped layers, those of all blocks as one pattern.

    Returns:
        packed: the layers of each pattern.
        skipped: pattern, layers and the reason.
    """
    packed: dict[str, int] = {}
    skipped: dict[tuple[str, str], int] = {}
    for each in record["report"]["rows"]:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", each["name"])
        if each["skip_reason"]:
            skipped[name, each["skip_reason"]] = skipped.get((name, each["skip_reason"]), 0) + 1
        else:
            packed[name] = packed.get(name, 0) + 1
    return {"packed": packed, "skipped": [[name, n, why] for (name, why), n in skipped.items()]}


def by_command(model: Any, scratch: Path, found: Mapping[str, Any]) -> str:
    """Return "" if the command line packs the same layers, else what it says instead."""
    source, out = scratch / "float", scratch / "out"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    words = [str(source), "-o", str(out), "--scheme", "nvfp4a16", "--quality", "fast"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save_pretrained(source)
        except Exception as error:
            return f"transformers does not save it: {type(error).__name__}: {str(error)[:100]}"
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = run(["quantize", *words])
    if code:
        lines = said.getvalue().strip().splitlines()
        return lines[-1].replace(str(source), "MODEL").replace(str(out), "out")
    layers = layers_of(json.loads((out / "fp4pass.json").read_text("utf-8")))
    if layers["packed"] != found["packed"]:
        other = sorted({*layers["packed"]} ^ {*found["packed"]})
        return f"other layers: {', '.join(other[:4])}"
    return ""


if __name__ == "__main__":
    main()
