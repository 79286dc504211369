"""Read and write the files of a folder: its JSON, fp4pass.json among it, and its tensors."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._version import __version__
from ..core.files import parse_json
from ..errors import CheckpointError, Fp4PassError, UnreadError, expected, some

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

# The shape and the safetensors dtype of each tensor of a folder, by its name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]


def write_manifest(folder: Path, data: Mapping[str, Any]) -> None:
    """Write fp4pass.json, with its version and a checksum of what it says."""
    versions = {"version": VERSION, "fp4pass": __version__, "torch": torch.__version__}
    whole = {**versions, **data}
    write_json(folder / MANIFEST, whole | {"sha256": checksum_of(whole)})


def read_manifest(folder: Path, any_version: bool = False) -> dict[str, Any] | None:
    """Return what fp4pass.json says, None without one, with `any_version` for others too."""
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


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(data, indent=2) + "\n")


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


def find_shards(folder: Path, weights: str) -> dict[str, Path]:
    """Return the file of each tensor: `weights`, or those of its index. Raises CheckpointError."""
    index, one = folder / f"{weights}.index.json", _inside(folder, weights)
    if not index.is_file():
        return files_of([one])
    with well_formed(index):
        files = {
            name: _inside(folder, file) for name, file in read_json(index)["weight_map"].items()
        }
    held = files_of(files.values())
    if held != files:
        differ = sorted({name for name in {*held, *files} if held.get(name) != files.get(name)})
        raise CheckpointError(
            f"{index} does not say what the files hold: {some(differ, 5)}. The folder is a mixture "
            "or incomplete; copy it again."
        )
    return files


def _inside(folder: Path, name: str) -> Path:
    """Return a file of a folder. Raises ValueError for a name that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(expected("a file of weights", "a name in the folder", name))
    return folder / name


def files_of(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each tensor in files of safetensors. Raises CheckpointError."""
    found: dict[str, Path] = {}
    for path in sorted({*paths}):
        with opened(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


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


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor of a safetensors dtype, such as BF16 or F8_E4M3."""
    width = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(width[0]) if width else 8) // 8


def read_tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name, file by file, in memory of its own."""
    # The tensors of safetensors are the file itself: they change with it, a cut of the file ends
    # the process, and its addresses have kernels add up in another order.
    for path, names in _by_file(files).items():
        with opened(path) as file, path.open("rb") as stream:
            places = _places(path, path.stat().st_mtime_ns)
            for name in sorted(names, key=places.__getitem__):
                mapped = file.get_tensor(name)
                tensor = torch.empty_like(mapped)
                stream.seek(places[name])
                memory = tensor.reshape(-1).view(torch.uint8).numpy().data
                if stream.readinto(memory) != mapped.nbytes:
                    raise OSError(f"it ends within {name}")
                yield name, tensor


@functools.lru_cache(maxsize=64)
def _places(path: Path, time: int) -> Mapping[str, int]:
    """Return where each tensor of a file begins; time: when it was written."""
    places = {}
    with opened(path) as file, path.open("rb") as stream:
        place = 8 + int.from_bytes(stream.read(8), "little")
        for name in file.offset_keys():
            places[name] = place
            place += file.get_tensor(name).nbytes
    return places


def _by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for name, path in files.items():
        found.setdefault(path, []).append(name)
    return found


# Numbers of a byte or less, by the names of safetensors; no readable weight is kept in these.
_SMALL_FLOATS = ("F8_", "F6_", "F4")

# Dtypes of codes, or of a mask or a table: the tensors beside tell which.
_INTEGERS = ("U8", "I8", "I16", "U16", "I32", "U32")

# The ends of names that only quantized weights have beside them, or instead of them: of
# compressed-tensors, ModelOpt, FP8 of transformers, AWQ, GPTQ and bitsandbytes.
_COMPANION = re.compile(
    r"[._]*(?:weight_(?:scale(?:_inv|_2)?|global_scale|zero_point|g_idx|shape|packed)"
    r"|input_(?:global_scale|zero_point)|scale_inv|qweight|qzeros|SCB|weight_format"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))$"
)

# Those that a float model may have, too; they count beside codes.
_ACCOMPANYING = re.compile(
    r"(?:[._](?:input_scale|output_scale|output_zero_point|scales?|zeros?|zero_points?|g_idx"
    r"|absmax)|[:_](?:scale|zero_point|qdata))$"
)

# The rest of a name, after that of the layer or of the stack of experts.
_REST = re.compile(r"(?:[._]+weight|_blocks)?[._:]*$")


def unread_layers(shapes: Shapes, read: Container[str] = ()) -> dict[str, list[str]]:
    """Return the layers whose weights are quantized and not `read`, and what there is of each."""
    rest = {name: kind for name, (_, kind) in shapes.items() if name not in read}
    beside: dict[str, list[str]] = {}
    certain: set[str] = set()
    for name, kind in rest.items():
        layer = _REST.sub("", _ACCOMPANYING.sub("", _COMPANION.sub("", name)))
        beside.setdefault(layer, []).append(name)
        if kind.startswith(_SMALL_FLOATS) or _COMPANION.search(name):
            certain.add(layer)
    for layer, names in beside.items():
        codes = [name for name in names if rest[name] in _INTEGERS and len(shapes[name][0]) > 1]
        is_weight = any(name.endswith(".weight") for name in codes)
        if codes and (is_weight or any(map(_ACCOMPANYING.search, names))):
            certain.add(layer)
    return {
        layer: [f"{name.removeprefix(layer).lstrip('._')} {rest[name]}".strip() for name in names]
        for layer, names in beside.items()
        if layer in certain
    }


def require_all_read(folder: Path, shapes: Shapes, read: Container[str]) -> None:
    """Raise UnreadError for weights that are quantized and not read."""
    if layers := unread_layers(shapes, read):
        name, tensors = next(iter(layers.items()))
        raise UnreadError(
            f"{folder}: fp4pass does not read {len(layers)} of its quantized layers: "
            f"{some(list(layers))} ({name} has {', '.join(sorted(tensors))}). It reads nvfp4, "
            "mxfp4 and FP8 that their config declares. Load the folder with the library that wrote "
            "it, or quantize the float model that it was made of."
        )


def require_float(folder: Path, paths: Iterable[Path] | None = None) -> None:
    """Raise UnreadError for quantized weights in files of a folder that declares none."""
    files = files_of(folder.glob("*.safetensors") if paths is None else paths)
    require_all_read(folder, tensor_facts(files), ())


def require_writable(tensors: Mapping[str, object]) -> None:
    """Raise CheckpointError for quantized weights of others among what fp4pass did not pack."""
    if unread := unread_names(tensors):
        raise CheckpointError(
            f"{some(unread)}: expected weights in floating point or packed by fp4pass, got "
            "quantized ones, which no layout declares: others would read them without their "
            "scales. Convert the float model that they were made of."
        )


def without_scales(names: Iterable[str]) -> list[str]:
    """Return the names that are none of what lies beside quantized weights."""
    return [n for n in names if not _COMPANION.search(n) and not _ACCOMPANYING.search(n)]


def unread_names(names: Iterable[str]) -> list[str]:
    """Return the names that only quantized weights have."""
    return [name for name in names if _COMPANION.search(name)]
