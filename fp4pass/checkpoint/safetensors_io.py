"""Read and write safetensors files: one, or several with an index."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.progress import current
from ..errors import CheckpointError, OptionError, expected, require_type
from .manifest import read_json, well_formed, write_json

# Device, number, size and time of a file.
Stamp = tuple[int, int, int, int] | None

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str) -> int:
    """Return a size such as "5GB" or "800MiB" in bytes. Raises OptionError for anything else."""
    require_type("max_shard_size", "a size such as '5GB' or '800MiB'", size, int, str)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size).upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise OptionError(expected("max_shard_size", "a size such as '5GB' or '800MiB'", size))
    if isinstance(size, str) and not match[2]:
        # On a command line 5 would be 5 bytes, a file for each tensor.
        raise OptionError(expected("max_shard_size", "a size with its unit, as '5GB'", size))
    return int(float(match[1]) * _UNITS[match[2]])


class ShardWriter:
    """Writes tensors one after the other; at most one file of them is held in memory.

    A file has at most `limit` bytes, or one tensor. One file is called `weights`, such as
    "model.safetensors"; several are numbered as transformers numbers them, with an index.
    """

    def __init__(self, folder: Path, weights: str, limit: int) -> None:
        self.folder, self.weights, self.limit = folder, weights, limit
        self.part: dict[str, Tensor] = {}
        self._addresses: set[int] = set()
        self.size = self.total = 0
        self.parts: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor on the CPU, contiguous."""
        if self.part and self.size + tensor.nbytes > self.limit:
            self._flush()
        # safetensors refuses two tensors in one memory.
        is_shared = tensor.data_ptr() in self._addresses
        self._addresses.add(tensor.data_ptr())
        self.part[name] = tensor.clone() if is_shared else tensor
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def add_file(self, path: Path, sizes: Mapping[str, int]) -> None:
        """Take a whole file in place of its tensors, whose bytes are `sizes`: the same on the disk.

        Only where the file system has no links, or this is another one, it is copied.
        """
        part = self._new_part()
        try:
            part.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, part)
        self.parts.append((part, list(sizes)))
        self.total += sum(sizes.values())

    def _new_part(self) -> Path:
        return self.folder / f"part-{len(self.parts)}"

    def _flush(self) -> None:
        """Write what is held to a file, under a temporary name."""
        path = self._new_part()
        # safetensors makes files that only their owner can read.
        path.touch()
        mode = path.stat().st_mode
        save_file(self.part, path, metadata={"format": "pt"})
        path.chmod(mode)
        current().step(("write",), self.size)
        self.parts.append((path, list(self.part)))
        self.part, self.size = {}, 0
        self._addresses.clear()

    def close(self) -> None:
        """Write the rest, give every file its name, and write the index."""
        if self.part or not self.parts:
            self._flush()
        if len(self.parts) == 1:
            self.parts[0][0].rename(self.folder / self.weights)
            return
        stem, count = self.weights.removesuffix(".safetensors"), len(self.parts)
        index: dict[str, str] = {}
        for i, (path, names) in enumerate(self.parts):
            file = f"{stem}-{i + 1:05}-of-{count:05}.safetensors"
            path.rename(self.folder / file)
            index |= dict.fromkeys(names, file)
        data = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(index.items()))}
        write_json(self.folder / f"{self.weights}.index.json", data)


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

    What safetensors returns is the file itself: it changes with it, its end is that of the process
    where it is cut off, and its addresses have kernels add up in another order.
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
