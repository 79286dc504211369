"""Results of measurements: machine and command, in files that outlive a kill.

A file holds facts and rows. Each row is on the disk as soon as it is put.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("fp4pass", "torch", "triton", "transformers")

Row = dict[str, Any]


def facts(device: str | None = None, *libraries: str, model: Path | None = None) -> Row:
    """Return the command, the machine and the versions of a measurement.

    Args:
        device: "cuda" or "cpu"; None for a GPU where there is one.
        *libraries: packages beside those that every measurement needs; missing ones are left out.
        model: a folder that the command names, which becomes its last part.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    there = [name for name in (*PACKAGES, *libraries) if importlib.util.find_spec(name)]
    versions = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in there}
    if device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    threads = f"{torch.get_num_threads()} thread(s) of {device_name(device)}"
    machine = device_name(device) if device == "cuda" else threads
    return {"command": command(model), "machine": machine, "versions": versions}


def _version(package: str) -> str:
    """Return the version of a package, of fp4pass also where it is not installed."""
    if package == "fp4pass":
        return str(importlib.import_module(package).__version__)
    return importlib.metadata.version(package)


def command(model: Path | None) -> str:
    """Return the command of this run, without what only this machine knows."""
    words = [_without_folder(word) for word in sys.argv[1:]]
    words = [model.name if model and word == str(model) else word for word in words]
    return shlex.join(["python", *module(Path(sys.argv[0])), *words])


def _without_folder(word: str) -> str:
    """Return a word of a command, with the name of a file in place of its whole path."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if os.path.isabs(path) else word


def module(script: Path) -> list[str]:
    """Return the words that run a script: those of a module of eval/, or its path."""
    parts = script.resolve().with_suffix("").parts
    if "eval" not in parts:
        return [script.name]
    return ["-m", ".".join(parts[len(parts) - 1 - parts[::-1].index("eval") :])]


def device_name(device: str) -> str:
    """Return the name of a GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


class Results:
    """Facts and rows of one file.

    Args:
        path: of the JSON, None to keep nothing. Rows that are there already stay if their facts,
            but for the command, are the same.
        about: the facts.
        again: forget the rows that are there.
        key: the entries that tell rows apart; () if rows are never replaced.

    Raises:
        SystemExit: the file has rows of other facts.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, Any],
        *,
        again: bool = False,
        key: Sequence[str] = (),
    ):
        self.path, self.key = path, key
        self.about = rounded(about)
        self.rows: list[Row] = []
        if path is None or again or not path.exists():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = before.pop("rows")
        # The command may be spelled in many ways.
        wanted = {**self.about, "command": before.get("command")}
        other = [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]
        if other:
            raise SystemExit(
                f"{path}: its rows were measured with another {', '.join(other)}. Measure all of "
                "them with --again, or give another file."
            )
        self.rows = rows

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, in place of one of the same key, and print it."""
        same = [bool(self.key) and all(o[k] == row[k] for k in self.key) for o in self.rows]
        kept = [old for old, replaced in zip(self.rows, same, strict=True) if not replaced]
        self.rows = [*kept, rounded(row)]
        self.write()

    def write(self) -> None:
        """Write the file whole, in place of the one that is there."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(self.text(), encoding="utf-8")
        os.replace(unfinished, self.path)

    def text(self) -> str:
        """Return the JSON, with a row on each line."""
        about = json.dumps(self.about, indent=1).removesuffix("\n}")
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        return f'{about},\n "rows": [\n  {rows}\n ]\n}}\n'


def rounded(value: Any) -> Any:
    """Return a value with floats of six significant digits: more is noise."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
