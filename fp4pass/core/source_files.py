"""The folder that a model was read from: its tensors, and the files beside them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .._compat.transformers_heads import is_pretrained
from .plain_files import parse_json

# The files that from_pretrained looks for, in its order.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# Files of weights, by the ends of their names; others are copied.
WEIGHT_ENDS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".onnx.data", ".tflite", ".pdparams", ".npz", ".engine", ".nemo"),
    *(".mlmodel", ".mlpackage", ".pte", ".pt2", ".llamafile", ".distcp"),
)

# With a number of a part behind: x.gguf.part1of2.
_WEIGHT_PARTS = re.compile(r"\.(gguf|safetensors|bin|onnx_data)[._-]?(part)?[_-]?\d\w*$")

_INDEX = re.compile(r"\.(safetensors|bin|h5|msgpack)\.index(\.[\w-]+)?\.json$")

# The list of sentence-transformers of the folders of the parts behind a model.
_PIPELINE = "modules.json"


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
        for weights in _WEIGHTS:
            if (folder / weights).is_file():
                return dict.fromkeys(_names(folder / weights), folder / weights)
            index = folder / f"{weights}.index.json"
            if index.is_file():
                listed = parse_json(index.read_text("utf-8"))["weight_map"]
                # Indices can list what is not there, and not what is.
                files = {folder / file for file in listed.values()}
                return {name: path for path in sorted(files) for name in _names(path)}
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError, RuntimeError):
        return {}
    return {}


def _names(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(torch.load(path, map_location="meta", weights_only=True, mmap=True))


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, each in its file."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        names = [name for name, where in files.items() if where == path]
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        else:
            held = torch.load(path, map_location="meta", weights_only=True, mmap=True)
            found |= {name: tuple(held[name].shape) for name in names}
    return found


def copy_files(source: Path, target: Path, known: Collection[str] = ()) -> list[str]:
    """Copy the files beside the weights of a folder, and return the names of those left out.

    Other weights are left out, and folders with weights in them but for those of a pipeline of
    sentence-transformers; links that lead out of the folder, too. Hidden files are neither copied
    nor named, nor are the weights that from_pretrained reads and the names that are `known`.
    """
    read = {path.name for path in tensor_files(source).values()}
    known = {*known, *read, *(f"{weights}.index.json" for weights in _WEIGHTS)}
    pipeline, left = pipeline_folders(source), []
    inside = _root_of_links(source)
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in known or path.name == "__pycache__":
            continue
        if path.is_dir() and not path.is_symlink():
            files = list(_files_below(path))
            if path.name not in pipeline and any(map(_is_weights, files)):
                left.append(f"{path.name}/")
                continue
        else:
            files = [path]
            if _is_weights(path):
                left.append(path.name)
                continue
        for file in files:
            name = file.relative_to(source)
            if not file.is_file() or not file.resolve().is_relative_to(inside):
                left.append(str(name))
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)
    return left


def _is_weights(path: Path) -> bool:
    name = path.name.lower()
    ends = name.endswith(WEIGHT_ENDS) or _INDEX.search(name) or _WEIGHT_PARTS.search(name)
    return bool(ends)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, links too; nothing that is hidden."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path


def pipeline_folders(source: Path) -> set[str]:
    """Return the folders that sentence-transformers reads as parts behind the model."""
    try:
        modules = parse_json((source / _PIPELINE).read_text("utf-8"))
        return {Path(each["path"]).parts[0] for each in modules if each["path"]}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _root_of_links(source: Path) -> Path:
    """Return where the files of a folder may lie: in it, or in the repository of a hub's cache."""
    whole = source.resolve()
    return whole.parents[1] if whole.parent.name == "snapshots" else whole
