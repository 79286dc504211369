"""Check a folder: its checksums, shapes and numbers, and the names that others match."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, expected
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ..record.rows import Report
from .layouts import expected_shapes, fused_problems, matches
from .reader import CheckpointReader, packed_problem
from .readers import SERVED
from .source_files import Shapes, check_float, read_json, well_formed

# Attention to something else, where q does not read what k and v read.
CROSS_ATTENTION = re.compile(r"cross|enc[a-z]*_?(dec|attn)", re.IGNORECASE)


def check_shapes(reader: CheckpointReader, shapes: Shapes) -> None:
    """Raise CheckpointError if the tensors of a layer do not fit each other."""
    for layer, facts in reader.layers.items():
        known, names = expected_shapes(reader.layout, facts), reader.names(layer)
        if GLOBAL in known and GLOBAL not in names:
            missing = reader.layout.tensor_name(layer, GLOBAL, facts.fmt)
            raise CheckpointError(f"{reader.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            (shape, dtype), (allowed, kinds) = shapes[name], known.get(part, ((), ()))
            if part in known and (shape not in allowed or dtype not in kinds):
                raise CheckpointError(
                    f"{reader.files[name]}: {name}: expected {kinds[0]} {list(allowed[0])} for a "
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
        layer: reader.layout.tensor_name(layer, INPUT_GLOBAL, facts.fmt)
        for layer, facts in ({} if reader.own else reader.layers).items()
        if facts.has_input_scale and INPUT_GLOBAL not in reader.names(layer)
    }


def require_input_scales(reader: CheckpointReader, besides: Container[str] = ()) -> None:
    """Raise CheckpointError for a scale of inputs that is missing, but for some layers."""
    missing = missing_input_scales(reader)
    for name in (missing[layer] for layer in missing if layer not in besides):
        raise CheckpointError(
            f"{reader.folder}: {name} is missing, and these inputs are quantized. Copy the folder "
            "again; or make it dense, which needs none, by fp4pass transcode --to bf16."
        )


def _check_stacks(reader: CheckpointReader) -> None:
    """Raise ValueError, LookupError or TypeError for pieces that do not make their stacks."""
    for name, pieces in reader.stacks.items():
        if not pieces or not {piece.name for piece in pieces} <= set(reader.layers):
            raise ValueError(f"{name}: expected packed layers as its pieces")
    for name, whole in reader.joined.items():
        experts, rows, columns = shape = whole.shape
        found = 0
        for piece in reader.stacks[name]:
            fits = 0 <= piece.expert < experts and 0 <= piece.start < piece.stop <= rows
            if not fits or reader.layers[piece.name].shape != (piece.stop - piece.start, columns):
                raise ValueError(f"{name}: expected rows of {shape} as its pieces, got {piece}")
            found += piece.stop - piece.start
        if found != experts * rows:
            raise ValueError(f"{name}: expected pieces of {experts * rows} rows, got {found}")
    dict(reader.float_layers)


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
        found = reader.sum_problem(name, tensor) if sums else ""
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
    declared = {"config.json": reader.config.get("quantization_config") or {}}
    for file in reader.layout.side_files:
        if (reader.folder / file).is_file():
            declared[file] = read_json(reader.folder / file)
    for file, said in declared.items():
        with well_formed(reader.folder / file):
            ignored = reader.layout.ignored(said) or ()
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
        if not served or CROSS_ATTENTION.search(layer):
            found.pop(INPUT_GLOBAL, None)
    for parent, problem in fused_problems(reader.layers, reader.dense_layers(), scales):
        yield parent, f"config.json: engines multiply by these as by one matrix: {problem}"


def cache_format_in(reader: CheckpointReader) -> str | None:
    """Return the format of the key-value cache that a folder has scales of, None without one."""
    if reader.own is not None:
        found: str | None = reader.own["recipe"].get(KV_CACHE)
        return found
    return reader.layout.cache.format(reader.declared)
