"""fp4pass.json: the recipe, the report and the checksums, for which no layout has a place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import CheckpointError, Fp4PassError, expected

MANIFEST = "fp4pass.json"

# Of what the file holds.
VERSION = 3


# What config.json says of its making, and not of the model.
_FREE = {"transformers_version", "_name_or_path"}

# What Python raises for data that are not what they should be.
_FAULTS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


def write_manifest(folder: Path, data: Mapping[str, Any]) -> None:
    """Write fp4pass.json, with its version and a checksum of what it says."""
    versions = {"version": VERSION, "fp4pass": __version__, "torch": torch.__version__}
    whole = {**versions, **data}
    write_json(folder / MANIFEST, whole | {"sha256": checksum_of(whole)})


def read_manifest(folder: Path, any_version: bool = False) -> dict[str, Any] | None:
    """Return what fp4pass.json says, None without one. Raises CheckpointError.

    That of another version is an error, or with `any_version` as none.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_json(path)
    checksum, version = data.pop("sha256", None), data.get("version")
    if version != VERSION and any_version:
        return None
    if version != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION}, which this fp4pass ({__version__}) reads, got "
            f"{version!r}. Update fp4pass, or write the checkpoint again."
        )
    with well_formed(path):
        found = checksum_of(data)
    if checksum != found:
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of what it says. Copy it again."
        )
    return data


def require_config(folder: Path, config: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if config.json is not what was saved, as far as the folder says."""
    saved = (own or {}).get("config") or config
    for key in sorted({*saved, *config} - _FREE):
        was, found = (json.dumps(each.get(key), sort_keys=True) for each in (saved, config))
        if was != found:
            where = f"{folder / 'config.json'}: {key}"
            what = expected(where, f"{was:.200}", f"{found:.200}")
            raise CheckpointError(
                f"{what} It is not what was saved. Copy the file again; or, if the change is "
                "meant, load into a float model that has it: fp4pass.load(dir, model=model)."
            )


def checksum_of(data: Mapping[str, Any]) -> str:
    """Return a checksum of values, which formatting the file does not change."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises CheckpointError for anything else."""
    with well_formed(path):
        data: dict[str, Any] = json.loads(path.read_text())
        data.keys()
    return data


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Make what goes wrong with what a JSON file holds a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS as error:
        what = str(error) if isinstance(error, Fp4PassError) else f"{error!r:.300}"
        raise CheckpointError(
            f"{path} is damaged, or says what fp4pass does not know: {what.rstrip('.')}. Copy it "
            "again."
        ) from error


def check_float(name: str) -> None:
    """Raise ValueError for what names no floating-point dtype of torch."""
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(expected("dtype", "a floating-point dtype of torch", name))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(data, indent=2) + "\n")
