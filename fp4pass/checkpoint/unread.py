"""Weights that another library quantized in a way that fp4pass does not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, UnreadError, some
from .source_files import Shapes, opened, tensor_facts

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

# The rest of a name, behind that of the layer or of the stack of experts.
_REST = re.compile(r"(?:[._]+weight|_blocks)?[._:]*$")


def is_small_float(kind: str) -> bool:
    """Return whether a dtype of safetensors is a float of 8 bits or less."""
    return kind.startswith(_SMALL_FLOATS)


def unread_layers(shapes: Shapes, read: Container[str] = ()) -> dict[str, list[str]]:
    """Return the layers whose weights are quantized and not read, and what there is of each.

    Args:
        shapes: of all tensors of a folder.
        read: the names of those that a layout reads.
    """
    rest = {name: kind for name, (_, kind) in shapes.items() if name not in read}
    beside: dict[str, list[str]] = {}
    certain: set[str] = set()
    for name, kind in rest.items():
        layer = _REST.sub("", _ACCOMPANYING.sub("", _COMPANION.sub("", name)))
        beside.setdefault(layer, []).append(name)
        if is_small_float(kind) or _COMPANION.search(name):
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


def require_all_read(
    folder: Path,
    shapes: Shapes,
    read: Container[str],
    group_of: Callable[[str], str] = lambda layer: "",
) -> None:
    """Raise UnreadError for weights that are quantized and not read.

    group_of: returns what a config calls the scheme of a layer, "" if it does not say.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for layer, tensors in unread_layers(shapes, read).items():
        groups.setdefault(group_of(layer), {})[layer] = tensors
    if not groups:
        return
    found = []
    for group, layers in groups.items():
        name, tensors = next(iter(layers.items()))
        held = f"{name} has {', '.join(sorted(tensors))}"
        found.append(f"{f'{group}: ' if group else ''}{some(list(layers))} ({held})")
    raise UnreadError(
        f"{folder}: fp4pass does not read {sum(map(len, groups.values()))} of its quantized "
        f"layers: {'; '.join(found)}. It reads nvfp4, mxfp4 and FP8 that "
        "their config declares. Load the folder with the library that wrote it, or quantize the "
        "float model that it was made of."
    )


def require_float(folder: Path, paths: Iterable[Path] | None = None) -> None:
    """Raise UnreadError for quantized weights in a folder whose config declares none.

    paths: its files of weights, by default all.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors") if paths is None else paths):
        with opened(path) as file:
            files |= dict.fromkeys(file.keys(), path)
    require_all_read(folder, tensor_facts(files), ())


def require_writable(tensors: Mapping[str, object]) -> None:
    """Raise CheckpointError for quantized weights of others in a model that is saved for others.

    tensors: those of the model that fp4pass did not pack, by their names.
    """
    shapes: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(tensors, ((), ""))
    for name, each in tensors.items():
        if isinstance(each, Tensor) and each.is_floating_point() and each.itemsize == 1:
            shapes[name] = ((), "F8")
    if unread := unread_layers(shapes):
        raise CheckpointError(
            f"{some(list(unread))}: expected weights in floating point or packed by fp4pass, got "
            "quantized ones, which no layout declares: others would read them without their "
            "scales. Convert the float model that they were made of."
        )


def without_scales(names: Iterable[str]) -> list[str]:
    """Return the names that are none of what lies beside quantized weights."""
    return [n for n in names if not _COMPANION.search(n) and not _ACCOMPANYING.search(n)]


def unread_names(names: Iterable[str]) -> list[str]:
    """Return the names that only quantized weights have."""
    return [name for name in names if _COMPANION.search(name)]
