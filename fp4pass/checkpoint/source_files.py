"""Read and write the files of a folder: its JSON, fp4pass.json among it, and its tensors."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._version import __version__
from ..core.files import parse_json
from ..errors import CheckpointError, Fp4PassError, expected

# The recipe, the report and the checksums, for which no layout has a place.
MANIFEST = "fp4pass.json"

# Of what the file holds.
VERSION = 3

# Keys of config.json about its making, and not about the model.
_FREE = {"transformers_version", "_name_or_path"}

# Errors of Python for malformed data.
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
    for key, (was, found) in config_changes(config, own).items():
        where = f"{folder / 'config.json'}: {key}"
        what = expected(where, f"{was:.200}", f"{found:.200}")
        raise CheckpointError(
            f"{what} It is not what was saved. Copy the file again; or, if the change is "
            "meant, load into a float model that has it: fp4pass.load(dir, model=model)."
        )


def config_changes(
    config: Mapping[str, Any], own: Mapping[str, Any] | None
) -> dict[str, tuple[str, str]]:
    """Return the keys of config.json that are not as saved, with the JSON of both values."""
    saved = (own or {}).get("config") or config
    both = {
        key: tuple(json.dumps(each.get(key), sort_keys=True) for each in (saved, config))
        for key in sorted({*saved, *config} - _FREE)
    }
    return {key: (was, found) for key, (was, found) in both.items() if was != found}


def checksum_of(data: Mapping[str, Any]) -> str:
    """Return a checksum of values, which formatting the file does not change."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises CheckpointError for anything else."""
    with well_formed(path):
        data: dict[str, Any] = parse_json(path.read_text())
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


# The shape and the safetensors dtype of each tensor of a folder, by its name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]

# Device, number, size and time of a file.
Stamp = tuple[int, int, int, int] | None


def find_shards(folder: Path, weights: str) -> dict[str, Path]:
    """Return the file of each tensor: `weights`, or those of its index. Raises CheckpointError."""
    index, one = folder / f"{weights}.index.json", _inside(folder, weights)
    if not index.is_file():
        return dict.fromkeys(_names(one), one)
    with well_formed(index):
        files = {
            name: _inside(folder, file) for name, file in read_json(index)["weight_map"].items()
        }
    held = {name: path for path in sorted(set(files.values())) for name in _names(path)}
    if held != files:
        differ = sorted({name for name in {*held, *files} if held.get(name) != files.get(name)})
        raise CheckpointError(
            f"{index} does not say what the files hold: {', '.join(differ[:5])}"
            f"{f' and {len(differ) - 5} more' if len(differ) > 5 else ''}. The folder is a mixture "
            "or incomplete; copy it again."
        )
    return files


def _inside(folder: Path, name: str) -> Path:
    """Return a file of a folder. Raises ValueError for a name that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(expected("a file of weights", "a name in the folder", name))
    return folder / name


def _names(path: Path) -> list[str]:
    with opened(path) as file:
        return list(file.keys())


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises CheckpointError where it is missing or cut off."""
    try:
        # A pipe would be waited for.
        if path.exists() and not path.is_file():
            raise OSError("it is no file")
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read, it is missing or cut off: {error}. Copy it again."
        ) from error


def tensor_facts(files: Mapping[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the safetensors dtype of every tensor, by its name."""
    facts = {}
    for path, names in _by_file(files).items():
        with opened(path) as file:
            for name in names:
                part = file.get_slice(name)
                facts[name] = (tuple(part.get_shape()), part.get_dtype())
    return facts


def stamps_of(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return what tells whether files are still the same, None for one that is not there."""
    found: dict[Path, Stamp] = {}
    for path in paths:
        facts = path.stat() if path.exists() else None
        found[path] = facts and (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


def require_same(stamps: Mapping[Path, Stamp]) -> None:
    """Raise CheckpointError for a file that was changed or replaced since."""
    now = stamps_of(stamps)
    if changed := [path for path, stamp in stamps.items() if now[path] != stamp]:
        raise CheckpointError(f"{changed[0]} was changed while it was read. Read the folder again.")


def read_tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name, file by file, in memory of its own.

    The tensors of safetensors are the file itself: they change with it, a cut of the file ends the
    process, and its addresses have kernels add up in another order.
    """
    for path, names in _by_file(files).items():
        stamps = stamps_of([path])
        places = _places(path, stamps[path])
        with opened(path) as file, path.open("rb") as stream:
            require_same(stamps)
            for name in sorted(names, key=places.__getitem__):
                mapped = file.get_tensor(name)
                tensor = torch.empty_like(mapped)
                stream.seek(places[name])
                memory = tensor.reshape(-1).view(torch.uint8).numpy().data
                if stream.readinto(memory) != mapped.nbytes:
                    raise OSError(f"it ends within {name}")
                yield name, tensor


def read_tensor(files: Mapping[str, Path], name: str) -> Tensor:
    """Return one tensor, as `read_tensors` does."""
    return next(tensor for _, tensor in read_tensors({name: files[name]}))


@functools.lru_cache(maxsize=64)
def _places(path: Path, stamp: Stamp) -> Mapping[str, int]:
    """Return where each tensor of a file begins, for the file that has this stamp."""
    places = {}
    with opened(path) as file, path.open("rb") as stream:
        place = 8 + int.from_bytes(stream.read(8), "little")
        for name in file.offset_keys():
            places[name] = place
            place += file.get_tensor(name).nbytes
    return places


def _by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """Return the names of the tensors in each file."""
    found: dict[Path, list[str]] = {}
    for name, path in files.items():
        found.setdefault(path, []).append(name)
    return found
