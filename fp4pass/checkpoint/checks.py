"""What is right in a folder: checksums, shapes, numbers, and what its readers make of its names."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.fingerprint import fingerprint
from ..errors import CheckpointError, expected
from ..kv_cache import KV_CACHE
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..quantization.report import Report
from .files import check_float, read_json, well_formed
from .layouts import PackedLayer, Shapes, fused_problems, matches
from .readers import SERVED

if TYPE_CHECKING:
    from .reader import CheckpointReader
from collections.abc import Callable
from pathlib import Path

from ..errors import UnreadError, some
from .files import opened, tensor_facts

# Attention to something else, where q does not read what k and v read.
_CROSS = re.compile(r"cross|enc[a-z]*_?(dec|attn)", re.IGNORECASE)


def check_shapes(reader: CheckpointReader, shapes: Shapes) -> None:
    """Raise CheckpointError if the tensors of a layer do not fit each other."""
    for layer, facts in reader.layers.items():
        known, names = reader.layout.expected(facts), reader.names(layer)
        if GLOBAL in known and GLOBAL not in names:
            missing = reader.layout.tensor_name(layer, GLOBAL)
            raise CheckpointError(f"{reader.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            (shape, dtype), (allowed, kind) = shapes[name], known.get(part, ((), ""))
            if part in known and (shape not in allowed or dtype != kind):
                raise CheckpointError(
                    f"{reader.files[name]}: {name}: expected {kind} {list(allowed[0])} for a "
                    f"weight {list(facts.shape)} in {facts.fmt.key}, got {dtype} {list(shape)}. "
                    "Copy the folder again."
                )


def check_facts(reader: CheckpointReader) -> None:
    """Raise what `well_formed` expects for what is read later, and is not what it should be."""
    check_float(reader.dtype)
    dict(reader.versions)
    if reader.own is None:
        cache_format_in(reader)
    else:
        _check_mappings(reader.own)
        Report.from_dict(reader.own["report"])
        for layer in (*reader.twins().values(), *reader.layers):
            if PACKED not in reader.names(layer) or SCALE not in reader.names(layer):
                raise ValueError(f"{layer}: expected codes and scales of every layer")
        _check_stacks(reader)
    if reader.config.get("quantization_config") is not None:
        dict(reader.config["quantization_config"])


def _check_mappings(own: Mapping[str, Any]) -> None:
    """Raise TypeError for facts that are no mappings, or map names to something else."""
    always = {"recipe": object, "tensors": Mapping, "aliases": str}
    sometimes = {"config": object, "renamed": str, "cache_scales": float}
    for key, kind in {**always, **sometimes}.items():
        facts = own.get(key, {}) if key in sometimes else own[key]
        if not isinstance(facts, Mapping) or not all(isinstance(e, kind) for e in facts.values()):
            raise TypeError(expected(key, "a mapping as save writes it", f"{facts!r:.100}"))


def missing_input_scales(reader: CheckpointReader) -> dict[str, str]:
    """Return the names of scales of inputs that a folder of another library lacks, by layer."""
    # Ours has them, or means that each input gets one of its own.
    return {
        layer: reader.layout.tensor_name(layer, INPUT_GLOBAL)
        for layer, facts in ({} if reader.own else reader.layers).items()
        if facts.fmt.has_global_scale
        and not facts.config.weight_only
        and INPUT_GLOBAL not in reader.names(layer)
    }


def require_input_scales(reader: CheckpointReader, besides: Container[str] = ()) -> None:
    """Raise CheckpointError for a scale of inputs that is missing, but for some layers."""
    missing = missing_input_scales(reader)
    for name in (missing[layer] for layer in missing if layer not in besides):
        raise CheckpointError(
            f"{reader.folder}: {name} is missing, and these inputs are quantized. Copy the folder "
            "again; or make it dense, which needs none, by fp4pass convert --to bf16."
        )


def _check_stacks(reader: CheckpointReader) -> None:
    """Raise ValueError, LookupError or TypeError for pieces that do not make their stacks."""
    for name, pieces in reader.stacks.items():
        if not pieces or not {piece.name for piece in pieces} <= set(reader.layers):
            raise ValueError(f"{name}: expected packed layers as its pieces")
    for name in reader.joined:
        _check_pieces(name, reader)
    dict(reader.float_layers)


def _check_pieces(name: str, reader: CheckpointReader) -> None:
    """Raise ValueError for pieces that do not fill their stack [E, N, K]."""
    experts, rows, columns = shape = reader.joined[name].shape
    found = 0
    for piece in reader.stacks[name]:
        fits = 0 <= piece.expert < experts and 0 <= piece.start < piece.stop <= rows
        if not fits or reader.layers[piece.name].shape != (piece.stop - piece.start, columns):
            raise ValueError(f"{name}: expected rows of {shape} as its pieces, got {piece}")
        found += piece.stop - piece.start
    if found != experts * rows:
        raise ValueError(f"{name}: expected pieces of {experts * rows} rows, got {found}")


def sum_problem(reader: CheckpointReader, name: str, tensor: Tensor) -> str:
    """Return that a tensor is not what was saved, as far as the folder says, or ""."""
    if (
        reader.own is None
        or fingerprint(tensor) == reader.own["tensors"][reader.on_disk.get(name, name)]
    ):
        return ""
    return "it is not what was saved (its checksum, shape or dtype differs). Copy it again."


def packed_problem(part: str, tensor: Tensor, layer: PackedLayer) -> str:
    """Return what is wrong with the numbers of a stored buffer of a layer, or ""."""
    if part == SCALE and (tensor.view(torch.uint8) > layer.fmt.scale.last).any():
        return (
            "it holds NaN or a negative scale. The checkpoint is damaged, or its weights were not "
            "finite when it was written. Copy it again, or quantize a model that is finite."
        )
    # Readers divide by what others multiply by: 1e-45 is finite, and its reciprocal is not.
    if (
        part in (GLOBAL, INPUT_GLOBAL)
        and not ((tensor > 0) & tensor.isfinite() & (1 / tensor).isfinite()).all()
    ):
        remedy = (
            "An expert that calibration never reached looks like this; fp4pass convert --to bf16 "
            "needs no scale of inputs"
            if part == INPUT_GLOBAL
            else "Copy the folder again, or quantize the model again"
        )
        return (
            f"expected a positive finite number with a finite reciprocal, got {tensor.tolist()}. "
            f"{remedy}."
        )
    return ""


def dense_problem(tensor: Tensor, is_buffer: bool) -> str:
    """Return that a dense tensor is not finite, or ""; masks are buffers of infinities."""
    if tensor.is_floating_point() and tensor.itemsize > 1:
        if tensor.isnan().any() or (not is_buffer and tensor.isinf().any()):
            return (
                "expected finite numbers, got NaN or infinity. Copy the folder again, or quantize "
                "a model that is finite."
            )
    return ""


def problems(
    reader: CheckpointReader, tensors: Iterable[tuple[str, Tensor]], sums: bool
) -> Iterator[tuple[str, str]]:
    """Yield the layers and tensors that are wrong, with the file and what is wrong.

    Checked are the numbers of `tensors`, with `sums` their checksums too, and what engines and
    other programs make of the names of all layers.
    """
    packed = reader.packed_names()
    scales: dict[str, dict[str, float]] = {}
    for name, tensor in tensors:
        found = sum_problem(reader, name, tensor) if sums else ""
        if name in packed:
            layer, part, facts = packed[name]
            found = found or packed_problem(part, tensor, facts)
            if part in (GLOBAL, INPUT_GLOBAL) and not found and not facts.is_stacked:
                scales.setdefault(layer, {})[part] = tensor.item()
        else:
            is_buffer = not name.endswith(("weight", "bias"))
            found = found or dense_problem(tensor, is_buffer)
        if found:
            yield name, f"{reader.files[name].name}: {found}"
    for layer, name in missing_input_scales(reader).items():
        yield (
            layer,
            f"{name} is missing, and its inputs are quantized. fp4pass.load gives experts that "
            "calibration never reached the largest of the others; engines may refuse the folder",
        )
    yield from _fused(reader, scales)
    for file, declared in _declarations(reader):
        with well_formed(reader.folder / file):
            ignored = reader.layout.ignored(declared) or ()
            for name in (each for each in reader.layers if matches(each, ignored)):
                pattern = next(each for each in ignored if matches(name, [each]))
                yield name, f"{file}: it is packed, and {pattern!r} says that it is dense"


def _fused(
    reader: CheckpointReader, scales: Mapping[str, dict[str, float]]
) -> Iterator[tuple[str, str]]:
    """Yield the modules of which engines fuse layers that differ."""
    if not reader.layout.engines:
        return
    architectures = reader.config.get("architectures") or ()
    served = any(str(each).endswith(SERVED) for each in architectures)
    for layer, found in scales.items():
        if not served or _CROSS.search(layer):
            found.pop(INPUT_GLOBAL, None)
    for parent, problem in fused_problems(reader.layers, reader.dense_layers(), scales):
        yield parent, f"config.json: engines multiply by these as by one matrix: {problem}"


def _declarations(reader: CheckpointReader) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the files that declare what is packed, and what they say."""
    if declared := reader.config.get("quantization_config"):
        yield "config.json", declared
    for file in reader.layout.side_files:
        if (reader.folder / file).is_file():
            yield file, read_json(reader.folder / file)


