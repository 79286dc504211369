"""Find the folder that a model was loaded from, and the tensors in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .._compat.transformers import is_pretrained
from ..core.files import parse_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def source_folder(model: nn.Module) -> Path | None:
    """Return the folder that a model of transformers was read from, None for others.

    That of a hub id is its folder in the cache.
    """
    if not is_pretrained(model):
        return None
    root: Any = model
    config = root.config
    return named_folder(str(root.name_or_path or ""), getattr(config, "_commit_hash", None))


def named_folder(name: str, revision: str | None = None) -> Path | None:
    """Return a folder, or that of a hub id in the cache; None where there is none."""
    if not name or os.path.isdir(name):
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        # A folder that is gone.
        return None
    return Path(found).parent if isinstance(found, str) else None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that from_pretrained finds in a folder, {} if it cannot."""
    try:
        for weights in WEIGHTS:
            if (folder / weights).is_file():
                return dict.fromkeys(_shapes(folder / weights), folder / weights)
            index = folder / f"{weights}.index.json"
            if index.is_file():
                listed = parse_json(index.read_text("utf-8"))["weight_map"]
                # Indices can list what is not there, and not what is.
                files = {folder / file for file in listed.values()}
                return {name: path for path in sorted(files) for name in _shapes(path)}
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError, RuntimeError):
        pass
    return {}


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, each in its file."""
    held = {path: _shapes(path) for path in sorted(set(files.values()))}
    return {name: tuple(held[path][name]) for name, path in files.items()}


def _shapes(path: Path) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor of a file."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}
    held = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {name: each.shape for name, each in held.items()}
