"""fp4pass.json: the recipe, the report and the checksums, for which no layout has a place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..errors import CheckpointError

MANIFEST = "fp4pass.json"

# Of what the file holds.
VERSION = 3


def write_manifest(folder: Path, data: Mapping[str, Any]) -> None:
    """Write fp4pass.json, with its version and a checksum of what it says."""
    versions = {"version": VERSION, "fp4pass": __version__, "torch": torch.__version__}
    whole = {**versions, **data}
    write_json(folder / MANIFEST, whole | {"sha256": checksum_of(whole)})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what fp4pass.json says, None without one. Raises CheckpointError."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_json(path)
    checksum, version = data.pop("sha256", None), data.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION}, which this fp4pass ({__version__}) reads, got "
            f"{version!r}. Update fp4pass, or write the checkpoint again."
        )
    if checksum != checksum_of(data):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of what it says. Copy it again."
        )
    return data


def checksum_of(data: Mapping[str, Any]) -> str:
    """Return a checksum of values, which formatting the file does not change."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """Return the dtype, the shape and the checksum of a tensor."""
    digest = hashlib.sha256()
    if tensor.numel():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "sha256": digest.hexdigest(),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as configs have it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises CheckpointError for anything else."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Copy it again.") from error
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(data, indent=2) + "\n")