def cache_format_in(reader: CheckpointReader) -> str | None:
    """Return the format of the key-value cache that a folder has scales of, None without one."""
    if reader.own is not None:
        found: str | None = reader.own["recipe"].get(KV_CACHE)
        return found
    return reader.layout.cache_format(reader.declared)


# Numbers of a byte or less, by the names of safetensors; no readable weight is kept in these.
_SMALL_FLOATS = ("F8_", "F6_", "F4")

# What may be codes, and may be a mask or a table: it depends on what lies beside.
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

# What is left of a name then, behind that of the layer.
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
        layer = _layer_of(name)
        beside.setdefault(layer, []).append(name)
        if is_small_float(kind) or _COMPANION.search(name):
            certain.add(layer)
    for layer, names in beside.items():
        codes = [name for name in names if rest[name] in _INTEGERS and len(shapes[name][0]) > 1]
        scales = [name for name in names if _ACCOMPANYING.search(name)]
        if codes and (len(scales) > 0 or any(name.endswith(".weight") for name in codes)):
            certain.add(layer)
    return {
        layer: [f"{name.removeprefix(layer).lstrip('._')} {rest[name]}".strip() for name in names]
        for layer, names in beside.items()
        if layer in certain
    }


def _layer_of(name: str) -> str:
    """Return the layer that a tensor is of, or the stack of experts."""
    for pattern in (_COMPANION, _ACCOMPANYING):
        name = pattern.sub("", name)
    return _REST.sub("", name)


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
    if groups:
        raise UnreadError(_sentence(folder, groups))


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
    kinds = {name: "F8" if _is_small(each) else "" for name, each in tensors.items()}
    if unread := unread_layers({name: ((), kind) for name, kind in kinds.items()}):
        raise CheckpointError(
            f"{some(list(unread))}: expected weights in floating point or packed by fp4pass, got "
            "quantized ones, which no layout declares: others would read them without their "
            "scales. Convert the float model that they were made of."
        )


def _is_small(tensor: object) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    return tensor.is_floating_point() and tensor.itemsize == 1


def _sentence(folder: Path, groups: Mapping[str, Mapping[str, list[str]]]) -> str:
    count = sum(map(len, groups.values()))
    return (
        f"{folder}: fp4pass does not read {count} of its quantized layers: "
        f"{'; '.join(_groups(groups))}. It reads 4-bit weights in nvfp4 and mxfp4. Load the folder "
        "with the library that wrote it, or quantize the float model that it was made of."
    )


def _groups(groups: Mapping[str, Mapping[str, list[str]]]) -> Iterator[str]:
    for group, layers in groups.items():
        name, tensors = next(iter(layers.items()))
        held = f"{name} has {', '.join(sorted(tensors))}"
        yield f"{f'{group}: ' if group else ''}{some(list(layers))} ({held})"


def unread_names(names: Iterable[str]) -> list[str]:
    """Return the names that only quantized weights have."""
    return [name for name in names if _COMPANION.search(name)]
